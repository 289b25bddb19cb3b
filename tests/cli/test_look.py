"""`ps`, `status`, `logs`, `wait`, `result` and `top`: looking at runs from other processes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from cli_terminal import terminal

from atoll import journal
from atoll.runs.prepare import prepare


def test_status_shows_the_run_and_every_rank(finished):
    done = finished.cli("status", finished.bad)
    assert done.code == 0
    head, _, table = done.stdout.partition("\n\n")
    assert "run       went-badly" in head
    assert "state     failed" in head
    assert "replicas  1 succeeded, 1 failed" in head
    rows = table.splitlines()
    assert rows[0].split()[:2] == ["rank", "state"]
    assert rows[1].split()[:2] == ["0", "succeeded"]
    assert "user_error" in rows[2]
    assert "no good" in rows[2]


def test_status_as_json_has_every_rank_in_order(finished, inside):
    data = inside.at(finished.cli)("status", finished.ok, "--json").data
    assert [r["rank"] for r in data["replicas"]] == [0, 1]
    assert data["counts"] == {"succeeded": 2}
    assert data["replicas"][0]["progress"]["round_no"] == 1


def test_a_handle_is_as_good_as_an_id(finished, inside):
    handle = inside.at(finished.cli)("status", finished.ok, "--json").data["handle"]
    assert inside.at(finished.cli)("status", handle, "--json").data["run_id"] == finished.ok


def test_a_run_is_found_by_its_store_alone(finished, inside):
    store = finished.cli("status", finished.ok, "--json").data["store"]
    assert inside("status", finished.ok).code == 3
    assert inside("status", finished.ok, "--store", store, "--json").data["state"] == "succeeded"


def test_a_handle_alone_finds_a_run_of_another_home(finished, inside):
    handle = finished.cli("status", finished.ok, "--json").data["handle"]
    assert inside("status", handle, "--json").data["run_id"] == finished.ok


def test_a_run_whose_launcher_died_before_starting_it_can_be_looked_at(inside):
    draft = prepare("job:ok", run_id="half")
    journal.record_run(draft.store, draft.spec, executor="local")
    done = inside("status", "half")
    assert done.code == 0
    found = inside("status", "half", "--json").data
    assert (found["state"], found["handle"]) == ("pending", None)
    assert inside("logs", "half").stdout == ""
    assert inside("ps", "--store", draft.store.uri, "--json").data["runs"][0]["state"] == "pending"
    assert inside("run", "job:ok", "--run-id", "half").code == 0


def test_status_watch_streams_until_the_end(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "--arg", f"gate={gate}")
    process = cli.start("status", run, "--watch", "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["event"], first["data"]["run_id"]) == ("status", run)
    gate.touch()
    *_, last = process.communicate(timeout=60)[0].splitlines()
    assert json.loads(last)["data"]["state"] == "succeeded"


def test_ps_lists_runs_from_the_local_index(finished):
    done = finished.cli("ps")
    assert done.code == 0
    title, newest, oldest = done.stdout.splitlines()
    assert title.split() == ["run", "state", "replicas", "backend", "age", "store"]
    assert newest.split()[:2] == ["went-badly", "failed"]
    assert oldest.split()[:4] == ["went-well", "succeeded", "2", "local"]


def test_ps_of_a_store_needs_no_index(finished, inside):
    store = finished.cli("status", finished.ok, "--json").data["store"]
    rows = inside("ps", "--store", store, "--json").data["runs"]
    assert [(row["run_id"], row["state"]) for row in rows] == [("went-badly", "failed"), ("went-well", "succeeded")]
    assert [row["counts"] for row in rows] == [{"succeeded": 1, "failed": 1}, {"succeeded": 2}]


def test_ps_with_nothing_to_show_says_how_to_start(inside):
    done = inside("ps")
    assert (done.code, done.stdout) == (0, "")
    assert "atoll run" in done.stderr


def test_ps_tells_an_empty_store_from_a_folder_that_is_not_there(inside, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "there is no such folder" not in inside("ps", "--store", str(tmp_path / "empty")).stderr
    assert "there is no such folder" in inside("ps", "--store", str(tmp_path / "missing")).stderr
    assert not (tmp_path / "missing").exists()


def test_ps_shows_what_it_cannot_reach_and_never_fails(inside):
    known = {
        "elsewhere": {"store": "redis://nowhere", "handle": "local://h/x?replicas=1"},
        "deleted": {"store": (inside.folder / "none").as_uri(), "handle": "local://h/y?replicas=1"},
        "damaged": {"store": (inside.folder / "store").as_uri(), "handle": "nonsense"},
    }
    record = inside.folder / "store" / "runs" / "damaged" / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text("{")
    index = inside.home / "index"
    index.mkdir(parents=True)
    for number, (run_id, rest) in enumerate(known.items()):
        (index / f"{number}.json").write_text(json.dumps({"run_id": run_id, "at": 1000.0, **rest}))
    (index / "garbage.json").write_text("{")
    done = inside("ps", "--json")
    assert done.code == 0
    states = {row["run_id"]: row["state"] for row in done.data["runs"]}
    assert states == {"elsewhere": "unreachable", "deleted": "gone", "damaged": "unreachable"}
    assert "`redis`" in inside("ps").stdout


def test_ps_shows_the_newest_twenty_unless_asked_for_all(inside):
    index = inside.home / "index"
    index.mkdir(parents=True)
    for number in range(25):
        known = {"run_id": f"r{number}", "store": "memory://x", "handle": "local://h/x?replicas=1", "at": float(number)}
        (index / f"{number}.json").write_text(json.dumps(known))
    done = inside("ps", "--json")
    assert [row["run_id"] for row in done.data["runs"]] == [f"r{n}" for n in range(24, 4, -1)]
    assert done.data["older"] == 5
    assert re.search(r"\b5\b.*`atoll ps --all`", inside("ps").stderr)
    assert len(inside("ps", "--all", "--json").data["runs"]) == 25


def test_logs_of_several_ranks_begin_with_the_rank(finished):
    done = finished.cli("logs", finished.ok)
    assert done.code == 0
    assert done.stdout == "0 | rank 0 step 0\n0 | rank 0 step 1\n1 | rank 1 step 0\n1 | rank 1 step 1\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rank", "1"], ["rank 1 step 0", "rank 1 step 1"]),
        (["--rank", "0", "--tail", "1"], ["rank 0 step 1"]),
        (["--rank", "0", "--tail", "0"], []),
        (["--rank", "0-1", "--grep", "step 1$"], ["0 | rank 0 step 1", "1 | rank 1 step 1"]),
        (["--rank", "0", "--grep", "step", "--tail", "1"], ["rank 0 step 1"]),
        (["--rank", "0", "--attempt", "0"], ["rank 0 step 0", "rank 0 step 1"]),
        (["--rank", "0", "--attempt", "5"], []),
        (["--rank", "0", "--since", "1h"], ["rank 0 step 0", "rank 0 step 1"]),
        (["--rank", "0", "--since", "0"], []),
    ],
)
def test_logs_can_be_narrowed(finished, inside, options, expected):
    done = inside.at(finished.cli)("logs", finished.ok, *options)
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("options", [["--rank", "2"], ["--rank", "x"], ["--rank", "1-0"], ["--grep", "("]])
def test_logs_refuse_what_makes_no_sense(finished, inside, options):
    assert inside.at(finished.cli)("logs", finished.ok, *options).code == 2


def test_logs_as_json_are_one_line_each_and_an_envelope(finished):
    *lines, last = finished.cli("logs", finished.ok, "--rank", "0", "--json").lines()
    assert [line["data"] for line in lines] == [
        {"rank": 0, "line": "rank 0 step 0"},
        {"rank": 0, "line": "rank 0 step 1"},
    ]
    assert last["ok"] is True


def test_logs_follow_merges_ranks_and_ends_with_the_run(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "-n", 3, "--arg", f"gate={gate}")
    process = cli.start("logs", run, "-f", stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen = {process.stdout.readline().decode() for _ in range(3)}
    assert seen == {f"{k} | rank {k} waits\n" for k in range(3)}
    gate.touch()
    rest = process.communicate(timeout=60)[0].decode().splitlines()
    assert sorted(rest) == [f"{k} | rank {k} goes" for k in range(3)]
    assert process.returncode == 0


def test_logs_are_shown_as_a_terminal_shows_them_and_kept_as_they_were_printed(cli):
    run = cli.detached("job:raw")
    assert cli("wait", run).code == 0
    shown = ["café \\xff\\xfe", "red", "100%|##"]
    assert cli("logs", run).stdout.splitlines() == shown
    assert [line["data"]["line"] for line in cli("logs", run, "--json").lines()[:-1]] == shown
    assert cli("logs", run, "--grep", "^100%").stdout == "100%|##\n"
    assert cli("status", run, "--json").data["replicas"][0]["progress"]["last_line"] == "100%|##"
    with terminal(cli, "logs", run) as screen:
        assert screen.end() == 0
        assert "\x1b[31mred\x1b[0m" in screen.drawn
        assert "\x1b[32m100%|##\x1b[0m" in screen.drawn
        assert not [word for word in ("\x1b[A", "\x1b]0;", "title", "10%|#\r") if word in screen.drawn]
    (log,) = Path(cli.env["ATOLL_HOME"]).glob("local/*/00000/000/log")
    assert log.read_bytes().endswith(b"\x1b]0;title\x07 10%|#\r\x1b[A\x1b[32m100%|##\n")


def test_a_progress_bar_is_followed_on_a_terminal_before_its_line_ends(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:bar", "--arg", f"gate={gate}")
    with terminal(cli, "logs", run, "-f") as screen:
        assert "begin" in screen.until("50%|##")
        gate.touch()
        screen.until("100%|###")
        assert screen.end() == 0
        assert [screen.plain.count(state) for state in ("10%|#", "50%|##", "100%|###")] == [0, 1, 1]
    assert cli("logs", run, "-f").stdout == "begin\n100%|###\n"
    assert cli("wait", run).code == 0


def test_result_is_one_line_of_json_per_rank(finished):
    done = finished.cli("result", finished.ok)
    assert done.code == 0
    assert done.stdout == 'rank 0: {"rank": 0}\nrank 1: {"rank": 1}\n'


def test_warnings_about_return_values_are_shown_with_the_run(inside):
    started = inside("run", "job:odd", "--replicas", "2", "--wait", "--json").data
    run, warning = started["run_id"], "result.model: a `object` is not JSON; its repr is kept"
    assert [outcome["warnings"] for outcome in started["result"]["outcomes"]] == [[warning]] * 2
    assert [rank["warnings"] for rank in inside("status", run, "--json").data["replicas"]] == [[warning]] * 2
    line = f"ranks 0-1: {warning}"
    assert f"warning: {line}\n" in inside("result", run).stderr
    assert f"warning: {line}\n" in inside("wait", run).stderr
    assert line in inside("status", run).stdout


def test_result_of_a_failed_run_is_code_1_with_the_traceback(finished, inside):
    done = inside.at(finished.cli)("result", finished.bad)
    assert done.code == 1
    assert done.stdout == "rank 0: 0\nrank 1: failed\n"
    assert "ValueError: no good" in done.stderr
    assert inside.at(finished.cli)("result", finished.bad, "--rank", "0").stdout == "rank 0: 0\n"


def test_wait_is_0_for_success_and_1_for_failure(finished, inside):
    assert inside.at(finished.cli)("wait", finished.ok).code == 0
    done = inside.at(finished.cli)("wait", finished.bad, "--json")
    assert done.code == 1
    assert done.error["code"] == "RunFailed"


def test_wait_gives_up_with_124_and_leaves_or_cancels(cli):
    run = cli.detached("job:until", "--arg", f"gate={cli.folder / 'gate'}")
    left = cli("wait", run, "--timeout", "0.1s")
    assert left.code == 124
    assert f"hint: atoll wait {run}" in left.stderr
    assert cli("result", run).code == 124
    assert cli("status", run, "--json").data["state"] == "running"
    cancelled = cli("wait", run, "--timeout", "0.1s", "--on-deadline", "cancel", "--json")
    assert cancelled.code == 124
    assert cancelled.error["code"] == "WaitTimeout"
    assert cli("status", run, "--json").data["state"] == "cancelled"


def test_wait_fail_fast_stops_the_rest(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:bad_and_until", "-n", 2, "--arg", f"gate={gate}")
    done = cli("wait", run, "--fail-fast", "--json")
    assert done.code == 1
    assert done.data["counts"] == {"failed": 1, "cancelled": 1}


def test_top_draws_the_run_and_q_leaves_it_going(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={gate}")
    with terminal(cli, "top", run) as screen:
        # the first frames may be drawn before a replica has logged its loss
        for word in (
            run,
            "running",
            "job:until on local",
            "rank 1 waits",
            "q quits; the run continues",
            "loss trend",
            "beat",
            "▁",
        ):
            assert word in screen.until(word)
        assert "\x1b[?1049h" in screen.drawn  # the other screen
        screen.press("q")
        assert screen.end() == 0
        assert "\x1b[?1049l" in screen.drawn
        assert f"run `{run}`: 2 running" in screen.plain
    gate.touch()
    assert cli("wait", run).code == 0


def test_top_notices_the_end_and_ctrl_c_leaves(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "--arg", f"gate={gate}")
    with terminal(cli, "top", run, rows=10, columns=60) as screen:
        screen.until("rank 0 waits")
        gate.touch()
        screen.until("succeeded")
        screen.interrupt()
        assert screen.end() == 0
        assert "Traceback" not in screen.plain


def test_top_without_a_terminal_is_one_snapshot(finished, inside):
    done = finished.cli("top", finished.ok)
    assert done.code == 0
    assert done.stdout == inside.at(finished.cli)("status", finished.ok).stdout
    assert inside("top", finished.ok, "--json").data["state"] == "succeeded"
