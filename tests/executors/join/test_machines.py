"""Machines that join a run from shells of their own, leave it, die and are replaced; the launcher's status is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll._time import Deadline, backoff
from atoll.keys import RunKeys
from atoll.replica import processes
from atoll.runs.join import Claimed, run_here
from atoll.runs.run import Run
from atoll.status import Reason, ReplicaState, ReplicaStatus
from atoll.testing import contract_jobs

pytestmark = pytest.mark.process
PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED


class Shells:
    """Shells in which a user types `atoll join`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[subprocess.Popen[bytes]] = []

    def launch(self, job: str, replicas: int, **options: Any) -> Run:
        return atoll.launch(
            f"atoll.testing.contract_jobs:{job}",
            on="join",
            replicas=replicas,
            store=str(self._folder / "store"),
            **options,
        )

    def join(self, run: Run, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "atoll", "join", run.id, "--store", run.store.uri, "--json", *options]
        shell = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # `nohup` may have started the tests
        )
        self._open.append(shell)
        return shell

    def close(self) -> None:
        for shell in self._open:
            if shell.poll() is None:
                shell.terminate()
        for shell in self._open:
            shell.communicate()


@pytest.fixture
def shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shells]:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    made = Shells(tmp_path)
    yield made
    made.close()


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline, pauses = Deadline(90.0), backoff(0.02, cap_s=0.2)
    while not (found := condition()):
        assert not deadline.is_past, f"not in time: {what}"
        deadline.sleep(next(pauses))
    return found


def states(run: Run) -> list[ReplicaState]:
    return [replica.state for replica in run.status().replicas]


def has(run: Run, *wanted: ReplicaState) -> bool:
    return states(run) == list(wanted)


def rank_of(shell: subprocess.Popen[bytes]) -> int:
    """The rank that this shell joined as; from the first line of its output."""
    assert shell.stdout is not None
    return int(json.loads(shell.stdout.readline())["data"]["rank"])


def ended(shell: subprocess.Popen[bytes]) -> tuple[int, dict[str, Any]]:
    """The exit code, and the last line of the output."""
    output, _ = shell.communicate(timeout=90)
    return shell.returncode, json.loads(output.splitlines()[-1])


def replica(run: Run, rank: int) -> ReplicaStatus:
    return run.status().replicas[rank]


def entered(run: Run, rank: int, attempt: int) -> int:
    """The process of this attempt, once it is in user code."""

    def found() -> int | None:
        starts = contract_jobs.starts(run.store, run.id)
        return next((start.pid for start in starts if (start.rank, start.attempt) == (rank, attempt)), None)

    return int(until(f"attempt {attempt} of rank {rank} is in user code", found))


def supervisor_of(shell: subprocess.Popen[bytes]) -> int:
    (found,) = (processes.PROC / str(shell.pid) / "task" / str(shell.pid) / "children").read_text().split()
    return int(found)


def test_three_shells_join_one_is_replaced_and_the_status_is_right_at_every_moment(shells):
    run = shells.launch("hold", 3)
    assert has(run, PENDING, PENDING, PENDING)
    assert all(f"atoll join {run.id} --store" in each.message for each in run.status().replicas)
    joined = {rank_of(shell): shell for shell in [shells.join(run) for _ in range(3)]}
    assert sorted(joined) == [0, 1, 2]
    assert has(run, RUNNING, RUNNING, RUNNING)
    assert {each.host for each in run.status().replicas} == {os.uname().nodename}
    assert all((each.native_id or "").startswith("joined ") for each in run.status().replicas)
    first = entered(run, 1, 0)

    joined[1].terminate()
    code, last = ended(joined[1])
    assert (code, last["data"]["outcome"]["reason"]) == (1, Reason.PREEMPTED)
    assert has(run, RUNNING, PENDING, RUNNING), "the launcher sees it at once"
    assert replica(run, 1).reason is Reason.WAITING
    assert processes.is_dead(first)

    assert rank_of(shells.join(run)) == 1
    assert has(run, RUNNING, RUNNING, RUNNING)
    entered(run, 1, 1)
    assert replica(run, 1).attempt == 1
    for rank in (0, 2):
        entered(run, rank, 0)
    contract_jobs.let_go(run.store, run.id)
    until("the run is over", lambda: has(run, SUCCEEDED, SUCCEEDED, SUCCEEDED))
    assert run.result().values == [0, 1, 2]
    assert ended(joined[0])[0] == 0


def test_a_machine_that_dies_at_once_is_silent_and_another_takes_its_place(shells):
    run = shells.launch("hold", 1, settings={"silent_after_s": 4})
    shell = shells.join(run)
    assert rank_of(shell) == 0
    pid, supervisor = entered(run, 0, 0), supervisor_of(shell)
    shell.send_signal(signal.SIGSTOP)  # so that it cannot say that its supervisor was killed
    os.kill(supervisor, signal.SIGKILL)
    shell.kill()
    until("the replica died with its supervisor", lambda: processes.is_dead(pid))
    until("the machine is silent", lambda: has(run, PENDING))
    assert replica(run, 0).reason is Reason.WAITING
    assert rank_of(shells.join(run)) == 0
    entered(run, 0, 1)
    assert replica(run, 0).attempt == 1
    contract_jobs.let_go(run.store, run.id)
    until("the run is over", lambda: has(run, SUCCEEDED))


