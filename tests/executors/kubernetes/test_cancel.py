"""Cancelling runs on the real control plane: afterwards no pod runs, or every pod that may run is named."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import AuthError, StopFailed
from atoll.runs.wait import wait
from atoll.status import Reason, ReplicaState
from services.kubernetes.namespace import Namespace
from services.kubernetes.scenario import HOLD, LIMIT_S, Scenario, rows

RUNNING, SUCCEEDED, CANCELLED, LOST = (
    ReplicaState.RUNNING, ReplicaState.SUCCEEDED, ReplicaState.CANCELLED, ReplicaState.LOST,
)  # fmt: skip


def is_gone(scenario: Scenario, run) -> bool:
    """Neither the Job nor a pod of it is there."""
    name = run.handle.native_id
    jobs = scenario.namespace.api.items(scenario.namespace.path("jobs"), fieldSelector=f"metadata.name={name}")
    return not jobs and not scenario.namespace.pods(name)


def test_a_program_that_ends_on_sigterm_has_its_grace_period(scenario: Scenario, tmp_path):
    said = tmp_path / "said"
    script = f"trap 'sleep 0.3; echo bye >> {said}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    run = scenario.program(script, grace_s=60)
    scenario.running(run)
    run.cancel()
    assert said.read_text() == "bye\nbye\n"
    assert is_gone(scenario, run)
    assert [row.state for row in run.status().replicas] == [CANCELLED] * 2
    assert [row.state for row in scenario.status(run).replicas] == [LOST] * 2
    run.cancel()


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace_period(scenario: Scenario):
    run = scenario.program("trap '' TERM; echo ready; while :; do sleep 0.05; done", grace_s=1)
    scenario.running(run)
    run.cancel()
    assert is_gone(scenario, run)
    assert [row.state for row in run.status().replicas] == [CANCELLED] * 2


def test_a_run_that_is_cancelled_twice_at_once(scenario: Scenario):
    run = scenario.program(HOLD, grace_s=60)
    scenario.running(run)
    path = scenario.namespace.path("jobs", run.handle.native_id)
    scenario.namespace.fault("ignore-sigterm")
    scenario.namespace.api.delete(path, {"propagationPolicy": "Foreground"})
    row = scenario.with_reason(run, Reason.STOPPING)
    assert (row.state, "being deleted" in row.message) == (RUNNING, True)
    scenario.namespace.cluster.kubelet("clear", namespace=scenario.namespace.name)
    run.cancel()
    assert is_gone(scenario, run)


def test_a_run_that_has_ended_is_not_removed_by_cancel(scenario: Scenario):
    run = scenario.program("true")
    scenario.ended(run)
    run.cancel()
    assert rows(scenario.status(run)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2


def test_pods_whose_job_was_deleted_without_them(scenario: Scenario):
    run = scenario.program(HOLD)
    scenario.running(run)
    name = run.handle.native_id
    scenario.namespace.api.delete(scenario.namespace.path("jobs", name), {"propagationPolicy": "Orphan"})
    scenario.namespace.until("jobs", name, lambda job: job is None)
    scenario.namespace.until_pods(name, lambda pods: not any(pod["metadata"].get("ownerReferences") for pod in pods))
    status = scenario.status(run)
    assert rows(status) == [(RUNNING, Reason.BACKEND, None, 0)] * 2
    assert all("its Job was removed" in row.message for row in status.replicas)
    pods = {str(row.native_id) for row in status.replicas}
    with pytest.raises(StopFailed) as caught:
        run.cancel()
    assert set(caught.value.left_running) == pods
    assert "kubectl delete pod" in str(caught.value.hint)
    for pod in pods:
        scenario.namespace.api.delete(scenario.namespace.path("pods", pod))
    scenario.namespace.until_pods(name, lambda left: not left)
    run.cancel()
    assert is_gone(scenario, run)
    assert [row.state for row in run.status().replicas] == [LOST] * 2


def test_a_job_that_was_deleted_in_the_background_is_not_gone_while_its_pods_run(scenario: Scenario):
    scenario.namespace.fault("ignore-sigterm")
    run = scenario.program(HOLD, grace_s=60)
    scenario.running(run)
    name = run.handle.native_id
    scenario.namespace.api.delete(scenario.namespace.path("jobs", name), {"propagationPolicy": "Background"})
    scenario.namespace.until("jobs", name, lambda job: job is None)
    status = scenario.until(run, lambda found: found.replicas[0].reason is Reason.STOPPING)
    assert status.replicas[0].state is RUNNING
    scenario.namespace.cluster.kubelet("clear", namespace=scenario.namespace.name)
    run.cancel()
    assert is_gone(scenario, run)


def test_a_user_who_may_not_delete_is_told_so(scenario: Scenario):
    run = scenario.program(HOLD)
    scenario.running(run)
    rules = [{"apiGroups": ["batch", ""], "resources": ["jobs", "pods"], "verbs": ["get", "list"]}]
    reader = scenario.executor(kubeconfig=str(scenario.namespace.user("reader", rules)))
    with pytest.raises(StopFailed) as caught:
        reader.cancel(run.handle)
    assert isinstance(caught.value.__cause__, AuthError)
    assert [row.state for row in scenario.status(run).replicas] == [RUNNING] * 2
    run.cancel()


def test_two_namespaces_with_one_run_id(scenario: Scenario):
    other = Namespace.create(scenario.namespace.cluster, f"{scenario.namespace.name}-b", scenario.namespace.folder)
    try:
        run = scenario.program(HOLD)
        elsewhere = scenario.executor(namespace=other.name, command=("sh", "-c", "echo twin"))
        twin = elsewhere.submit(elsewhere.plan(RunContext(run.id, run.store.uri), run.spec.placement))
        assert (twin.native_id, twin.scope == run.handle.scope) == (run.handle.native_id, False)
        ended = wait(lambda: elsewhere.status(twin), timeout_s=LIMIT_S)
        assert rows(ended) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2
        assert list(elsewhere.logs(twin, 0)) == ["twin"]
        assert rows(scenario.running(run)) == [(RUNNING, Reason.OK, None, 0)] * 2
        run.cancel()
        assert rows(elsewhere.status(twin)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2
    finally:
        other.remove()
