"""What is said of replicas that did not end well: by `logs`, `status`, `wait` and `result`, of real runs."""

from __future__ import annotations

import os
import re
import signal

from cli_process import Cli

from atoll.cli.endings import ending_lines, ending_text, silence_text
from atoll.status import Reason, ReplicaState, ReplicaStatus

NOW = 1_000_000.0


def killed(rank: int) -> ReplicaStatus:
    times = {"started_at": NOW - 60, "ended_at": NOW - 20}
    return ReplicaStatus(rank, ReplicaState.FAILED, Reason.KILLED, "killed by SIGKILL", 137, **times)


def kill(cli: Cli, run: str, rank: int) -> None:
    os.kill(int(cli("status", run, "--json").data["replicas"][rank]["native_id"]), signal.SIGKILL)


def test_logs_of_a_killed_replica_that_was_silent_say_what_is_known(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:silent", "-n", 2, "--arg", f"gate={gate}")
    kill(cli, run, 1)
    gate.touch()
    assert cli("wait", run).code == 1
    done = cli("logs", run)
    assert (done.code, done.stdout) == (0, "")
    silence, ending = done.stderr.splitlines()
    assert silence == "ranks 0-1 printed nothing"
    assert re.fullmatch(
        r"rank 1 failed at [\d :-]+, after \d+s: killed by SIGKILL \(killed, exit code 137\)", ending
    ), ending
    ranks = cli("logs", run, "--rank", "1", "--json").data["ranks"]
    assert [(r["rank"], r["lines"], r["state"], r["exit_code"]) for r in ranks] == [(1, 0, "failed", 137)]


def test_logs_of_a_run_that_went_well_add_nothing(finished, inside):
    assert inside.at(finished.cli)("logs", finished.ok).stderr == ""


def test_logs_with_nothing_that_was_asked_for_do_not_say_that_nothing_was_printed(finished, inside):
    at = inside.at(finished.cli)
    assert at("logs", finished.ok, "--grep", "no such").stderr == "ranks 0-1 printed no such line\n"
    assert at("logs", finished.ok, "--tail", "0").stderr == ""


def test_an_ending_has_what_is_known_and_nothing_twice():
    told = re.sub(r"at [\d :-]+,", "at T,", ending_text(killed(1), NOW))
    assert told == "rank 1 failed at T, after 40s: killed by SIGKILL (killed, exit code 137)"
    lost = ReplicaStatus(2, ReplicaState.LOST, Reason.LOST, "no such job\nany more")
    assert ending_text(lost, NOW) == "rank 2 lost: no such job"


def test_of_many_endings_the_first_few_are_told_and_the_rest_named():
    *_, last = told = list(ending_lines([killed(rank) for rank in range(12)], "r", NOW))
    assert len(told) == 9
    assert last == "… and 4 more: ranks 8-11; `atoll status r`"
    assert silence_text([3], is_narrowed=False) == "rank 3 printed nothing"
    assert silence_text([], is_narrowed=False) == ""
