"""What takes pods away on the real control plane: evictions, preemption, people and lost nodes. No rank runs twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from atoll.errors import StopFailed
from atoll.keys import RunKeys
from atoll.kube.names import MANAGED_BY, MANAGER
from atoll.status import Reason, ReplicaState
from services.kubernetes.cluster import PRIVATE
from services.kubernetes.kubelet.node import NodeSpec
from services.kubernetes.scenario import HOLD, Scenario, rows

PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST


@contextmanager
def private_node(scenario: Scenario, **spec) -> Iterator[tuple[str, dict]]:
    """A node for this test alone, and the settings that bring replicas to it."""
    with scenario.namespace.cluster.node(NodeSpec(f"own-{scenario.namespace.name[-8:]}", **spec)) as node:
        toleration = {"key": PRIVATE, "operator": "Equal", "value": node.name, "effect": "NoSchedule"}
        yield node.name, {"node_selector": {PRIVATE: node.name}, "tolerations": [toleration], "node_lost_s": 0}


def evict(scenario: Scenario, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    scenario.namespace.api.create(f"{scenario.namespace.path('pods', pod)}/eviction", body)


ONCE = "[ -e {flag} ] && exit 0; trap 'touch {flag}; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
"""Runs until it is told to end; the next attempt succeeds."""


def test_an_evicted_rank_is_replaced_and_the_eviction_is_not_counted(scenario: Scenario, tmp_path):
    script = f"[ $REPLICA_RANK = 0 ] || {{ {HOLD}; }}; {ONCE.format(flag=tmp_path / 'flag')}"
    run = scenario.program(script)
    before = scenario.running(run)
    evict(scenario, scenario.pod(run))
    again = scenario.with_reason(run, Reason.RESTARTING)
    assert (again.state, again.attempt) == (PENDING, 1)
    assert "EvictionByEvictionAPI" in again.message
    status = scenario.until(run, lambda found: found.replicas[0].state is SUCCEEDED)
    assert rows(status) == [(SUCCEEDED, Reason.OK, 0, 1), (RUNNING, Reason.OK, None, 0)]
    assert status.replicas[0].native_id != before.replicas[0].native_id
    assert scenario.job(run)["status"].get("failedIndexes") in (None, "")
    run.cancel()


def test_a_rank_that_is_preempted_comes_back(scenario: Scenario):
    words = scenario.namespace.name[-8:]
    classes = {"low": f"low-{words}", "high": f"high-{words}"}
    for number, name in enumerate(classes.values(), 1):
        body = {"metadata": {"name": name}, "value": number * 1000}
        scenario.namespace.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)
    with private_node(scenario, cpu="2") as (node, settings):
        run = scenario.program(HOLD, 1, cpus=1.5, priority_class=classes["low"], **settings)
        scenario.running(run)
        other = scenario.program(HOLD, 1, cpus=1.5, priority_class=classes["high"], run_id=f"{scenario.name}-by",
                                 **settings)  # fmt: skip
        row = scenario.until(run, lambda found: "PreemptionByScheduler" in found.replicas[0].message).replicas[0]
        assert row.host == node
        assert [r.host for r in scenario.running(other).replicas] == [node]
        waits = scenario.with_reason(run, Reason.UNSCHEDULABLE)
        assert (waits.state, waits.attempt) == (PENDING, 1)
        other.cancel()
        assert rows(scenario.running(run)) == [(RUNNING, Reason.OK, None, 1)]
        run.cancel()


def test_a_launch_adopts_a_run_that_is_disturbed_and_not_cancelled(scenario: Scenario):
    """A rank that is being evicted, and then a Job that is being suspended, are not taken for a cancel."""
    run = scenario.program(HOLD, grace_s=30)
    scenario.running(run)
    scenario.namespace.fault("ignore-sigterm")
    pod = scenario.pod(run)
    evict(scenario, pod)
    assert scenario.with_reason(run, Reason.STOPPING).state is RUNNING
    assert scenario.program(HOLD, grace_s=30).was_there
    path = scenario.namespace.path("jobs", run.handle.native_id)
    scenario.namespace.api.patch(path, {"spec": {"suspend": True}})
    assert scenario.with_reason(run, Reason.STOPPING, rank=1).state is RUNNING
    run.store.delete(RunKeys(run.id).handle())  # as if the first launcher had died before it recorded the handle
    again = scenario.program(HOLD, grace_s=30)
    assert (again.handle, again.launch) == (run.handle, 1)


def test_a_pod_that_somebody_deletes_fails_its_rank_alone(scenario: Scenario):
    run = scenario.program(HOLD)
    scenario.running(run)
    scenario.namespace.api.delete(scenario.namespace.path("pods", scenario.pod(run)))
    status = scenario.until(run, lambda found: found.replicas[0].state.is_terminal)
    assert (status.replicas[0].state, status.replicas[1].state) == (FAILED, RUNNING)
    job = run.handle.native_id
    scenario.namespace.until_pods(job, lambda pods: len(pods) == 1)
    row = scenario.status(run).replicas[0]
    assert (row.state, row.reason) == (FAILED, Reason.KILLED)
    run.cancel()


def test_a_pod_that_somebody_deletes_is_replaced_if_the_run_has_restarts(scenario: Scenario, tmp_path):
    run = scenario.program(ONCE.format(flag=tmp_path / "flag"), 1, max_restarts=1)
    scenario.running(run)
    scenario.namespace.api.delete(scenario.namespace.path("pods", scenario.pod(run)))
    assert rows(scenario.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 1)]


def test_a_lost_node_that_comes_back(scenario: Scenario):
    with private_node(scenario) as (node, settings):
        run = scenario.program(HOLD, 1, **settings)
        scenario.running(run)
        pod = scenario.pod(run)
        scenario.namespace.cluster.kubelet("go_offline", node=node)
        row = scenario.with_reason(run, Reason.STOPPING)
        assert (row.state, row.host, row.native_id) == (RUNNING, node, pod)
        assert f"node lost: `{node}`" in row.message
        scenario.namespace.cluster.kubelet("go_online", node=node)
        again = scenario.with_reason(run, Reason.RESTARTING)
        assert (again.state, again.attempt) == (PENDING, 1)
        assert "DeletionByTaintManager" in again.message
        status = scenario.until(run, lambda found: found.replicas[0].state is RUNNING)
        assert rows(status) == [(RUNNING, Reason.OK, None, 1)]
        run.cancel()


@pytest.mark.slow
def test_a_lost_node_that_is_removed(scenario: Scenario):
    with private_node(scenario) as (node, settings):
        run = scenario.program(HOLD, 1, **settings)
        scenario.running(run)
        scenario.namespace.cluster.kubelet("go_offline", node=node)
        scenario.with_reason(run, Reason.STOPPING)
        scenario.namespace.api.delete(f"/api/v1/nodes/{node}")
        again = scenario.until(run, lambda found: found.replicas[0].attempt == 1, timeout_s=150).replicas[0]
        assert again.state is PENDING
        scenario.with_reason(run, Reason.UNSCHEDULABLE)
        run.cancel()
        assert [row.state for row in run.status().replicas] == [CANCELLED]


def test_a_pod_of_a_lost_node_is_named_by_cancel_with_the_choice_to_force(scenario: Scenario):
    with private_node(scenario) as (node, settings):
        run = scenario.program(HOLD, 1, stop_s=2.0, **settings)
        scenario.running(run)
        pod = scenario.pod(run)
        scenario.namespace.cluster.kubelet("go_offline", node=node)
        scenario.with_reason(run, Reason.STOPPING)
        with pytest.raises(StopFailed) as caught:
            run.cancel()
        assert list(caught.value.left_running) == [pod]
        assert node in str(caught.value)
        assert f"kubectl delete pod {pod} --force" in str(caught.value.hint)
        row = scenario.status(run).replicas[0]
        assert (row.state, row.reason) == (RUNNING, Reason.STOPPING)
        assert "node lost" in row.message
        scenario.namespace.api.delete(scenario.namespace.path("pods", pod), {"gracePeriodSeconds": 0})
        scenario.namespace.until("jobs", run.handle.native_id, lambda found: found is None)
        run.cancel()
        assert [row.state for row in run.status().replicas] == [LOST]  # the Job was gone before the second cancel
        scenario.namespace.cluster.kubelet("go_online", node=node)


def test_a_fail_fast_run_ends_although_a_node_is_lost(scenario: Scenario, tmp_path):
    script = f"echo ready; until [ -e {tmp_path}/fail-$REPLICA_RANK ]; do sleep 0.05; done; exit 3"
    apart = {"labelSelector": {"matchLabels": {MANAGED_BY: MANAGER}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    with private_node(scenario) as (node, settings):
        run = scenario.program(script, 3, fail_fast=True, affinity=affinity, **{**settings, "node_selector": {}})
        hosts = [row.host for row in scenario.running(run).replicas]
        assert set(hosts) == {"node-1", "node-2", node}
        lost, culprit = hosts.index(node), hosts.index("node-1")
        scenario.namespace.cluster.kubelet("go_offline", node=node)
        scenario.with_reason(run, Reason.STOPPING, lost)
        (tmp_path / f"fail-{culprit}").touch()
        status = scenario.ended(run)
        assert "Failed" not in {each["type"] for each in scenario.job(run)["status"]["conditions"]}
        assert rows(status)[culprit] == (FAILED, Reason.USER_ERROR, 3, 0)
        assert rows(status)[lost][:2] == (FAILED, Reason.PREEMPTED)
        assert "node lost" in status.replicas[lost].message
        assert rows(status)[hosts.index("node-2")][:2] == (CANCELLED, Reason.CANCELLED)
        scenario.namespace.cluster.kubelet("go_online", node=node)
