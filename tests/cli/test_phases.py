"""Phases of rounds, units of metrics, and whom a round waits for: what `top` and `status` show of them."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import pytest
from cli_terminal import terminal
from rich.console import Console
from rounds_of_a_run import SIZE, hold_rounds, joined, store_at

from atoll.cli.live import waiting_lines
from atoll.cli.output import table_text
from atoll.cli.phases import legend, phases_table, round_json, seconds_text, shape
from atoll.cli.render import live_table, metric_text, shown_metrics
from atoll.cli.waits import advice_text, outlook_text, waiting_text
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.metrics import Outlook, Waiting, latest_records, round_records, waiting_for
from atoll.rounds.timeline import PhaseTime, RoundRecord
from atoll.status import Progress, ReplicaState, ReplicaStatus, RunStatus

RECORD = RoundRecord(
    rank=1, incarnation=0, round_no=12, fragment=0, time=100.0, exchange_s=4.0, exposed_s=3.0, is_over=True,
    is_included=True,
    phases={
        "compute": PhaseTime(12.0, 12.0, 1, ((-12.0, 12.0),)),
        "put": PhaseTime(3.0, 2.0, 3, ((0.0, 2.0),)),
        "wait": PhaseTime(2.0, 2.0, 1, ((2.0, 2.0),)),
    },
    bytes_up=80_580, bytes_down=161_000, requests={"get": 3, "put": 4}, retries=2,
)  # fmt: skip


def test_phases_are_shares_of_the_time_from_the_first_inner_step_to_the_outer_step():
    title, row = table_text(phases_table({1: RECORD}, [0, 1]).without_empty_columns()).splitlines()
    assert title.split() == [
        "rank", "last", "round", "took", "shape", "compute", "put", "wait", "exposed", "hidden", "up", "down",
        "requests", "retries",
    ]  # fmt: skip
    assert row.split() == [
        "1", "12", "15s", "c" * 18 + "pppwww", "75", "%", "12", "%", "12", "%", "20", "%", "25", "%",
        "80.6", "kB", "161", "kB", "7", "2",
    ]  # fmt: skip


def test_no_phase_of_an_overlapped_round_has_more_than_the_whole_time():
    """The exchange goes on while the next round trains, and takes longer than this round did."""
    waited = {"compute": PhaseTime(2.0, 2.0, 1, ((-2.0, 2.0),)), "wait": PhaseTime(8.0, 8.0, 1, ((0.0, 8.0),))}
    record = replace(RECORD, exchange_s=8.0, exposed_s=1.0, phases=waited)
    assert record.wall_s("wait") > record.total_s
    table = phases_table({1: record}, [1])
    cells = dict(zip([column.title for column in table.columns], table.rows[0], strict=True))
    assert [cells[name].text for name in ("took", "compute", "wait", "exposed")] == ["3.0s", "20 %", "80 %", "33 %"]


def test_a_narrow_terminal_keeps_what_matters():
    title = table_text(phases_table({1: RECORD}, [1]), width=80).splitlines()[0].split()
    assert {"rank", "round", "took", "compute", "exposed", "hidden", "up", "down"} <= set(title)
    assert "shape" not in title


def test_the_letters_are_explained_where_there_are_some():
    table = phases_table({1: RECORD}, [1])
    assert legend(table, 80) == ""
    assert legend(table, 200).startswith("shape: c compute, ")
    least = next(width for width in range(200) if legend(table, width))
    assert len(legend(table, least)) <= least


def test_while_a_run_goes_on_it_is_said_how_long_ago_its_last_round_was():
    title, row = table_text(phases_table({1: RECORD}, [1], now=111.5)).splitlines()
    assert title.split()[:4] == ["rank", "last", "round", "ago"]
    assert row.split()[:3] == ["1", "12", "7s"]


def test_a_round_that_never_ended_is_marked():
    hung = replace(RECORD, is_over=False)
    assert phases_table({1: hung}, [1]).rows[0][1].text == "12?"


def test_the_shape_of_nothing_is_empty_and_gaps_are_dashes():
    assert shape(RoundRecord(0, 0, 0, 0, 0.0, 0.0, 0.0, True, True)) == ""
    assert shape(replace(RECORD, phases={"get": PhaseTime(1, 1, 1, ((3.0, 1.0),))}), 8) == "------gg"


def test_for_programs_there_are_sums_and_no_intervals():
    data = round_json(RECORD)
    assert data["phases"]["put"] == {"busy_s": 3.0, "wall_s": 2.0, "count": 3}
    assert (data["total_s"], data["hidden_share"]) == (15.0, 0.25)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0042, "4ms"), (0.9996, "1.0s"), (3.21, "3.2s"), (95, "95s"), (900, "15m"), (9000, "2.5h")]
)
def test_short_times_have_a_digit_more(seconds, text):
    assert seconds_text(seconds) == text


def test_metrics_have_units_and_ours_come_last():
    metrics = {"bytes": 3.0, "bytes_down": 161_000.0, "bytes_up": 80_580.0, "wait_share": 0.257, "hidden_share": 0.8,
               "lr": 1e-3, "loss": 2.5}  # fmt: skip
    replica = ReplicaStatus(0, ReplicaState.RUNNING, progress=Progress(round_no=3, metrics=metrics))
    status = RunStatus((replica,))
    assert shown_metrics(status) == ["loss", "lr", "wait_share", "hidden_share", "bytes_up", "bytes_down"]
    title, row = table_text(live_table(status).without_empty_columns()).splitlines()
    assert title.split() == ["rank", "state", "round", "loss", "lr", "wait", "hidden", "up", "down"]
    assert row.split()[3:] == ["2.5", "0.001", "26", "%", "80", "%", "80.6", "kB", "161", "kB"]


def test_a_share_that_is_none_is_just_a_number():
    assert metric_text("my_share", 3.5) == "3.5"
    assert metric_text("bytes", 1e6) == "1.00 MB"


def test_many_metrics_of_the_user_leave_room_for_ours():
    metrics = {f"m{number:02d}": 1.0 for number in range(20)} | {"wait_share": 0.5}
    status = RunStatus((ReplicaStatus(0, ReplicaState.RUNNING, progress=Progress(metrics=metrics)),))
    assert shown_metrics(status) == [*(f"m{number:02d}" for number in range(7)), "wait_share"]


def test_who_is_waited_for_is_read_from_the_offers(tmp_path):
    import threading

    import numpy as np

    store = store_at(tmp_path)
    assert waiting_for(store, "r", 2) is None
    with joined(store, "r", 0, 2) as first, joined(store, "r", 1, 2) as second:
        update = np.ones(SIZE, np.float32)
        arrived = threading.Thread(target=first.exchange, args=(0, update), kwargs={"weight": 1.0})
        arrived.start()
        while waiting_for(store, "r", 2) is None:
            pass
        assert waiting_for(store, "r", 2) == Waiting(0, (0,), (1,))
        second.exchange(0, update, weight=1.0)
        arrived.join()
        assert waiting_for(store, "r", 2) is None, "round 0 is over, and nobody is at round 1"


def test_a_rank_that_said_goodbye_is_not_waited_for(tmp_path):
    store = store_at(tmp_path)
    hold_rounds(store, "r", ranks=2, rounds=1)
    with joined(store, "r", 0, 2):
        store.put("runs/r/sync/rounds/0000000001/offer/00000.000", b"")
        assert waiting_for(store, "r", 3) == Waiting(1, (0,), (2,))


NOW = 10_000.0
FOUR = RunStatus(tuple(ReplicaStatus(k, ReplicaState.FAILED if k == 3 else ReplicaState.RUNNING) for k in range(4)))


def test_the_reason_names_the_state_of_those_that_are_missing():
    assert re.fullmatch("round 12 .* rank 2", waiting_text(Waiting(12, (0, 1), (2,)), FOUR, NOW))
    assert re.fullmatch(r"round 12 .* ranks 1, 3 \(rank 3 failed\)", waiting_text(Waiting(12, (0,), (1, 3)), FOUR, NOW))
    assert re.fullmatch(r"round 12 .* rank 3 \(failed\)", waiting_text(Waiting(12, (0,), (3,)), FOUR, NOW))
    pending = FOUR.with_replicas(replace(r, state=ReplicaState.PENDING) for r in FOUR.replicas)
    both, three = (waiting_text(Waiting(12, (), missing), pending, NOW) for missing in ((1, 3), (1, 2, 3)))
    assert re.fullmatch(r"round 12 .* ranks 1, 3 \(\w+ pending\)", both)
    assert re.fullmatch(r"round 12 .* ranks 1, 2, 3 \(\w+ pending\)", three)
    assert waiting_text(None, FOUR, NOW) == ""
    assert re.fullmatch("round 1 .* ranks 1, 2, 3, 4, 5, 6, 7, 8, …", str(Waiting(1, (0,), tuple(range(1, 20)))))


def test_a_replica_that_is_said_to_run_and_is_not_heard_of_is_silent():
    silent = replace(FOUR.replicas[2], progress=Progress(beat_at=NOW - 200))
    status = FOUR.with_replicas([*FOUR.replicas[:2], silent, FOUR.replicas[3]])
    waiting = Waiting(12, (0, 1), (2,))
    assert re.fullmatch(r"round 12 .* rank 2 \(.*3m20s\)", waiting_text(waiting, status, NOW))
    assert re.fullmatch("round 12 .* rank 2", waiting_text(waiting, status, NOW - 150))


LOGS_2, LOGS_3, CANCEL = "`atoll logs 'a b' --rank 2`", "`atoll logs 'a b' --rank 3`", "`atoll cancel 'a b'`"


@pytest.mark.parametrize(
    ("arrived", "missing", "outlook", "values"),
    [
        ((0, 1), (2,), None, []),
        ((0, 1, 2), (3,), None, [LOGS_3]),
        ((0, 1, 3), (2,), (1740, False, None), ["29m", LOGS_2]),
        ((0, 1), (2, 3), (1740, False, None), ["rank 3 ", "29m", LOGS_3, CANCEL]),
        ((1,), (0, 2, 3), (1740, False, 4), ["rank 3 ", "29m", LOGS_3, CANCEL]),
        ((0, 1), (2, 3), (1740, False, 3), ["29m", LOGS_3]),
        ((0, 1, 3), (2,), (12.5, True, 3), ["12s"]),
        ((0, 1), (2, 3), (-4, True, 2), [LOGS_3]),
    ],
)
def test_what_happens_next_is_said_and_what_one_can_do(arrived, missing, outlook, values):
    told = None if outlook is None else Outlook(NOW + outlook[0], *outlook[1:])
    text = outlook_text(Waiting(12, arrived, missing, told), FOUR, "a b", NOW)
    assert re.findall(r"^rank 3 |\d+[ms]\b|`[^`]*`", text) == values
    assert bool(text) is (outlook is not None or 3 in missing)
    assert outlook_text(None, FOUR, "a b", NOW) == ""


def test_that_a_round_goes_on_is_said_otherwise_than_that_it_fails():
    fails, goes_on = (
        outlook_text(Waiting(12, (0, 1, 3), (2,), Outlook(NOW + 60, is_commit, 3)), FOUR, "r", NOW)
        for is_commit in (False, True)
    )
    assert "1m" in fails
    assert "1m" in goes_on
    assert fails != goes_on


def test_of_several_that_are_over_it_is_said_how_many_are_needed():
    ended = FOUR.with_replicas(replace(r, state=ReplicaState.FAILED) for r in FOUR.replicas)
    one = outlook_text(Waiting(12, (2, 3), (0, 1), Outlook(NOW + 60, False, 3)), ended, "r", NOW)
    assert re.match(r"ranks 0, 1 .*\b1m\b", one)
    two = outlook_text(Waiting(12, (3,), (0, 1, 2), Outlook(NOW + 60, False, 3)), ended, "r", NOW)
    assert re.match(r"ranks 0, 1, 2 .*\b2\b.*\b1m\b", two)


def test_who_waits_for_a_dead_replica_is_told_how_not_to_do_so_again():
    waiting = Waiting(12, (0, 1), (2, 3), Outlook(NOW + 1740, False, None))
    told = advice_text(waiting, FOUR, could_restart=True)
    assert re.findall("`.*?`", told) == ["`--max-restarts N`", "`--fail-fast`", "`DiLoCo(quorum=N)`"]
    assert "--max-restarts" not in advice_text(waiting, FOUR, could_restart=False)
    kept = replace(waiting, is_committed=True)
    assert re.findall("`.*?`", advice_text(kept, FOUR, could_restart=False)) == ["`--fail-fast`"]
    assert advice_text(replace(waiting, missing=(2,)), FOUR, could_restart=True) == ""
    assert advice_text(None, FOUR, could_restart=True) == ""


def test_what_one_can_do_is_shown_whole_on_a_narrow_terminal():
    waiting = Waiting(12, (0, 1), (2, 3), Outlook(NOW + 1740, False, None))
    lines = waiting_lines("run", FOUR, waiting, NOW, Console(width=40))
    assert all(len(str(line)) <= 40 for line in lines)
    whole = " ".join(str(line).rstrip() for line in lines)
    told = (waiting_text(waiting, FOUR, NOW), outlook_text(waiting, FOUR, "run", NOW))
    assert whole.startswith(" ".join(told))
    assert "`--fail-fast`" in whole
    assert [str(line) for line in waiting_lines("run", FOUR, None, NOW, Console(width=40))] == [""]


def test_the_latest_records_are_one_for_each_rank(tmp_path):
    store = store_at(tmp_path)
    hold_rounds(store, "r", ranks=2, rounds=3)
    assert {rank: record.round_no for rank, record in latest_records(store, "r").items()} == {0: 2, 1: 2}
    assert [(r.rank, r.round_no) for r in round_records(store, "r")] == [(k, no) for k in (0, 1) for no in range(3)]


JOB = """
import os, time
import numpy as np
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout

