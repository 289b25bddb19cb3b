"""Pure parts of the command line: tables, texts, trends, ranks, options, envelopes."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace

import pytest

from atoll import units
from atoll.cli.background import merged
from atoll.cli.commands.ps import Row, _answers
from atoll.cli.launch_options import json_or_text, pairs, ranks
from atoll.cli.live import Trend, bars
from atoll.cli.output import (
    Cell,
    Column,
    Table,
    cut,
    display_width,
    dumps,
    envelope,
    error_record,
    one_line,
    pairs_text,
    styled,
    table_text,
)
from atoll.cli.render import (
    Rounds,
    counts_text,
    elapsed_s,
    held_ranks,
    held_text,
    live_table,
    most_important,
    next_commands,
    problems_text,
    progress_line,
    result_lines,
    status_json,
    status_table,
    top_table,
)
from atoll.cli.watch import deferred_interrupt
from atoll.errors import ConfigError, Conflict, Unsupported
from atoll.result import ReplicaOutcome
from atoll.status import Progress, Reason, ReplicaState, ReplicaStatus, RunStatus

NOW = 1000.0
RUNNING = ReplicaStatus(
    0,
    ReplicaState.RUNNING,
    started_at=NOW - 200,
    progress=Progress(round_no=3, metrics={"loss": 2.5, "acc": 0.125}, last_line="step 9", beat_at=NOW - 2),
)
FAILED = ReplicaStatus(
    1,
    ReplicaState.FAILED,
    Reason.OOM,
    "killed by the kernel\nfor want of memory",
    exit_code=137,
    attempt=2,
    started_at=NOW - 100,
    ended_at=NOW - 40,
)
STATUS = RunStatus((RUNNING, FAILED))


def test_a_table_is_aligned_and_numbers_are_on_the_right():
    table = Table((Column("name"), Column("n", is_right=True)), ((Cell("a"), Cell("10")), (Cell("long"), Cell("5"))))
    assert table_text(table) == "name   n\na     10\nlong   5"


def test_a_narrow_terminal_cuts_flexible_columns_and_drops_spare_ones():
    columns = (Column("run"), Column("age", is_spare=True), Column("line", is_flexible=True))
    table = Table(columns, ((Cell("r" * 10), Cell("3m"), Cell("x" * 50)),))
    assert table_text(table, width=40).splitlines()[1] == "rrrrrrrrrr  3m   " + "x" * 22 + "…"
    assert table_text(table, width=26).splitlines() == ["run         line", "rrrrrrrrrr  " + "x" * 13 + "…"]
    assert all(len(line) <= 80 for line in table_text(table, width=80).splitlines())


def test_columns_nobody_fills_are_left_out():
    table = Table((Column("a"), Column("b"), Column("c")), ((Cell("1"), Cell(""), Cell("2")),))
    assert [column.title for column in table.without_empty_columns().columns] == ["a", "c"]


def test_wide_characters_take_two_columns_and_combining_ones_none():
    assert display_width("日本") == 4
    assert display_width("e\u0301") == 1
    assert cut("日本語", 5) == "日本…"
    assert cut("short", 5) == "short"
    assert cut("x", 0) == ""


def test_one_line_is_what_a_terminal_would_show():
    assert one_line("\x1b[31m 10%\r 50%\r100% done\x1b[0m\n") == "100% done"
    assert one_line("a\x00b\x07") == "a·b·"
    assert one_line("\x1b]0;title\x07text") == "text"
    assert one_line("") == ""


def test_styles_are_left_out_where_there_are_no_colours():
    assert styled("ok", "good", colour=False) == "ok"
    assert styled("ok", "good", colour=True) == "\x1b[32mok\x1b[0m"
    assert pairs_text([("a", "1"), ("long", Cell("2"))]) == "  a     1\n  long  2"


def test_the_live_table_says_state_reason_round_metrics_and_last_line():
    text = table_text(live_table(STATUS))
    assert text.splitlines() == [
        "rank  state    reason  round  loss    acc  last line",
        "   0  running              3   2.5  0.125  step 9",
        "   1  failed   oom                         killed by the kernel",
    ]


def test_the_status_table_also_says_exit_code_attempt_and_times():
    title, running, failed = table_text(status_table(STATUS, now=NOW)).splitlines()
    assert title.split() == [
        "rank",
        "state",
        "reason",
        "exit",
        "attempt",
        "time",
        "heartbeat",
        "round",
        "loss",
        "acc",
        "last",
        "line",
    ]
    assert running.split() == ["0", "running", "3m20s", "2s", "3", "2.5", "0.125", "step", "9"]
    assert failed.split()[:6] == ["1", "failed", "oom", "137", "2", "1m"]


def test_the_top_table_shows_the_trend_of_the_leading_metric():
    table = top_table(STATUS, now=NOW, bars=lambda rank: "▁█" if rank == 0 else "", limit=None)
    assert [column.title for column in table.columns][5:8] == ["loss", "acc", "loss trend"]
    assert table.rows[0][7] == Cell("▁█", "busy")


def test_a_heartbeat_that_is_late_is_red():
    late = replace(RUNNING, progress=replace(RUNNING.progress, beat_at=NOW - 90))
    cells = top_table(RunStatus((late,)), now=NOW, bars=lambda _: "", limit=None).rows[0]
    assert Cell("1m30s", "bad") in cells


def test_what_does_not_fit_leaves_those_in_trouble_visible():
    replicas = [ReplicaStatus(k, ReplicaState.RUNNING) for k in range(10)]
    replicas[7] = ReplicaStatus(7, ReplicaState.FAILED)
    replicas[8] = ReplicaStatus(8, ReplicaState.PENDING)
    assert [r.rank for r in most_important(replicas, 4)] == [0, 1, 7, 8]
    assert [r.rank for r in most_important(replicas, 20)] == list(range(10))


def test_a_progress_line_has_counts_rounds_and_the_mean_of_the_leading_metric():
    other = replace(RUNNING, rank=1, progress=Progress(round_no=5, metrics={"loss": 3.5}))
    assert progress_line(RunStatus((RUNNING, other))) == "2 running, rounds 3 to 5, loss 3"
    assert progress_line(RunStatus((FAILED_FIRST,))) == "1 failed"
    assert counts_text(STATUS) == "1 running, 1 failed"


def test_rounds_have_a_total_and_the_time_left_where_they_are_known():
    def at(rank: int, round_no: int, **known: float) -> ReplicaStatus:
        progress = Progress(round_no, {}, "", NOW, **known)  # type: ignore[arg-type]
        return ReplicaStatus(rank, ReplicaState.RUNNING, progress=progress)

    both = RunStatus((at(0, 6, rounds_total=40, eta_s=700.0), at(1, 7, rounds_total=40, eta_s=680.0)))
    assert str(Rounds.of(both)) == "6 to 7 of 40, about 12 min left"
    assert progress_line(both) == "2 running, rounds 6 to 7 of 40, about 12 min left"
    assert progress_line(RunStatus((at(0, 6, rounds_total=40),))) == "1 running, round 6 of 40"
    assert [row[3] for row in live_table(both).rows] == [Cell("6 of 40"), Cell("7 of 40")]
    assert status_json("r", both)["progress"] == {"rounds_done": 6, "rounds_total": 40, "eta_s": 700.0}
    nothing = {"rounds_done": None, "rounds_total": None, "eta_s": None}
    assert status_json("r", RunStatus((FAILED_FIRST,)))["progress"] == nothing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "a few seconds"),
        (12, "about 10 s"),
        (54, "about 50 s"),
        (58, "about 1 min"),
        (3599, "about 60 min"),
        (9000, "about 2.5 h"),
        (36000, "about 10 h"),
        (260_000, "about 3 days"),
    ],
)
def test_an_estimate_is_rounded(seconds, text):
    assert units.rough_text(seconds) == text


def test_a_replica_is_loading_until_its_entry_point_is_called():
    loading = ReplicaStatus(1, ReplicaState.RUNNING, progress=Progress(phase="loading"))
    status = RunStatus((ReplicaStatus(0, ReplicaState.PENDING), loading, replace(RUNNING, rank=2)))
    assert counts_text(status) == "1 pending, 1 loading, 1 running"
    assert counts_text(RunStatus((replace(loading, rank=0),))) == "1 loading"
    assert [row[1] for row in live_table(status).rows][1:] == [Cell("loading", "busy"), Cell("running", "busy")]
    shown = status_json("r", status)
    assert shown["counts"] == {"pending": 1, "running": 2}
    assert [replica["progress"]["phase"] for replica in shown["replicas"]] == [None, "loading", None]


def test_a_full_disk_is_named_with_its_ranks_unless_all_have_it():
    full = [replace(RUNNING, rank=k, progress=Progress(problem="disk full: /s")) for k in range(2)]
    ended = replace(FAILED, rank=2, progress=Progress(problem="disk full: /s"))
    assert problems_text(RunStatus((*full, ended))) == "disk full: /s"
    some = RunStatus((*full, replace(RUNNING, rank=2)))
    assert problems_text(some) == "disk full: /s (ranks 0-1)"
    assert progress_line(some).endswith(", disk full: /s (ranks 0-1)")
    assert status_json("r", some)["problems"] == ["disk full: /s"]
    assert problems_text(STATUS) == ""


def test_what_holds_replicas_back_is_said_once_for_each_reason():
    def pending(rank: int, reason: Reason, message: str) -> ReplicaStatus:
        return ReplicaStatus(rank, ReplicaState.PENDING, reason, message)

    status = RunStatus(
        (
            pending(0, Reason.IMAGE, "ErrImagePull: nope"),
            pending(1, Reason.STARTING, "ContainerCreating"),
            pending(2, Reason.UNSCHEDULABLE, "no node"),
            pending(3, Reason.IMAGE, "ImagePullBackOff: nope"),
        )
    )
    assert held_ranks(status.replicas) == {Reason.IMAGE: [0, 3], Reason.UNSCHEDULABLE: [2]}
    assert held_text(status.replicas) == "image: ErrImagePull: nope (ranks 0,3); unschedulable: no node (rank 2)"
    assert held_text(STATUS.replicas) == ""


def test_a_progress_line_leaves_out_what_the_dead_and_the_silent_said_last():
    def at(rank: int, state: ReplicaState, loss: float, beat_at: float = NOW) -> ReplicaStatus:
        return ReplicaStatus(rank, state, progress=Progress(int(loss), {"loss": loss}, beat_at=beat_at))

    dead, silent = at(1, ReplicaState.FAILED, 9.0), at(2, ReplicaState.RUNNING, 8.0, NOW - 90)
    again = at(3, ReplicaState.PENDING, 7.0)
    running = (at(0, ReplicaState.RUNNING, 2.0), dead, silent, again, at(4, ReplicaState.RUNNING, 4.0, NOW - 9))
    assert progress_line(RunStatus(running)) == "1 pending, 3 running, 1 failed, rounds 2 to 4, loss 3"
    over = (at(0, ReplicaState.SUCCEEDED, 2.0), dead)
    assert progress_line(RunStatus(over)) == "1 succeeded, 1 failed, round 2, loss 2"
    assert progress_line(RunStatus((at(0, ReplicaState.FAILED, 5.0),))) == "1 failed, round 5, loss 5"
    assert progress_line(RunStatus((at(0, ReplicaState.PENDING, 5.0),))) == "1 pending"


def test_rejected_updates_are_counted_for_each_rank_where_there_are_any():
    counts = {1: 2.0, 2: 0.0, 3: float("nan"), 4: 1.0}
    replicas = [replace(RUNNING, rank=k, progress=Progress(3, {"updates_rejected": n})) for k, n in counts.items()]
    status = RunStatus((replace(RUNNING, progress=Progress(3, {"loss": 2.0})), *replicas))
    assert progress_line(status) == "5 running, round 3, loss 2, updates rejected: 2 of rank 1, 1 of rank 4"
    assert "updates" not in progress_line(STATUS)
    assert table_text(live_table(status)).splitlines()[0].split() == [
        "rank", "state", "reason", "round", "loss", "rejected", "last", "line",
    ]  # fmt: skip


FAILED_FIRST = replace(FAILED, rank=0)


def test_time_runs_until_the_last_replica_has_ended():
    assert elapsed_s(STATUS, NOW) == 200
    assert elapsed_s(RunStatus((FAILED_FIRST,)), NOW) == 60
    assert elapsed_s(RunStatus((ReplicaStatus(0, ReplicaState.PENDING),)), NOW) is None


def test_results_are_json_and_cut_for_people():
    outcomes = [
        ReplicaOutcome(0, 0, ReplicaState.SUCCEEDED, Reason.OK, result={"é": [1]}),
        ReplicaOutcome(1, 0, ReplicaState.FAILED, Reason.OOM),
    ]
    assert result_lines(outcomes) == ['rank 0: {"é": [1]}', "rank 1: failed"]
    assert result_lines(outcomes, width=12) == ['rank 0: {"é…', "rank 1: fai…"]


def test_the_way_back_is_quoted_for_the_shell():
    assert ("logs", "atoll logs 'a b' -f") not in next_commands("ab")
    assert ("stop", "atoll cancel 'a b'") in next_commands("a b")


def test_bars_go_from_lowest_to_highest_and_mark_what_is_no_number():
    assert bars([]) == ""
    assert bars([1.0, 1.0]) == "▁▁"
    assert bars([0.0, 7.0, float("nan"), 3.5]) == "▁█×▅"


def test_a_trend_remembers_what_is_new_of_each_rank():
    trend = Trend(width=3)
    for loss in (4.0, 4.0, 3.0, 2.0, 1.0):
        seen = replace(RUNNING, progress=Progress(round_no=int(loss), metrics={"loss": loss}))
        trend.add(RunStatus((seen,)), "loss")
    assert trend.bars(0) == "█▅▁"
    assert trend.bars(1) == ""


@pytest.mark.parametrize(
    ("text", "expected"), [("all", [0, 1, 2, 3]), ("2", [2]), ("0-1,3", [0, 1, 3]), ("3, 1-2,1", [1, 2, 3])]
)
def test_ranks_are_named_singly_or_in_spans(text, expected):
    assert ranks(text, 4) == expected


@pytest.mark.parametrize("text", ["4", "0-4", "x", "", "-1", "2-1"])
def test_ranks_that_are_not_there_are_refused(text):
    with pytest.raises(ConfigError, match="--rank"):
        ranks(text, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 0.001), ("true", True), ("null", None), ('"3"', "3"), ("[1, 2]", [1, 2]), ("plain", "plain")],
)
def test_a_value_is_json_if_it_can_be_and_text_otherwise(text, value):
    assert json_or_text(text) == value
    assert type(json_or_text(text)) is type(value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "{", "3 4", ""])
def test_what_is_not_strict_json_is_text(text):
    assert json_or_text(text) == text


def test_pairs_keep_everything_after_the_first_equals_sign():
    assert pairs(["A=b=c", "B="], "--env") == {"A": "b=c", "B": ""}


def test_json_lines_are_strict_whatever_a_replica_said():
    line = dumps({"loss": float("nan"), "high": float("inf"), "low": -float("inf"), "text": "\ud800é", "t": (1,)})
    assert line.isascii()
    assert json.loads(line) == {"loss": "NaN", "high": "Infinity", "low": "-Infinity", "text": "\ud800é", "t": [1]}


def test_the_envelope_says_ok_only_for_code_0():
    assert envelope("ps", 0, {}, None)["ok"] is True
    assert envelope("ps", 3, None, {"code": "X"})["ok"] is False


def test_errors_carry_their_single_problems():
    assert error_record(Unsupported("local", "r", ["one", "two"]))["problems"] == ["one", "two"]
    assert error_record(Conflict("r", ["a differs"]))["differences"] == ["a differs"]


@pytest.mark.parametrize(("interrupts", "is_finished"), [(0, True), (1, True), (2, False)])
def test_only_the_first_interrupt_is_held_until_the_work_is_done(interrupts, is_finished):
    done = []

    def work() -> None:
        with deferred_interrupt("later"):
            for _ in range(interrupts):
                os.kill(os.getpid(), signal.SIGINT)
            done.append("work")

    if interrupts:
        with pytest.raises(KeyboardInterrupt):
            work()
    else:
        work()
    assert bool(done) is is_finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_merged_streams_end_at_the_time_limit_and_keep_what_has_come():
    never = threading.Event()

    def hangs():
        never.wait()
        yield "late"

    assert list(merged({0: hangs(), 1: iter(["a"])}, within_s=0.5)) == [(1, "a")]
    never.set()


def test_ps_asks_every_run_and_lists_one_that_does_not_answer_as_unreachable():
    never = threading.Event()

    def ask(number: int) -> Row:
        if number == 1:
            never.wait()
        return Row(f"r{number}", "memory:", state="running")

    unanswered = [Row(f"r{number}", "memory:") for number in range(20)]
    rows = _answers(ask, range(20), unanswered, within_s=1.0)
    assert [row.run_id for row in rows] == [f"r{number}" for number in range(20)]
    assert [row.state for row in rows] == ["unreachable" if number == 1 else "running" for number in range(20)]
    assert _answers(ask, [], [], within_s=1.0) == []
    never.set()


def test_merged_streams_give_every_line_and_end():
    assert sorted(merged({0: iter(["a", "b"]), 1: iter(["c"])})) == [(0, "a"), (0, "b"), (1, "c")]
    assert list(merged({3: iter(["only"])})) == [(3, "only")]


def test_trouble_in_one_of_merged_streams_is_raised():
    def broken():
        yield "fine"
        raise ConfigError("not fine")

    with pytest.raises(ConfigError, match="not fine"):
        list(merged({0: broken(), 1: iter(())}))
