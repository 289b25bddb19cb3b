"""The Role of a launcher of AppWrappers is enough for a whole life of runs, and `doctor` agrees."""

from __future__ import annotations

from typing import Any

from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.executors.appwrapper.role import role
from atoll.executors.appwrapper.settings import AppWrapperSettings
from atoll.kube.names import ENDED
from atoll.runs.prepare import prepare
from atoll.status import ReplicaState
from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.wrapper_scenario import QUICK

JOBS = "atoll.testing.contract_jobs"
LIMIT_S = 60.0


def launcher(namespace: QueueNamespace, **settings: Any) -> AppWrapperExecutor:
    """An executor of a user who has only the Role of these settings."""
    made = {"image": "atoll-test", "store_is_mounted": True, "namespace": namespace.name, **QUICK, **settings}
    config = namespace.user("launcher", role(namespace.name, AppWrapperSettings(**made))["rules"])
    return AppWrapperExecutor(kubeconfig=str(config), **made)


def test_a_whole_life_of_runs_in_a_queue_needs_no_more_than_the_role(queue_namespace: QueueNamespace, store: str):
    queue = queue_namespace.queue(cpu="10")
    executor = launcher(queue_namespace, hostnames=True, queue=queue.name, default_cpus=0.1)
    assert [(check.name, check.message) for check in executor.diagnose() if not check.ok] == []
    run = prepare(f"{JOBS}:say", on=executor, store=store, replicas=2, args={"lines": ["a"]}).submit()
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert (list(run.logs(0, follow=True)), list(run.executor.logs(run.handle, 1))) == (["a"], ["a"])
    failing = prepare(f"{JOBS}:act", on=executor, store=store, replicas=1, args={"parts": ["raise"]}).submit()
    assert failing.wait(LIMIT_S).state is ReplicaState.FAILED
    kept = queue_namespace.get("appwrappers", failing.handle.native_id)["metadata"]["annotations"]
    assert f"{ENDED}0" in kept
    other = prepare(f"{JOBS}:hold", on=executor, store=store, replicas=1).submit()
    assert other.handle in [stray.handle for stray in executor.strays()]
    other.cancel()
    assert executor.origin(other.handle) is None


def test_doctor_says_which_appwrappers_the_cluster_has(queue_namespace: QueueNamespace, mcad_namespace):
    for namespace, version in ((queue_namespace, "v1beta2"), (mcad_namespace, "v1beta1")):
        executor = AppWrapperExecutor(kubeconfig=str(namespace.kubeconfig), image="atoll-test")
        (found,) = [check for check in executor.diagnose() if check.name == "appwrapper"]
        assert found.ok
        assert f"workload.codeflare.dev/{version}" in found.message
    (wrong,) = [
        check
        for check in AppWrapperExecutor(kubeconfig=str(mcad_namespace.kubeconfig), queue="q").diagnose()
        if check.name == "appwrapper"
    ]
    assert not wrong.ok


def test_doctor_checks_the_queue_and_its_priority_class(queue_namespace: QueueNamespace):
    queue, high = queue_namespace.queue(), queue_namespace.priority_class("high", 100)
    place = {"kubeconfig": str(queue_namespace.kubeconfig), "namespace": queue_namespace.name, "image": "atoll-test"}

    def failed(**settings: Any) -> list[str]:
        return [check.name for check in AppWrapperExecutor(**place, **settings).diagnose() if not check.ok]

    assert failed(queue=queue.name, priority=high) == []
    assert failed(queue="nope") == ["queue"]
    assert failed(queue=queue.name, priority="nope") == ["queue"]
