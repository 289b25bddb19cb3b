"""Restarts on SageMaker: the supervisor in the container restarts the entry point."""

from __future__ import annotations

import os
import signal

import pytest

from atoll.context import MAX_RESTARTS, RunContext
from atoll.errors import ConfigError, InvalidSpec
from atoll.executors.sagemaker.request import job_name
from atoll.keys import RunKeys
from atoll.replica.container import prepare
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, entered, launched, let_go, over, until

CONTEXT = RunContext("exp", "s3://nowhere/exp")


def registered(bench: Bench, run_id: str, rank: int = 0) -> list[int]:
    """The attempts of a rank that the store knows."""
    prefix = RunKeys(run_id).start(rank, 0).removesuffix("000.json")
    return [int(key.removeprefix(prefix).removesuffix(".json")) for key in bench.store.list(prefix)]


def attempt_of(bench: Bench, run_id: str, rank: int, attempt: int) -> contract_jobs.Start:
    """Wait until this attempt is in user code."""

    def found() -> contract_jobs.Start | None:
        starts = contract_jobs.starts(bench.store, run_id)
        return next((s for s in starts if (s.rank, s.attempt) == (rank, attempt)), None)

    start = until(bench, f"attempt {attempt} of rank {rank} is in user code", found)
    assert start is not None
    return start


def test_the_number_of_restarts_is_a_variable_only_if_there_are_any(executor):
    def variables(**placement):
        return executor().plan(CONTEXT, Placement(**placement)).request["jobs"][0]["Environment"]

    assert MAX_RESTARTS not in variables()
    assert variables(max_restarts=3)[MAX_RESTARTS] == "3"
    with pytest.raises(InvalidSpec):
        Placement(env={MAX_RESTARTS: "3"})


def test_a_number_of_restarts_that_is_none_is_refused_in_the_container():
    with pytest.raises(ConfigError):
        prepare([], {MAX_RESTARTS: "many"})


def test_a_failed_entry_is_restarted_in_its_job_and_registered(bench, peer):
    with launched(bench, "fail_once", 1, max_restarts=2) as run:
        assert over(bench, run).state is ReplicaState.SUCCEEDED
        assert run.status().replicas[0].attempt == 1
        outcome = run.result().raise_for_failures().outcomes[0]
        assert (outcome.attempt, outcome.result) == (1, "second try")
        assert registered(bench, run.id) == [0, 1]
        assert len(peer.engine.jobs) == 1


def test_a_restarted_replica_is_running_and_says_why_it_was_restarted(bench):
    with launched(bench, "hold", 1, max_restarts=1) as run:
        os.kill(attempt_of(bench, run.id, 0, 0).pid, signal.SIGKILL)
        attempt_of(bench, run.id, 0, 1)
        until(bench, "the heartbeat of attempt 1", lambda: run.status().replicas[0].attempt == 1)
        replica = run.status().replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.RUNNING, Reason.OK)
        assert "attempt 0" in replica.message
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_restarts_end_when_they_are_used_up(bench):
    with launched(bench, "act", 1, args={"parts": ["raise"]}, max_restarts=1) as run:
        assert over(bench, run).state is ReplicaState.FAILED
        outcome = run.result().outcomes[0]
        assert (outcome.state, outcome.reason, outcome.attempt) == (ReplicaState.FAILED, Reason.USER_ERROR, 1)
        assert [start.attempt for start in contract_jobs.starts(bench.store, run.id)] == [0, 1]
        assert run.status().replicas[0].attempt == 1


def test_a_spot_interruption_counts_and_no_attempt_is_used_twice(bench, peer):
    """Attempt 0 fails, attempt 1 loses its machine, attempt 2 fails and is the last one."""
    with launched(bench, "hold", 1, max_restarts=2) as run:
        entered(bench, run)
        os.kill(attempt_of(bench, run.id, 0, 0).pid, signal.SIGKILL)
        attempt_of(bench, run.id, 0, 1)
        until(bench, "attempt 1 is registered", lambda: registered(bench, run.id) == [0, 1])
        peer.engine.jobs[job_name(run.handle.native_id, 0)].interrupt()
        os.kill(attempt_of(bench, run.id, 0, 2).pid, signal.SIGKILL)
        assert over(bench, run).state is ReplicaState.FAILED
        assert run.result().outcomes[0].attempt == 2
        assert registered(bench, run.id) == [0, 1, 2]
