"""Runs of the Kubernetes executor on the real control plane, with pods that are processes."""

from __future__ import annotations

import pytest

from atoll.errors import Conflict, InvalidSpec
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.runs.prepare import prepare
from atoll.status import Reason, ReplicaState

pytestmark = [pytest.mark.process, pytest.mark.server]

JOBS = "atoll.testing.contract_jobs"
LIMIT_S = 60.0


@pytest.fixture
def executor(namespace):
    return KubernetesExecutor(kubeconfig=str(namespace.kubeconfig), image="atoll-test", store_is_mounted=True)


def started(executor, store, entry, replicas=2, **options):
    return prepare(f"{JOBS}:{entry}", on=executor, store=store, replicas=replicas, **options).submit()


def test_a_run_succeeds_and_its_results_and_logs_are_there(executor, store):
    run = started(executor, store, "say", args={"lines": ["a", "b"]})
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    result = run.result().raise_for_failures()
    assert [outcome.rank for outcome in result.outcomes] == [0, 1]
    assert list(run.logs(1)) == ["a", "b"]


def test_a_rank_that_fails_does_not_end_the_others(executor, store):
    run = started(executor, store, "act", args={"parts": ["return", "raise"]})
    status = run.wait(LIMIT_S)
    assert [(r.state, r.exit_code) for r in status.replicas] == [
        (ReplicaState.SUCCEEDED, 0),
        (ReplicaState.FAILED, 1),
    ]
    assert status.replicas[1].reason is Reason.USER_ERROR


def test_a_cancelled_run_is_gone_and_known_as_cancelled(executor, store, namespace):
    run = started(executor, store, "hold")
    namespace.until_pods(run.handle.native_id, lambda pods: [p["status"].get("phase") for p in pods] == ["Running"] * 2)
    run.cancel()
    assert namespace.pods(run.handle.native_id) == []
    assert {r.state for r in run.status().replicas} == {ReplicaState.CANCELLED}
    run.cancel()


def test_a_second_launch_adopts_the_job_and_another_request_is_a_conflict(executor, store):
    run = started(executor, store, "hold", run_id="exp")
    assert started(executor, store, "hold", run_id="exp").handle == run.handle
    plan = run.plan()
    other = plan.request["job"] | {"metadata": {**plan.request["job"]["metadata"], "annotations": {}}}
    with pytest.raises(Conflict):
        executor._of(run.handle).create(other, plan.request["namespace"], "exp")
    run.cancel()


def test_the_server_reports_all_problems_before_anything_is_recorded(executor, store):
    overlay = {"spec": {"template": {"spec": {"restartPolicy": "Never", "dnsPolicy": "Nonsense"}}}}
    with pytest.raises(InvalidSpec, match="dnsPolicy"):
        started(executor.with_settings(overlay=overlay), store, "echo")
