"""What is said of replicas that did not end well: by `logs`, `status`, `wait` and `result`, of real runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from cli_process import Cli

from atoll.cli.render import ending_lines, ending_text, no_output_text
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus

NOW = 1_000_000.0
LOST = """
import os, signal
import numpy as np
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout
from atoll.rounds.quorum import strict

def rounds(ctx):
    layout = Layout.of([("w", [64], "float32")])
    quorum = strict(deadline_s=3.0)
    with RoundClient(ctx.store, ctx.run_id, ctx.rank, ctx.world_size, layouts=[layout], quorum=quorum) as client:
        client.join([np.zeros(64, np.float32).tobytes()])
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.exchange(0, np.ones(64, np.float32), weight=1.0)
"""

DEAD = """
import os, signal
import numpy as np
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout

def rounds(ctx):
    layout = Layout.of([("w", [64], "float32")])
    with RoundClient(ctx.store, ctx.run_id, ctx.rank, ctx.world_size, layouts=[layout], attempt=ctx.attempt) as client:
        client.join([np.zeros(64, np.float32).tobytes()])
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.exchange(0, np.ones(64, np.float32), weight=1.0)
"""

QUORUM = """
import os, signal
import numpy as np
from atoll import Quorum
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout

def rounds(ctx, *, dies=False, on_rejected="continue"):
    layout = Layout.of([("w", [64], "float32")])
    quorum = Quorum(1, grace_s=0.2, deadline_s=30.0, on_rejected=on_rejected)
    with RoundClient(ctx.store, ctx.run_id, ctx.rank, ctx.world_size, layouts=[layout], quorum=quorum) as client:
        client.join([np.zeros(64, np.float32).tobytes()])
        for round_no in range(3):
            if dies and ctx.rank == 1 and round_no == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            value = np.nan if ctx.rank == 1 and on_rejected == "stop" else 1.0
            client.exchange(round_no, np.full(64, value, np.float32), weight=1.0)
        client.leave()
