"""AppWrappers in trouble, on the real controllers: deleted, preempted, refused, and a controller that is down."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import AuthError, BackendUnavailable, InvalidSpec, RunNotFound, StopFailed, SubmitError
from atoll.kube.gang import KUEUE_QUEUE
from atoll.status import Reason, ReplicaState
from services.kubernetes.cluster import PRIVATE
from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.fault_proxy import Fault
from services.kubernetes.kubelet.node import NodeSpec
from services.kubernetes.scenario import HOLD, rows
from services.kubernetes.wrapper_scenario import WrapperScenario

PENDING, RUNNING, LOST = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.LOST
SUCCEEDED, FAILED = ReplicaState.SUCCEEDED, ReplicaState.FAILED
WRAPPERS = r"/apis/workload\.codeflare\.dev/v1beta2/namespaces/[^/]+/appwrappers(/[^/]+)?"


def test_a_job_that_somebody_deletes_ends_the_run(wrapped: WrapperScenario):
    run = wrapped.program(HOLD)
    wrapped.running(run)
    name, namespace = run.handle.native_id, wrapped.namespace
    namespace.api.delete(namespace.path("jobs", name), propagationPolicy="Background")
    namespace.until("jobs", name, lambda job: job is None)
    namespace.api.patch(namespace.path("appwrappers", name), {"metadata": {"annotations": {"wake": "up"}}})
    found = wrapped.until_phase(run, "Failed")
    assert [each["reason"] for each in found["status"]["conditions"] if each["type"] == "Unhealthy"] == [
        "MissingComponent"
    ]
    assert {row.state for row in wrapped.ended(run).replicas} == {FAILED}


def test_an_appwrapper_that_somebody_deletes_is_lost(wrapped: WrapperScenario):
    run = wrapped.program(HOLD)
    wrapped.running(run)
    namespace = wrapped.namespace
    namespace.api.delete(namespace.path("appwrappers", run.handle.native_id), propagationPolicy="Background")
    assert {row.state for row in wrapped.ended(run).replicas} == {LOST}
    run.executor.cancel(run.handle)
    with pytest.raises(RunNotFound):
        list(run.executor.logs(run.handle, 0))


def test_a_job_left_without_its_appwrapper_is_seen_and_stopped(wrapped: WrapperScenario):
    run = wrapped.program(HOLD)
    wrapped.running(run)
    namespace, name = wrapped.namespace, run.handle.native_id
    job = namespace.get("jobs", name)
    namespace.api.delete(namespace.path("appwrappers", name), propagationPolicy="Background")
    namespace.until("appwrappers", name, lambda found: found is None)
    bare = {key: job[key] for key in ("apiVersion", "kind")}
    kept = {key: job["metadata"][key] for key in ("name", "labels", "annotations")}
    spec = {key: value for key, value in job["spec"].items() if key not in ("selector", "suspend")}
    template = spec["template"]
    marks = template["metadata"]["labels"]
    template["metadata"]["labels"] = {key: value for key, value in marks.items() if "controller-uid" not in key}
    namespace.make("jobs", {**bare, "metadata": kept, "spec": spec})
    wrapped.until(run, lambda status: {row.state for row in status.replicas} == {RUNNING})
    assert {row.reason for row in wrapped.status(run).replicas} == {Reason.BACKEND}
    run.executor.cancel(run.handle)
    assert namespace.api.items(namespace.path("pods")) == []


def test_foreign_appwrappers_in_unknown_states_disturb_nothing(wrapped: WrapperScenario):
    run = wrapped.program(HOLD, 1)
    wrapped.running(run)
    foreign = {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper", "metadata": {"name": "foreign"},
               "spec": {"suspend": True, "components": wrapped.wrapper(run)["spec"]["components"]}}  # fmt: skip
    wrapped.namespace.make("appwrappers", foreign)
    path = wrapped.namespace.path("appwrappers", "foreign")
    wrapped.namespace.api.patch(f"{path}/status", {"status": {"phase": "Levitating"}})
    executor: Any = run.executor
    assert [stray.native_id for stray in executor.strays()] == [run.handle.native_id]
    run.executor.cancel(run.handle)
    assert wrapped.namespace.get("appwrappers", "foreign")["metadata"]["name"] == "foreign"


def test_a_job_that_the_cluster_would_refuse_is_told_before_anything_is_created(wrapped: WrapperScenario):
    overlay = {"spec": {"template": {"spec": {"dnsPolicy": "Nonsense"}}}}
    with pytest.raises(InvalidSpec) as caught:
        wrapped.program("true", overlay=overlay)
    assert any("dnsPolicy" in problem for problem in caught.value.problems)
    assert wrapped.namespace.api.items(wrapped.namespace.path("appwrappers")) == []


@pytest.mark.parametrize(("status", "error"), [(401, AuthError), (403, AuthError)])
def test_refusals_of_the_cluster_are_errors_of_atoll(wrapped: WrapperScenario, status, error):
    run = wrapped.program(HOLD, 1)
    wrapped.proxy.faults.append(Fault("GET", WRAPPERS, status=status, times=float("inf")))
    with pytest.raises(error):
        run.executor.status(run.handle)
    wrapped.proxy.faults.clear()
    run.executor.cancel(run.handle)


def test_a_dialect_that_the_cluster_does_not_serve_is_refused(wrapped: WrapperScenario):
    with pytest.raises(InvalidSpec) as caught:
        wrapped.program("true", dialect="v1beta1")
    assert caught.value.fields == ("dialect",)


def test_a_number_as_priority_is_refused_by_a_cluster_without_mcad(wrapped: WrapperScenario):
    with pytest.raises(InvalidSpec) as caught:
        wrapped.program("true", priority=5)
    assert caught.value.fields == ("priority",)


def test_a_queue_or_a_class_that_is_missing_is_told_before_the_launch(
    wrapped: WrapperScenario, queue_namespace: QueueNamespace
):
    queue = queue_namespace.queue(cpu="1")
    for settings in ({"queue": "nope"}, {"queue": queue.name, "priority": "nope"}):
        with pytest.raises(InvalidSpec) as caught:
            wrapped.program("true", cpus=0.1, **settings)
        assert caught.value.fields == (list(settings)[-1],)


def test_a_run_that_never_fits_is_refused_and_leaves_nothing(wrapped: WrapperScenario, queue_namespace: QueueNamespace):
    queue = queue_namespace.queue(cpu="100m")
    with pytest.raises(SubmitError) as caught:
        wrapped.program("true", cpus=1.0, queue=queue.name)
    assert caught.value.left_running == ()
    assert wrapped.namespace.api.items(wrapped.namespace.path("appwrappers")) == []


def test_a_full_queue_says_so_and_a_preempted_run_comes_back(wrapped: WrapperScenario, queue_namespace: QueueNamespace):
    queue = queue_namespace.queue(cpu="300m")
    high = queue_namespace.priority_class("high", 100)
    low = wrapped.program(HOLD, 2, run_id="low", cpus=0.1, queue=queue.name)
    wrapped.running(low)
    first = wrapped.program(HOLD, 2, run_id="first", cpus=0.1, queue=queue.name, priority=high)
    wrapped.running(first)
    waiting = wrapped.with_reason(low, Reason.PREEMPTED)
    assert waiting.state is PENDING
    assert waiting.attempt == 1
    assert wrapped.wrapper(low)["metadata"]["labels"][KUEUE_QUEUE] == queue.name
    first.executor.cancel(first.handle)
    back = wrapped.running(low)
    assert {row.attempt for row in back.replicas} == {1}
    low.executor.cancel(low.handle)


def test_equal_names_in_two_namespaces_are_two_runs(wrapped: WrapperScenario, queue_cluster, tmp_path):
    other = QueueNamespace.create(queue_cluster, f"{wrapped.namespace.name[:50]}-two", tmp_path)
    try:
        first = wrapped.program("echo one", 1)
        second = wrapped.program("echo two", 1, namespace=other.name, store=(tmp_path / "other").as_uri())
        assert first.handle.native_id != second.handle.native_id
        for run in (first, second):
            assert rows(wrapped.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 0)]
            wrapped._seen.clear()
    finally:
        other.remove()


def test_a_run_on_a_lost_node_starts_again_on_another(wrapped: WrapperScenario):
    node = NodeSpec(f"own-{wrapped.namespace.name[-8:]}")
    with wrapped.namespace.cluster.node(node) as made:
        toleration = {"key": PRIVATE, "operator": "Equal", "value": made.name, "effect": "NoSchedule"}
        term = {"matchExpressions": [{"key": PRIVATE, "operator": "In", "values": [made.name]}]}
        preferred = [{"weight": 100, "preference": term}]
        affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        settings = {"tolerations": [toleration], "affinity": affinity, "node_lost_s": 0, "warmup_s": 5.0}
        run = wrapped.program(HOLD, 1, max_restarts=1, **settings)
        assert [row.host for row in wrapped.running(run).replicas] == [made.name]
        wrapped.namespace.cluster.kubelet("go_offline", node=made.name)
        wrapped.until(run, lambda status: status.replicas[0].attempt == 1, timeout_s=180)
        back = wrapped.until(run, lambda status: status.replicas[0].state is RUNNING)
        assert back.replicas[0].host != made.name
        run.executor.cancel(run.handle)
        wrapped.namespace.cluster.kubelet("go_online", node=made.name)


@pytest.mark.alone
def test_a_controller_that_is_down_is_named(wrapped: WrapperScenario):
    run = wrapped.program(HOLD, 1)
    wrapped.running(run)
    wrapped.namespace.controllers("stop", name="appwrapper")
    assert {row.state for row in wrapped.status(run).replicas} == {RUNNING}
    with pytest.raises(BackendUnavailable) as caught:
        wrapped.program("true", 1, run_id="another", patience_s=1.0)
    assert caught.value.reason == "webhook"
    with pytest.raises(StopFailed, match="may be down"):
        wrapped.executor(stop_s=30.0).cancel(run.handle)
    assert wrapped.namespace.api.items(wrapped.namespace.path("pods")) == []
    wrapped.namespace.controllers("start", name="appwrapper")
    run.executor.cancel(run.handle)
    assert wrapped.namespace.api.items(wrapped.namespace.path("pods")) == []