def test_a_killed_supervisor_frees_the_rank_at_once(shells):
    run = shells.launch("hold", 1)
    shell = shells.join(run)
    assert rank_of(shell) == 0
    pid = entered(run, 0, 0)
    os.kill(supervisor_of(shell), signal.SIGKILL)
    code, last = ended(shell)
    assert (code, last["data"]["outcome"]["reason"]) == (1, Reason.PREEMPTED)
    assert has(run, PENDING)
    assert processes.is_dead(pid)


def test_a_killed_shell_ends_its_replica_and_frees_the_rank(shells):
    run = shells.launch("hold", 1)
    shell = shells.join(run)
    assert rank_of(shell) == 0
    pid = entered(run, 0, 0)
    shell.kill()
    until("the rank is free", lambda: has(run, PENDING))
    assert processes.is_dead(pid)
    assert contract_jobs.farewells(run.store, run.id) == [0], "the replica had its grace"


def test_a_machine_that_wakes_up_after_it_was_replaced_ends_itself(shells):
    run = shells.launch("hold", 1, settings={"silent_after_s": 4})
    asleep = shells.join(run)
    assert rank_of(asleep) == 0
    entered(run, 0, 0)
    supervisor = supervisor_of(asleep)
    children = (processes.PROC / str(supervisor) / "task" / str(supervisor) / "children").read_text().split()
    stopped = [supervisor, *map(int, children)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    until("the machine is silent", lambda: has(run, PENDING))
    assert rank_of(shells.join(run)) == 0
    entered(run, 0, 1)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    code, last = ended(asleep)
    assert (code, last["data"]["outcome"]["reason"]) == (1, Reason.PREEMPTED)
    until("the other machine runs", lambda: has(run, RUNNING))
    assert json.loads(bytes(run.store.get(RunKeys(run.id).beat(0))))["attempt"] == 1
    contract_jobs.let_go(run.store, run.id)
    until("the run is over", lambda: has(run, SUCCEEDED))
    assert run.result().outcomes[0].attempt == 1


def test_one_free_rank_is_taken_by_one_of_two_machines(shells):
    run = shells.launch("hold", 1)
    both = [shells.join(run), shells.join(run)]
    refused = until("one is refused", lambda: next((shell for shell in both if shell.poll() is not None), None))
    code, last = ended(refused)
    assert (code, last["error"]["code"]) == (2, "Conflict")
    entered(run, 0, 0)
    contract_jobs.let_go(run.store, run.id)
    until("the run is over", lambda: has(run, SUCCEEDED))
    assert len(contract_jobs.starts(run.store, run.id)) == 1


def test_cancel_and_ctrl_c_end_the_commands_with_their_codes(shells):
    run = shells.launch("hold", 2)
    by_rank = {rank_of(shell): shell for shell in [shells.join(run), shells.join(run)]}
    for rank in by_rank:
        entered(run, rank, 0)
    by_rank[0].send_signal(signal.SIGINT)
    assert ended(by_rank[0])[0] == 130
    assert has(run, PENDING, RUNNING)
    run.cancel()
    code, last = ended(by_rank[1])
    assert (code, last["data"]["outcome"]["state"]) == (1, ReplicaState.CANCELLED)
    assert has(run, ReplicaState.CANCELLED, ReplicaState.CANCELLED)
    code, last = ended(shells.join(run))
    assert (code, last["error"]["code"]) == (2, "Conflict")


def test_a_closed_terminal_frees_the_rank(shells):
    run = shells.launch("hold", 1)
    shell = shells.join(run)
    assert rank_of(shell) == 0
    entered(run, 0, 0)
    shell.send_signal(signal.SIGHUP)
    assert ended(shell)[0] == 1
    assert has(run, PENDING)
    assert atoll.attach(run.id, store=run.store.uri).status().replicas[0].reason is Reason.WAITING


def test_a_machine_that_leaves_before_it_starts_the_replica_frees_the_rank(shells):
    run = shells.launch("hold", 1)

    def interrupt(claimed: Claimed) -> None:
        assert claimed.rank == 0
        assert has(run, RUNNING)
        os.kill(os.getpid(), signal.SIGTERM)

    outcome = run_here(run.store, run.id, on_claim=interrupt)
    assert (outcome.state, outcome.reason) == (ReplicaState.FAILED, Reason.PREEMPTED)
    assert has(run, PENDING)
    assert contract_jobs.starts(run.store, run.id) == []

    def fail(claimed: Claimed) -> None:
        raise KeyboardInterrupt(claimed.attempt)

    with pytest.raises(KeyboardInterrupt):
        run_here(run.store, run.id, on_claim=fail)
    assert has(run, PENDING)
    assert replica(run, 0).attempt == 1


def test_a_resumed_run_waits_for_machines_again(shells):
    run = shells.launch("hold", 1)
    run.cancel()
    again = run.resume()
    assert (again.launch, states(again)) == (2, [PENDING])
    shell = shells.join(again)
    assert rank_of(shell) == 0
    entered(again, 0, 0)
    contract_jobs.let_go(again.store, again.id)
    assert ended(shell)[0] == 0
    assert has(again, SUCCEEDED)


def test_a_machine_joins_the_part_of_a_run_that_waits_for_machines(shells, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "job.py").write_text("def size(ctx):\n    return [ctx.rank, ctx.world_size]\n")
    options = {"store": str(tmp_path / "store"), "workspace": str(tmp_path / "code")}
    run = atoll.launch("job:size", on=[("local", 1), ("join", 1)], **options)
    assert replica(run, 1).state is PENDING
    shell = shells.join(run)
    assert rank_of(shell) == 1
    assert ended(shell)[0] == 0
    until("the run is over", lambda: has(run, SUCCEEDED, SUCCEEDED))
    assert run.result().values == [[0, 2], [1, 2]]