def rounds(ctx, *, count=2, gate=None):
    layout = Layout.of([("w", [4096], "float32")])
    with RoundClient(ctx.store, ctx.run_id, ctx.rank, ctx.world_size, layouts=[layout]) as client:
        client.join([np.zeros(4096, np.float32).tobytes()])
        for round_no in range(count):
            if gate and ctx.rank == 1 and round_no == 1:
                print("rank 1 idles", flush=True)
                while not os.path.exists(gate):
                    time.sleep(0.02)
            client.exchange(round_no, np.ones(4096, np.float32), weight=1.0)
            client.mark("apply", time.monotonic())
            used = client.counters
            ctx.log(round_no=round_no, loss=0.5, bytes_up=used.bytes_up, bytes_down=used.bytes_down)
        client.leave()
"""


def test_top_shows_the_phases_of_a_run(cli):
    (cli.folder / "roundjob.py").write_text(JOB)
    run = cli.detached("roundjob:rounds", "-n", 2)
    assert cli("wait", run).code == 0
    shown = cli("top", run)
    assert shown.code == 0, shown.stderr
    _, _, rounds = shown.stdout.partition("last round of each rank:\n")
    assert rounds.splitlines()[0].split()[:5] == ["rank", "last", "round", "took", "shape"]
    assert [row.split()[:2] for row in rounds.splitlines()[1:]] == [["0", "1"], ["1", "1"]]
    data = cli("top", run, "--json").data
    assert set(data["rounds"]) == {"0", "1"}
    assert data["rounds"]["0"]["phases"]["put"]["busy_s"] > 0
    assert " kB" in shown.stdout


def test_status_says_whom_a_round_waits_for(cli):
    (cli.folder / "roundjob.py").write_text(JOB)
    gate = cli.folder / "gate"
    run = cli.detached("roundjob:rounds", "-n", 2, "--arg", f"gate={gate}")
    while (data := cli("status", run, "--json").data).get("waiting", {}).get("round") != 1:
        assert data["state"] in ("pending", "running")
    assert data["waiting"].items() >= {"round": 1, "for": [1]}.items()
    assert re.search("^waiting +round 1 .* rank 1$", cli("status", run).stdout, re.M)
    told = {"event": "waiting", "by": 0, "round": 1, "time": 9e9, "until": 9e9, "then": "give_up", "least": None}
    open_store(data["store"]).put(RoundKeys(run).events(0, 99, 0), json.dumps(told).encode())
    shown = cli("status", run).stdout
    assert re.search(f"^next +.*`atoll logs {run} --rank 1`", shown, re.M)
    assert cli("status", run, "--json").data["waiting"] == {"round": 1, "for": [1], "then": "give_up", "until": 9e9}
    gate.touch()
    assert cli("wait", run).code == 0
    assert "waiting" not in cli("status", run, "--json").data


def test_the_screen_shows_the_last_rounds_and_whom_the_next_waits_for(cli):
    (cli.folder / "roundjob.py").write_text(JOB)
    gate = cli.folder / "gate"
    run = cli.detached("roundjob:rounds", "-n", 2, "--arg", f"gate={gate}")
    with terminal(cli, "top", run, rows=24, columns=200) as screen:
        for word in (str(Waiting(1, (0,), (1,))), "shape: c compute", "exposed", "hidden", "requests", "q quits"):
            assert word in screen.until(word)
        gate.touch()
        screen.until("succeeded")
        screen.press("q")
        assert screen.end() == 0
    assert cli("wait", run).code == 0


def test_the_lines_of_a_run_without_a_terminal_say_whom_it_waits_for(cli):
    (cli.folder / "roundjob.py").write_text(JOB)
    gate = cli.folder / "gate"
    run = cli.detached("roundjob:rounds", "-n", 2, "--arg", f"gate={gate}")
    while cli("status", run, "--json").data.get("waiting", {}).get("round") != 1:
        pass
    process = cli.start("status", run, "--watch", stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert str(Waiting(1, (0,), (1,))) in process.stderr.readline().decode()
    gate.touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
