"""A job that died as a whole is replaced while a process waits for the run, and every job of a rank can be stopped.

Most tests hold every job in its queue and set its end, so that no container starts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest

from atoll import journal
from atoll.context import ATTEMPT, RunContext
from atoll.errors import StopFailed
from atoll.executors.base import Replacer
from atoll.executors.sagemaker.replacement import following_name, replacement_body
from atoll.executors.sagemaker.request import job_name, parsed_name
from atoll.keys import RunKeys
from atoll.runs.run import Run
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState, RunStatus
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, Call, Fault, entered, launched, order, until
from services.sagemaker.faults import REFUSALS
from services.sagemaker.server import Peer

LOST = "InternalServerError: We encountered an internal error. Please try again."
KILLED = "AlgorithmError: , exit code: 137"
NEVER = 10_000
LIMIT_S = 60.0
CONTEXT = RunContext("exp", "s3://nowhere/exp")


@pytest.fixture
def held(peer: Peer) -> Peer:
    """Jobs wait for machines that do not come."""
    peer.engine.admits.clear()
    return peer


@pytest.fixture
def run(bench: Bench, held: Peer) -> Run:
    """A run of two replicas with one restart each, whose jobs wait."""
    ordered = order(bench, "hold", 2, run_id="exp", max_restarts=1)
    return ordered.draft(bench.executor(), bench.store_uri).submit()


def name_of(run: Run, rank: int, replacement: int = 0) -> str:
    return job_name(run.handle.native_id, rank, replacement)


def fail(peer: Peer, name: str, failure: str = LOST, *, has_started: bool = True) -> None:
    """End a job that waits for its machine as if it had failed on it."""
    waiting = peer.engine.jobs[name]
    waiting.kill()
    job = peer.engine.seed(waiting.request, "Failed", "Failed", failure=failure)
    job._started_at, job._ended_at = time.time() if has_started else None, time.time()


def fail_all(peer: Peer, run: Run, *failures: str) -> None:
    for rank, failure in enumerate(failures or (LOST, LOST)):
        fail(peer, name_of(run, rank), failure)


def going(peer: Peer) -> list[str]:
    """The jobs that bill: all that are not over."""
    return sorted(name for name, job in peer.engine.jobs.items() if not job.is_over)


def stopped(peer: Peer, bench: Bench) -> bool:
    until(bench, "no job is between two states", lambda: all(j.status != "Stopping" for j in peer.engine.jobs.values()))
    return going(peer) == []


class Seen(Exception):
    """Ends a wait."""


def watched(run: Run, then: Callable[[], None] | None = None) -> RunStatus:
    """The first status that a waiting process sees; with `then`, do that after the first and return the second."""
    found: list[RunStatus] = []

    def end(status: RunStatus) -> None:
        found.append(status)
        if then is None or len(found) == 2:
            raise Seen
        then()

    with pytest.raises(Seen):
        run.wait(LIMIT_S, on_change=end)
    return found[-1]


# with containers


def test_a_lost_machine_is_replaced_while_a_process_waits(bench, peer):
    with launched(bench, "hold", 2, max_restarts=1) as run, ThreadPoolExecutor(1) as pool:
        ending = pool.submit(partial(run.wait, bench.patience_s, fail_fast=True))
        entered(bench, run)
        os.kill(peer.engine.jobs[name_of(run, 1)].process.pid, signal.SIGKILL)

        def is_back() -> bool:
            return any(s.rank == 1 and s.attempt == 1 for s in contract_jobs.starts(bench.store, run.id))

        until(bench, "the replacement is in user code", is_back)
        seen = run.status().replicas[1]
        assert (seen.state, seen.native_id) == (ReplicaState.RUNNING, name_of(run, 1, 1))
        contract_jobs.let_go(bench.store, run.id)
        assert ending.result().state is ReplicaState.SUCCEEDED
        result = run.result().raise_for_failures()
        assert [(o.attempt, o.result) for o in result.outcomes] == [(0, 0), (1, 1)]
        assert sorted(peer.engine.jobs) == [name_of(run, 0), name_of(run, 1), name_of(run, 1, 1)]
        assert all(row["billable_seconds"] for row in run.executor.details(run.handle, [0, 1]))


def test_an_end_that_the_supervisor_recorded_is_not_replaced(bench, peer):
    """The last attempt kills itself, so SageMaker reports the same exit code as for a lost container."""
    with launched(bench, "act", 1, args={"parts": ["sigkill"]}, max_restarts=1) as run:
        assert run.wait(bench.patience_s).state is ReplicaState.FAILED
        assert [start.attempt for start in contract_jobs.starts(bench.store, run.id)] == [0, 1]
        assert list(peer.engine.jobs) == [name_of(run, 0)]


def test_the_output_of_all_jobs_of_a_rank_is_one_log(bench, peer):
    with launched(bench, "say", 1, args={"lines": ["hello"], "then_hold": True}, max_restarts=1) as run:
        entered(bench, run)
        until(bench, "the first log", lambda: _greetings(run) == 1)

        def lose() -> None:
            os.kill(peer.engine.jobs[name_of(run, 0)].process.pid, signal.SIGKILL)
            until(bench, "it failed", lambda: run.status().replicas[0].state is ReplicaState.FAILED)

        watched(run, lose)
        until(bench, "the second log", lambda: _greetings(run) == 2)
        assert run.executor.status(run.handle).replicas[0].native_id == name_of(run, 0, 1)


def _greetings(run: Run) -> int:
    """The container of the first job also prints that its supervisor died."""
    return list(run.logs(0)).count("hello")


# which failures


@pytest.mark.parametrize(
    ("failure", "has_started", "is_replaced"),
    [
        (LOST, True, True),
        (KILLED, True, True),
        ("CapacityError: the machine was taken away", True, True),
        ("CapacityError: Unable to provision requested ML compute capacity", False, False),
        ("ClientError: Cannot pull the image from the registry", True, False),
        ("ResourceLimitExceeded: the quota is used up", True, False),
        ("AlgorithmError: , exit code: 1", True, False),
    ],
)
def test_only_the_loss_of_a_machine_that_ran_is_replaced(held, run, failure, has_started, is_replaced):
    fail(held, name_of(run, 1), failure, has_started=has_started)
    replica = watched(run).replicas[1]
    assert (name_of(run, 1, 1) in held.engine.jobs) is is_replaced
    assert replica.state is (ReplicaState.PENDING if is_replaced else ReplicaState.FAILED)


def test_a_replaced_rank_is_restarting_and_sends_a_heartbeat_until_it_runs(held, bench, run):
    fail(held, name_of(run, 1))
    replica = watched(run).replicas[1]
    assert (replica.state, replica.reason, replica.attempt) == (ReplicaState.PENDING, Reason.RESTARTING, 1)
    assert json.loads(bytes(bench.store.get(RunKeys(run.id).beat(1))))["attempt"] == 1
    assert run.status().replicas[1].native_id == name_of(run, 1, 1)


def test_a_job_that_was_lost_before_it_registered_has_used_an_attempt(held, bench, run):
    watched(run, partial(fail_all, held, run))
    contract_jobs.let_go(bench.store, run.id)
    held.engine.admits.set()
    assert run.wait(bench.patience_s).state is ReplicaState.SUCCEEDED
    assert [outcome.attempt for outcome in run.result().raise_for_failures().outcomes] == [1, 1]


def test_without_a_watcher_nothing_is_replaced(held, run):
    fail(held, name_of(run, 1))
    assert [run.status().replicas[1].state for _ in range(2)] == [ReplicaState.FAILED] * 2
    assert len(held.engine.jobs) == 2


def test_a_rank_is_not_replaced_when_all_others_have_failed_for_good(held, run):
    assert (
        watched(run, partial(fail_all, held, run, "AlgorithmError: , exit code: 1", LOST)).state is ReplicaState.FAILED
    )
    assert len(held.engine.jobs) == 2


def test_a_run_whose_intent_is_not_recorded_is_not_replaced(held, bench, run):
    bench.store.delete(RunKeys(run.id).intent())
    fail(held, name_of(run, 1))
    assert watched(run).replicas[1].state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 2


def test_a_run_without_restarts_is_not_replaced(held, bench):
    run = order(bench, "hold", 1, run_id="once").draft(bench.executor(), bench.store_uri).submit()
    assert watched(run, partial(fail, held, name_of(run, 0))).state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 1


def test_the_restarts_of_a_rank_are_used_up(held, run):
    for replacement in (0, 1):
        fail(held, name_of(run, 1, replacement))
        status = watched(run)
    assert status.replicas[1].state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 3


def test_attempts_of_earlier_jobs_count(held, bench, run):
    for attempt in (0, 1):
        bench.store.create(RunKeys(run.id).start(1, attempt), b"{}")
    fail(held, name_of(run, 1))
    assert watched(run).replicas[1].state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 2


def test_a_recorded_user_error_is_not_replaced(held, bench, run):
    bench.store.create(RunKeys(run.id).start(1, 0), b"{}")
    outcome = {"rank": 1, "attempt": 0, "state": "failed", "reason": "user_error", "message": "boom"}
    bench.store.create(RunKeys(run.id).outcome(1, 0), json.dumps(outcome).encode())
    fail(held, name_of(run, 1), KILLED)
    assert watched(run).replicas[1].state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 2


def test_other_settings_do_not_replace_with_another_request(held, bench, run):
    other = Run(run.spec, bench.executor(volume_size_gb=99), run.store, run.handle)
    fail(held, name_of(run, 1))
    replica = watched(other).replicas[1]
    assert (replica.state, len(held.engine.jobs)) == (ReplicaState.FAILED, 2)
    assert "not replaced" in replica.message


def test_a_refused_replacement_leaves_the_rank_failed(held, run):
    fail(held, name_of(run, 1))
    held.engine.quota = 1
    replica = watched(run).replicas[1]
    assert (replica.state, len(held.engine.jobs)) == (ReplicaState.FAILED, 2)
    assert "not replaced" in replica.message


# once


def test_a_lost_answer_and_two_watchers_give_one_job(held, bench, run):
    fail(held, name_of(run, 1))
    held.faults.fail(Call.CREATE, Fault.BROKEN, nth=1, times=1, after_effect=True)
    runs = [Run(run.spec, bench.executor(), run.store, run.handle) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [status.replicas[1].state for status in pool.map(watched, runs)]
    assert found == [ReplicaState.PENDING] * 2
    assert len(held.engine.jobs) == 3
    assert held.calls["sagemaker", "CreateTrainingJob"] > 3, "the answer was not lost"


def test_a_replacement_that_no_list_has_yet_is_the_newest_job(held, run):
    held.engine.unseen_looks = {"ListTrainingJobs": NEVER}
    fail(held, name_of(run, 1))
    watched(run)
    assert run.status().replicas[1].native_id == name_of(run, 1, 1)


# stopping


@pytest.mark.parametrize("looks", [{}, {"ListTrainingJobs": NEVER}, {"ListTrainingJobs": NEVER, "StopTrainingJob": 1}])
def test_cancel_stops_a_replacement_whether_it_is_listed_or_not(held, bench, run, looks):
    held.engine.unseen_looks = looks
    fail(held, name_of(run, 1))
    watched(run)
    run.cancel()
    assert stopped(held, bench)
    assert [r.state for r in run.status().replicas] == [ReplicaState.CANCELLED] * 2
    assert len(held.engine.jobs) == 3


def test_cancel_stops_a_replacement_whose_variables_are_hidden(held, bench, run):
    fail(held, name_of(run, 1))
    watched(run)
    held.engine.shows_environment = False
    run.executor.cancel(run.handle)
    assert stopped(held, bench)


def test_a_replacement_that_races_with_a_cancellation_is_stopped(held, bench, run):
    """The cancellation looks for the replacement before it exists, and is recorded before the watcher looks."""
    fail(held, name_of(run, 1))
    other = Run(run.spec, bench.executor(), run.store, run.handle)
    held.faults.on(Call.CREATE, lambda: other.cancel() and None, nth=1, after_effect=False)
    status = watched(run)
    assert stopped(held, bench)
    assert [r.state for r in status.replicas] == [ReplicaState.CANCELLED] * 2
    assert len(held.engine.jobs) == 3


def test_a_replacement_that_a_watcher_cannot_stop_is_named(held, bench, run):
    fail(held, name_of(run, 1))
    other = Run(run.spec, bench.executor(), run.store, run.handle)
    held.faults.on(Call.CREATE, lambda: other.cancel() and None, nth=1, after_effect=False)
    held.faults.refuse(Call.STOP, *REFUSALS["denied"], name="-00001-r1")
    with pytest.raises(StopFailed) as caught:
        run.wait(LIMIT_S)
    assert caught.value.left_running == (name_of(run, 1, 1),)


def test_a_replacement_that_is_created_before_the_cancellation_is_recorded_is_stopped(held, bench, run):
    """The watcher sees no record, so the cancellation has to look for the replacement after it has written one."""
    other = Run(run.spec, bench.executor(), run.store, run.handle)
    stop, has_stopped, is_replaced = other.executor.cancel, Event(), Event()

    def stop_then_pause(handle: Any) -> None:
        stop(handle)
        if not has_stopped.is_set():
            has_stopped.set()
            is_replaced.wait(LIMIT_S)

    other.executor.cancel = stop_then_pause
    with ThreadPoolExecutor(1) as pool:

        def cancel() -> None:
            fail_all(held, run)
            ending.append(pool.submit(other.cancel))
            has_stopped.wait(LIMIT_S)

        ending: list[Future[Any]] = []
        watched(run, cancel)
        assert going(held) == [name_of(run, 0, 1), name_of(run, 1, 1)]
        is_replaced.set()
        ending[0].result()
    assert stopped(held, bench)


def test_a_failed_run_that_is_cancelled_is_not_replaced_later(held, run):
    def cancel() -> None:
        fail_all(held, run)
        run.cancel()

    assert watched(run, cancel).state is ReplicaState.FAILED
    assert journal.is_cancelled(run.store, run.id)
    assert len(held.engine.jobs) == 2


# single ranks


def test_a_rank_that_is_cancelled_is_not_replaced_and_its_replacement_is_stopped(held, bench, run):
    fail(held, name_of(run, 1))
    watched(run)
    assert going(held) == [name_of(run, 0), name_of(run, 1, 1)]
    run.cancel([1])
    assert going(held) == [name_of(run, 0)]
    assert watched(run).replicas[1].state is ReplicaState.CANCELLED
    assert going(held) == [name_of(run, 0)]


def test_a_failed_rank_that_is_cancelled_stays_failed_and_is_not_replaced(held, run):
    fail(held, name_of(run, 1))
    run.cancel([1])
    assert journal.read_rank_cancels(run.store, run.id)[1].was_over
    assert [r.state for r in watched(run).replicas] == [ReplicaState.PENDING, ReplicaState.FAILED]
    assert len(held.engine.jobs) == 2


def test_a_cancelled_rank_stays_cancelled_though_its_job_says_that_it_failed_or_is_gone(held, bench, run):
    journal.record_rank_cancel(run.store, run.id, 1, journal.RankCancel())
    fail(held, name_of(run, 1))
    for progress in (True, False):
        replicas = run.status(progress=progress).replicas
        assert [(r.state, r.reason) for r in replicas][1] == (ReplicaState.CANCELLED, Reason.CANCELLED)
        assert replicas[0].state is ReplicaState.PENDING
    assert watched(run).replicas[1].state is ReplicaState.CANCELLED
    fail(held, name_of(run, 0))
    bench.forget(run.handle)
    assert [r.state for r in run.status().replicas] == [ReplicaState.LOST, ReplicaState.CANCELLED]


def test_a_rank_that_is_cancelled_while_a_watcher_replaces_it_is_stopped_alone(held, bench, run):
    fail(held, name_of(run, 1))
    other = Run(run.spec, bench.executor(), run.store, run.handle)
    held.faults.on(Call.CREATE, lambda: other.cancel([1]) and None, nth=1, after_effect=False)
    watched(run)
    assert going(held) == [name_of(run, 0)]
    assert not journal.is_cancelled(run.store, run.id)


def test_a_rank_that_cannot_be_stopped_is_named_alone(held, run):
    held.faults.refuse(Call.STOP, *REFUSALS["denied"])
    with pytest.raises(StopFailed) as caught:
        run.cancel([1])
    assert caught.value.left_running == (name_of(run, 1),)
    assert journal.read_rank_cancels(run.store, run.id) == {}


def test_a_run_that_has_ended_before_the_wait_stays_as_it_is(held, run):
    fail_all(held, run)
    assert watched(run).state is ReplicaState.FAILED
    assert len(held.engine.jobs) == 2


def test_a_replacement_is_found_by_sweep(held, run):
    fail(held, name_of(run, 1))
    watched(run)
    found = {stray.native_id: stray.handle for stray in run.executor.strays()}
    assert found == {name_of(run, 0): run.handle, name_of(run, 1, 1): run.handle}


# pure


def test_the_plan_says_what_needs_a_watcher(executor):
    assert isinstance(executor(), Replacer)
    notes = executor().plan(CONTEXT, Placement(max_restarts=2)).notes
    assert [note for note in notes if "atoll wait" in note]
    assert not [note for note in executor().plan(CONTEXT, Placement()).notes if "atoll wait" in note]


@pytest.mark.parametrize("max_restarts", [0, 1, 1000])
def test_the_name_of_every_replacement_fits(executor, max_restarts):
    plan = executor().plan(RunContext("x" * 128, "s3://b/p"), Placement(max_restarts=max_restarts))
    assert len(job_name(plan.request["label"], 99_999, max_restarts)) == 63


def test_names_of_jobs_can_be_read():
    assert parsed_name(job_name("a-00001-b", 7)) == ("a-00001-b", 7, 0)
    assert parsed_name(job_name("a", 7, 12)) == ("a", 7, 12)
    assert [parsed_name(name) for name in ("a", "a-1", "a-00001-r0", "a-00001-r")] == [None] * 4


def test_a_replacement_has_the_rest_of_the_time_and_the_token_of_its_rank(executor):
    body = executor().plan(CONTEXT, Placement(max_restarts=1, timeout_s=100)).request["jobs"][0]
    failed = {**body, "TrainingJobStatus": "Failed", "TrainingTimeInSeconds": 30}
    following = replacement_body(body, failed)
    assert following is not None
    assert following["TrainingJobName"] == body["TrainingJobName"] + "-r1" == following_name(failed)
    assert following["StoppingCondition"]["MaxRuntimeInSeconds"] == 70
    assert following["Environment"] == {**body["Environment"], ATTEMPT: "1"}
    assert replacement_body(body, {**failed, "TrainingTimeInSeconds": 100}) is None
    assert replacement_body(body, {**failed, "TrainingJobStatus": "Stopped"}) is None
    assert replacement_body(body, {**following, "TrainingJobStatus": "Failed", "TrainingTimeInSeconds": 1}) is None
