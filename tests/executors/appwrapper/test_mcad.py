"""Runs in AppWrappers of MCAD, on the real controller: the Job says how they are, and Atoll restarts them."""

from __future__ import annotations

import pytest

from atoll.errors import InvalidSpec
from atoll.kube.names import ATTEMPT
from atoll.status import Reason, ReplicaState
from services.kubernetes.namespace import MCAD_GROUPS, Namespace
from services.kubernetes.scenario import HOLD, rows
from services.kubernetes.wrapper_scenario import WrapperScenario

SUCCEEDED, FAILED, CANCELLED = ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED
PENDING = ReplicaState.PENDING
OK, USER_ERROR = Reason.OK, Reason.USER_ERROR
ONE_FAILS = f'if [ $REPLICA_RANK = 1 ]; then echo "no luck"; exit 3; fi; {HOLD}'


def test_mcad_runs_every_replica_to_the_end(dispatched: WrapperScenario):
    run = dispatched.program("echo hello from $REPLICA_RANK", cpus=0.1, hostnames=True)
    assert rows(dispatched.ended(run)) == [(SUCCEEDED, OK, 0, 0)] * 2
    assert dispatched.wrapper(run)["apiVersion"] == "workload.codeflare.dev/v1beta1"
    assert list(run.executor.logs(run.handle, 1)) == ["hello from 1"]
    dispatched.namespace.until(
        "appwrappers", run.handle.native_id, lambda found: found["status"].get("state") == "Completed"
    )
    assert rows(dispatched.status(run)) == [(SUCCEEDED, OK, 0, 0)] * 2


def test_completed_is_a_failure_if_the_job_says_so(dispatched: WrapperScenario):
    run = dispatched.program(ONE_FAILS)
    ended = dispatched.ended(run)
    assert rows(ended) == [(CANCELLED, Reason.CANCELLED, None, 0), (FAILED, USER_ERROR, 3, 0)]
    dispatched.namespace.until(
        "appwrappers", run.handle.native_id, lambda found: found["status"].get("state") == "Completed"
    )
    assert rows(dispatched.status(run)) == rows(ended)
    assert "no luck" in list(run.executor.logs(run.handle, 1))


def test_a_command_that_waits_restarts_a_failed_run_on_mcad(dispatched: WrapperScenario, tmp_path):
    seen = f"{tmp_path}/seen-$REPLICA_RANK"
    run = dispatched.program(f"echo try; test -e {seen} || {{ touch {seen}; exit 5; }}", 1, max_restarts=2)
    waiting = dispatched.with_reason(run, Reason.RESTARTING)
    assert (waiting.state, waiting.attempt) == (PENDING, 0)
    uid = dispatched.wrapper(run)["metadata"]["uid"]
    assert [(row.state, row.attempt) for row in run.wait(timeout_s=60).replicas] == [(SUCCEEDED, 1)]
    assert dispatched.wrapper(run)["metadata"]["uid"] != uid
    assert dispatched.annotations(run)[ATTEMPT] == "1"
    assert list(run.executor.attempt_logs(run.handle, 0, 0)) == ["try"]


def test_restarts_on_mcad_have_a_limit(dispatched: WrapperScenario):
    run = dispatched.program("exit 3", 1, max_restarts=1)
    assert [(row.state, row.exit_code, row.attempt) for row in run.wait(timeout_s=60).replicas] == [(FAILED, 3, 1)]
    assert dispatched.annotations(run)[ATTEMPT] == "1"


def test_a_run_that_is_cancelled_while_it_waits_for_its_restart_is_not_started_again(dispatched: WrapperScenario):
    run = dispatched.program("exit 3", 1, max_restarts=1)
    dispatched.with_reason(run, Reason.RESTARTING)
    run.cancel()
    assert {row.state for row in run.wait(timeout_s=30).replicas} == {CANCELLED}
    assert dispatched.namespace.api.items(dispatched.namespace.path("appwrappers")) == []


def test_cancel_on_mcad_returns_when_the_pods_are_gone(dispatched: WrapperScenario):
    run = dispatched.program(HOLD)
    dispatched.running(run)
    run.cancel()
    assert dispatched.namespace.api.items(dispatched.namespace.path("pods")) == []
    assert dispatched.namespace.api.items(dispatched.namespace.path("jobs")) == []
    assert {row.state for row in run.status(progress=False).replicas} == {CANCELLED}


def test_equal_run_ids_in_two_namespaces_of_mcad_both_run(dispatched: WrapperScenario, mcad_cluster, tmp_path):
    other = Namespace.create(mcad_cluster, f"{dispatched.namespace.name[:50]}-two", tmp_path, groups=MCAD_GROUPS)
    try:
        first = dispatched.program("echo one", 1)
        second = dispatched.program("echo two", 1, namespace=other.name, store=(tmp_path / "other").as_uri())
        assert first.handle.native_id != second.handle.native_id
        for run in (first, second):
            assert rows(dispatched.ended(run)) == [(SUCCEEDED, OK, 0, 0)]
            dispatched._seen.clear()
    finally:
        other.remove()


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"queue": "q", "cpus": 0.1}, "queue"), ({"terminal_exit_codes": [3]}, "terminal_exit_codes")],
    ids=["queue", "codes"],
)
def test_what_mcad_does_not_have_is_refused_by_its_cluster(dispatched: WrapperScenario, settings, field):
    with pytest.raises(InvalidSpec) as caught:
        dispatched.program("true", **settings)
    assert caught.value.fields == (field,)


def test_a_run_without_room_says_that_mcad_waits(dispatched: WrapperScenario):
    run = dispatched.program("true", 1, cpus=100_000.0)
    waiting = dispatched.with_reason(run, Reason.CAPACITY)
    assert waiting.state is PENDING
    run.cancel()
