"""What AppWrapper, Kueue and MCAD really do, where our executors take care because of it.

If a new version of a controller behaves better, a test here fails, and the care can go.
"""

from __future__ import annotations

from typing import Any

from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.controllers.requests import appwrapper, in_phase, job, mcad_appwrapper
from services.kubernetes.namespace import Namespace

Object = dict[str, Any]
HOLD = "trap 'exit 0' TERM; while :; do sleep 0.05; done"


def test_an_appwrapper_deletes_the_object_of_another_owner_that_has_its_name(queue_namespace: QueueNamespace):
    queue_namespace.make("jobs", job("taken", HOLD))
    queue_namespace.make("appwrappers", appwrapper("one", job("taken")))
    found = queue_namespace.until("appwrappers", "one", in_phase("Failed", "Succeeded"))
    assert found is not None
    assert found["status"]["phase"] == "Failed"
    assert queue_namespace.until("jobs", "taken", lambda left: left is None) is None


def test_the_time_that_a_succeeded_appwrapper_is_kept_begins_with_its_start(queue_namespace: QueueNamespace):
    """The program runs longer than that time, so its Job goes as soon as it has succeeded."""
    wrapper = appwrapper("one", job("inner", "sleep 3"))
    wrapper["metadata"]["annotations"]["workload.codeflare.dev.appwrapper/successTTLDuration"] = "2s"
    queue_namespace.make("appwrappers", wrapper)
    queue_namespace.until("jobs", "inner", lambda found: found is not None)
    assert queue_namespace.until("jobs", "inner", lambda left: left is None) is None
    assert queue_namespace.get("appwrappers", "one")["status"]["phase"] == "Succeeded"


def test_kueue_undoes_a_suspension_by_hand(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue()
    queue_namespace.make("jobs", job("one", HOLD, queue=queue.name))
    first = queue_namespace.until_pods("one", lambda pods: len(pods) == 2)
    queue_namespace.api.patch(queue_namespace.path("jobs", "one"), {"spec": {"suspend": True}})
    old = {pod["metadata"]["uid"] for pod in first}
    later = queue_namespace.until_pods(
        "one", lambda pods: len(pods) == 2 and old.isdisjoint(pod["metadata"]["uid"] for pod in pods)
    )
    assert len(later) == 2
    assert queue_namespace.get("jobs", "one")["spec"]["suspend"] is False


def test_an_inactive_workload_holds_a_job_until_it_is_active_again(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue()
    uid = queue_namespace.make("jobs", job("one", HOLD, queue=queue.name))["metadata"]["uid"]
    workload = queue_namespace.until_workload(uid, "Admitted")
    path = queue_namespace.path("workloads", workload["metadata"]["name"])
    queue_namespace.api.patch(path, {"spec": {"active": False}})
    held = queue_namespace.until_workload(uid, "Evicted")
    assert next(one["reason"] for one in held["status"]["conditions"] if one["type"] == "Evicted") == "Deactivated"
    queue_namespace.until("jobs", "one", lambda found: found is not None and found["spec"]["suspend"])
    queue_namespace.until_pods("one", lambda pods: not pods)
    queue_namespace.api.patch(path, {"spec": {"active": True}})
    queue_namespace.until("jobs", "one", lambda found: found is not None and not found["spec"]["suspend"])
    assert queue_namespace.get("jobs", "one")["metadata"]["uid"] == uid


def test_a_job_with_an_unknown_priority_gets_no_workload(queue_namespace: QueueNamespace):
    """A second Job, created later, has its Workload first: Kueue has looked at both by then."""
    queue = queue_namespace.queue()
    unknown = {"kueue.x-k8s.io/priority-class": "no-such-class"}
    first = queue_namespace.make("jobs", job("first", queue=queue.name, labels=unknown))
    second = queue_namespace.make("jobs", job("second", queue=queue.name))
    queue_namespace.until_workload(second["metadata"]["uid"], "Finished")
    assert queue_namespace.workload(first["metadata"]["uid"]) is None
    assert queue_namespace.get("jobs", "first")["spec"]["suspend"] is True


def test_mcad_creates_nothing_for_a_name_that_another_namespace_has(mcad_namespace: Namespace):
    """Both say that they run."""
    other = Namespace.create(
        mcad_namespace.cluster, f"{mcad_namespace.name}-b", mcad_namespace.folder, groups=mcad_namespace.groups
    )
    name = f"twin-{mcad_namespace.name[-8:]}"
    try:
        for namespace in (mcad_namespace, other):
            namespace.make("appwrappers", mcad_appwrapper(name, job(f"{name}-job", HOLD), namespace.name))
            namespace.until("appwrappers", name, _is_running)
            if namespace is mcad_namespace:
                namespace.until_pods(f"{name}-job", lambda pods: len(pods) == 2)
        assert other.api.items(other.path("jobs")) == []
    finally:
        other.remove()


def test_mcad_tries_again_and_again_what_the_cluster_refuses(mcad_namespace: Namespace):
    name = f"bad-{mcad_namespace.name[-8:]}"
    bad = job(f"{name}-job")
    bad["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    mcad_namespace.make("appwrappers", mcad_appwrapper(name, bad, mcad_namespace.name))
    for state in ("Failed", "Pending", "Failed"):
        found = mcad_namespace.until("appwrappers", name, lambda found, state=state: _state(found) == state)  # type: ignore[misc]
        assert found is not None


def _state(found: Object | None) -> str:
    return str((found or {}).get("status", {}).get("state", ""))


def _is_running(found: Object | None) -> bool:
    return _state(found) == "Running"