"""


def killed(rank: int) -> ReplicaStatus:
    times = {"started_at": NOW - 60, "ended_at": NOW - 20}
    return ReplicaStatus(rank, ReplicaState.FAILED, Reason.KILLED, "killed by SIGKILL", 137, **times)


def kill(cli: Cli, run: str, rank: int) -> None:
    os.kill(int(cli("status", run, "--json").data["replicas"][rank]["native_id"]), signal.SIGKILL)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cli, str]]:
    """A run in which rank 2 of 3 was killed before the first round, and the others waited for it in vain."""
    cli = Cli(tmp_path_factory.mktemp("lost"))
    (cli.folder / "lostjob.py").write_text(LOST)
    try:
        run = cli.detached("lostjob:rounds", "-n", 3)
        assert cli("wait", run).code == 1
        yield cli, run
    finally:
        cli.end_everything()


def test_logs_of_a_killed_replica_that_was_silent_say_what_is_known(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:silent", "-n", 2, "--arg", f"gate={gate}")
    kill(cli, run, 1)
    gate.touch()
    assert cli("wait", run).code == 1
    done = cli("logs", run)
    assert (done.code, done.stdout) == (0, "")
    silence, ending = done.stderr.splitlines()
    assert silence.startswith("ranks 0-1 ")
    assert re.fullmatch(r"rank 1 failed .*[\d :-]+, .*\b\d+s: .*SIGKILL \(killed, .* 137\)", ending), ending
    ranks = cli("logs", run, "--rank", "1", "--json").data["ranks"]
    assert [(r["rank"], r["lines"], r["state"], r["exit_code"]) for r in ranks] == [(1, 0, "failed", 137)]


def test_logs_of_a_run_that_went_well_add_nothing(finished, inside):
    assert inside.at(finished.cli)("logs", finished.ok).stderr == ""


def test_logs_with_nothing_that_was_asked_for_do_not_say_that_nothing_was_printed(finished, inside):
    at = inside.at(finished.cli)
    told = at("logs", finished.ok, "--grep", "no such").stderr
    assert told.startswith("ranks 0-1 ")
    assert told.strip() != no_output_text([0, 1], is_filtered=False)
    assert at("logs", finished.ok, "--tail", "0").stderr == ""


def test_an_ending_has_what_is_known_and_nothing_twice():
    told = ending_text(killed(1), NOW)
    assert told.startswith("rank 1 failed ")
    for value in ("40s", "killed by SIGKILL", "(killed, ", "137"):
        assert told.count(value) == 1
    lost = ReplicaStatus(2, ReplicaState.LOST, Reason.LOST, "no such job\nany more")
    assert ending_text(lost, NOW) == "rank 2 lost: no such job"


def test_of_many_endings_the_first_few_are_told_and_the_rest_named():
    *_, last = told = list(ending_lines([killed(rank) for rank in range(12)], "r", NOW))
    assert len(told) == 9
    assert "ranks 8-11; `atoll status r`" in last
    assert no_output_text([3], is_filtered=False).startswith("rank 3 ")
    assert no_output_text([], is_filtered=False) == ""


@pytest.mark.process
def test_the_report_of_a_lost_quorum_begins_with_its_cause(lost):
    cli, run = lost
    done = cli("wait", run)
    assert done.code == 1
    report = done.stderr.partition("error: ")[2].splitlines()
    assert re.fullmatch("  rank 2: failed, killed, .* 137: .*SIGKILL", report[1])
    assert re.match("  ranks 0-1: failed, timeout, .* 5: QuorumLost: round 0 ", report[2])
    assert report[-1].startswith(f"hint: atoll logs {run} --rank 2")


@pytest.mark.process
def test_the_report_of_a_lost_quorum_says_what_would_have_been_better(lost):
    cli, run = lost
    hint = cli("wait", run).stderr.splitlines()[-1]
    assert hint.startswith(f"hint: atoll logs {run} --rank 2; ")
    for value in ("`--max-restarts N`", "`--fail-fast`", "`DiLoCo(quorum=N)`"):
        assert value in hint


def test_a_strict_run_ends_when_a_rank_that_has_no_restarts_left_is_dead(cli):
    (cli.folder / "deadjob.py").write_text(DEAD)
    done = cli("run", "deadjob:rounds", "-n", 3, "--on-dead-after", "1s", "--max-restarts", 1, "--json")
    assert done.code == 1
    first, second, dead = done.data["result"]["outcomes"]
    assert (dead["exit_code"], dead["attempt"]) == (137, 1)
    for outcome in (first, second):
        assert (outcome["exit_code"], outcome["reason"], outcome["attempt"]) == (5, "timeout", 0), "it is not restarted"
        assert (outcome["error"]["type"], outcome["error"]["ranks"]) == ("atoll.errors.QuorumLost", [2])
    run = done.data["run_id"]
    assert done.error["hint"].startswith(f"atoll logs {run} --rank 2")
    for text in (cli("result", run).stderr, cli("status", run).stdout):
        assert "QuorumLost: round 0 needs rank 2" in text


def test_a_run_that_a_quorum_completed_fails_and_is_said_to_be_complete(cli):
    (cli.folder / "quorumjob.py").write_text(QUORUM)
    done = cli("run", "quorumjob:rounds", "-n", 2, "--arg", "dies=true", "--run-id", "half", "--json")
    assert done.code == 1
    head, complete = done.error["message"].splitlines()[:2]
    assert "`half`" in head
    assert re.search(r"\b1\b.*\b2\b", head)
    assert re.search("rank 0 .* 3 rounds", complete)
    assert (done.data["result"]["ok"], done.data["result"]["is_complete"]) == (False, True)


def test_the_hint_after_a_rejected_update_names_the_rank_that_gave_it(cli):
    (cli.folder / "quorumjob.py").write_text(QUORUM)
    done = cli("run", "quorumjob:rounds", "-n", 2, "--arg", "on_rejected=stop", "--run-id", "odd")
    assert done.code == 1
    assert re.search("CorruptUpdate: .*rank 1 ", done.stderr)
    assert done.stderr.splitlines()[-1].startswith("hint: atoll logs odd --rank 1")
    assert cli("result", "odd", "--json").data["is_complete"] is False


def test_nobody_is_told_to_verify_a_run_later_that_is_over(lost, inside):
    done = inside.at(lost[0])("verify", lost[1], "--json")
    assert (done.code, done.error["hint"]) == (5, None)


def test_who_is_cancelled_on_request_is_said_to_be_so_once(cli):
    run = cli.detached("job:until", "--arg", f"gate={cli.folder / 'gate'}")
    assert cli("cancel", run).code == 0
    told = cli("wait", run).stderr.partition("error: ")[2].splitlines()[1]
    assert told.startswith(f"  rank 0: {ON_REQUEST}, ")
    assert "143" in told
    row = cli("status", run).stdout.splitlines()[-1]
    assert row.count("cancelled") == 2, "its state, and on whose wish"
    assert cli("logs", run).stderr.count("cancelled") == 1


def test_who_is_cancelled_because_another_failed_is_told_of_that_one(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:bad_and_until", "-n", 2, "--arg", f"gate={gate}")
    done = cli("wait", run, "--fail-fast")
    assert done.code == 1
    assert re.search("^  rank 1: cancelled .*rank 0 .* 143$", done.stderr, re.M)
    assert ON_REQUEST not in done.stderr + cli("status", run).stdout + cli("logs", run).stderr


def test_who_is_cancelled_at_a_deadline_is_told_of_that(cli):
    run = cli.detached("job:until", "--arg", f"gate={cli.folder / 'gate'}")
    assert cli("wait", run, "--timeout", "0.1s", "--on-deadline", "cancel").code == 124
    assert "0.1 s" in cli("status", run, "--json").data["replicas"][0]["message"]


def test_a_replica_that_was_started_again_is_said_to_be_so_and_why(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:killed_once", "-n", 2, "--max-restarts", 1, "--arg", f"gate={gate}")
    while cli("status", run, "--json").data["replicas"][1]["attempt"] == 0:
        pass
    (why,) = re.findall(r"^restarts +(.*rank 1 \(attempt 0 .*SIGKILL\))$", cli("status", run).stdout, re.M)
    watching = cli.start("wait", run, stderr=subprocess.PIPE)
    assert watching.stderr is not None
    assert why in watching.stderr.readline().decode()
    gate.touch()
    verdict = watching.communicate(timeout=60)[1].decode().splitlines()[-1]
    assert why not in verdict
    assert "; rank 1 " in verdict
    assert watching.returncode == 0
    assert "\nagain " not in cli("status", run).stdout


def test_a_killed_replica_that_was_not_to_be_started_again_could_have_been(cli):
    run = cli.detached("job:killed_once", "-n", 2, "--arg", f"gate={cli.folder}")
    done = cli("wait", run)
    assert re.match(f"hint: atoll logs {run} --rank 1; .*`--max-restarts N`", done.stderr.splitlines()[-1])


def test_status_shows_the_pid_of_a_replica_that_runs_here(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={gate}")
    pids = [replica["native_id"] for replica in cli("status", run, "--json").data["replicas"]]
    title, *rows = cli("status", run).stdout.partition("\n\n")[2].splitlines()
    assert "id" in title.split()
    assert all(pid in row.split() for pid, row in zip(pids, rows, strict=True))
    os.kill(int(pids[0]), signal.SIGKILL)
    gate.touch()
    assert cli("wait", run).code == 1
    assert " id " not in cli("status", run).stdout, "a pid of the past may be somebody else's by now"


def test_a_long_message_leaves_the_line_that_raised_it_in_the_report(cli):
    deep = [f"def f{n}():\n    return f{n + 1}()\n" for n in range(8)]
    wordy = 'def f8():\n    raise ValueError("\\n".join(f"line {n}" for n in range(60)))\n'
    (cli.folder / "wordy.py").write_text("".join([*deep, wordy]))
    done = cli("run", "wordy:f0")
    assert done.code == 1
    assert 'wordy.py", line 18, in f8' in done.stderr
    assert "ValueError: line 0\n" in done.stderr
    assert "    line 59\n" in done.stderr
    assert "    line 30\n" not in done.stderr
