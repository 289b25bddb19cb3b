"""Ranks that wait on the real control plane, and why, in the words of the cluster."""

from __future__ import annotations

import pytest

from atoll.errors import InvalidSpec
from atoll.runs.run import Run
from atoll.status import Reason, ReplicaState
from services.kubernetes.fault_proxy import Fault
from services.kubernetes.namespace import Namespace
from services.kubernetes.scenario import HOLD, Scenario, rows

PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
ENFORCE = {"pod-security.kubernetes.io/enforce": "restricted"}


def message(scenario: Scenario, run: Run, reason: Reason) -> str:
    """Why rank 0 waits, once it does so for this reason. The run is cancelled then."""
    row = scenario.with_reason(run, reason)
    assert (row.state, row.exit_code, row.attempt) == (PENDING, None, 0)
    run.cancel()
    assert {row.state for row in run.status().replicas} == {ReplicaState.CANCELLED}
    return row.message


def hide(scenario: Scenario, kind: str) -> None:
    """The user may not read objects of this kind, so that only the cluster finds out that one is missing."""
    scenario.proxy.faults.append(Fault("GET", rf"/api/v1/namespaces/[^/]+/{kind}/[^/]+", status=403, times=99))


def test_no_node_has_enough_processors(scenario: Scenario):
    run = scenario.program("true", cpus=100_000)
    assert "Insufficient cpu" in message(scenario, run, Reason.UNSCHEDULABLE)


def test_no_node_has_enough_gpus(scenario: Scenario):
    run = scenario.program("true", gpu="A100:1000")
    assert "Insufficient nvidia.com/gpu" in message(scenario, run, Reason.UNSCHEDULABLE)


def test_the_image_cannot_be_pulled(scenario: Scenario):
    run = scenario.program("true", image="buzybox")
    scenario.until(run, lambda status: "ImagePullBackOff" in status.replicas[0].message)
    assert "buzybox" in message(scenario, run, Reason.IMAGE)


def test_a_secret_is_missing(scenario: Scenario):
    secrets = {"TOKEN": "kubernetes:key/token"}
    with pytest.raises(InvalidSpec):
        scenario.program("echo $TOKEN", secrets=secrets)
    hide(scenario, "secrets")
    run = scenario.program("echo $TOKEN", secrets=secrets)
    row = scenario.with_reason(run, Reason.CONFIG)
    assert (row.state, row.host in ("node-1", "node-2")) == (PENDING, True)
    assert 'secret "key" not found' in row.message
    scenario.namespace.make("secrets", {"metadata": {"name": "key"}, "stringData": {"token": "given"}})
    assert rows(scenario.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2
    assert scenario.logs(run, 0) == ["given"]


def test_a_service_account_is_missing(scenario: Scenario):
    with pytest.raises(InvalidSpec):
        scenario.program("true", service_account="nobody")
    hide(scenario, "serviceaccounts")
    run = scenario.program("true", service_account="nobody")
    assert 'serviceaccount "nobody" not found' in message(scenario, run, Reason.CONFIG)


def test_a_volume_is_missing(scenario: Scenario):
    volume = {"config_map": "gone", "mount": "/data"}
    with pytest.raises(InvalidSpec):
        scenario.program("true", volumes=[volume])
    hide(scenario, "configmaps")
    run = scenario.program("true", volumes=[volume])
    assert 'configmap "gone" not found' in message(scenario, run, Reason.CONFIG)


def test_a_quota_forbids_every_pod(scenario: Scenario):
    _quota(scenario.namespace, 0)
    assert "exceeded quota: few" in message(scenario, scenario.program("true"), Reason.QUOTA)


def test_a_quota_forbids_some_pods(scenario: Scenario):
    _quota(scenario.namespace, 1)
    run = scenario.program(HOLD)
    status = scenario.until(run, lambda found: {row.reason for row in found.replicas} == {Reason.OK, Reason.QUOTA})
    assert {row.state for row in status.replicas} == {RUNNING, PENDING}
    run.cancel()


def _quota(namespace: Namespace, pods: int) -> None:
    namespace.make("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"pods": str(pods)}}})
    namespace.until("resourcequotas", "few", lambda found: bool(found and found.get("status", {}).get("used")))


def test_pod_security_that_the_namespace_enforces_is_found_before_the_create(scenario: Scenario):
    scenario.namespace.api.patch(f"/api/v1/namespaces/{scenario.namespace.name}", {"metadata": {"labels": ENFORCE}})
    with pytest.raises(InvalidSpec) as caught:
        scenario.program("true")
    assert any("runAsNonRoot" in problem for problem in caught.value.problems)
    assert scenario.namespace.api.items(scenario.namespace.path("jobs")) == []
    run = scenario.program("true", pod_security="restricted", run_as_user=1000)
    assert rows(scenario.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2


def test_pod_security_that_the_namespace_enforces_later(scenario: Scenario):
    run = scenario.program(HOLD, max_restarts=1)
    scenario.running(run)
    scenario.namespace.api.patch(f"/api/v1/namespaces/{scenario.namespace.name}", {"metadata": {"labels": ENFORCE}})
    scenario.namespace.api.delete(scenario.namespace.path("pods", scenario.pod(run)))
    row = scenario.with_reason(run, Reason.CONFIG)
    assert row.state is PENDING
    assert "violates PodSecurity" in row.message
    run.cancel()


def test_a_run_that_is_suspended_and_resumed(scenario: Scenario):
    run = scenario.program(HOLD)
    scenario.running(run)
    path = scenario.namespace.path("jobs", run.handle.native_id)
    scenario.namespace.api.patch(path, {"spec": {"suspend": True}})
    status = scenario.until(run, lambda found: all(row.reason is Reason.WAITING for row in found.replicas))
    assert [row.state for row in status.replicas] == [PENDING] * 2
    assert all("suspended" in row.message for row in status.replicas)
    scenario.namespace.api.patch(path, {"spec": {"suspend": False}})
    status = scenario.running(run)
    assert [row.reason for row in status.replicas] == [Reason.OK] * 2
    run.cancel()
