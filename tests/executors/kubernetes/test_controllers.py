"""The real controllers beside the control plane of the tests: AppWrapper, Kueue and MCAD do their work."""

from __future__ import annotations

import pytest

from services.kubernetes.api import ApiError
from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.controllers.requests import appwrapper, in_phase, is_true, job, mcad_appwrapper
from services.kubernetes.namespace import Namespace


def test_kueue_admits_a_job_and_says_how_it_ended(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue(cpu="1")
    uid = queue_namespace.make("jobs", job("one", queue=queue.name))["metadata"]["uid"]
    queue_namespace.until_workload(uid, "Admitted")
    queue_namespace.until("jobs", "one", is_true("Complete"))
    done = queue_namespace.until_workload(uid, "Finished")
    assert done["status"]["admission"]["clusterQueue"] == queue.cluster_name


def test_a_second_job_waits_in_line_and_kueue_says_where(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue(cpu="300m")
    first = queue_namespace.make("jobs", job("first", "while :; do sleep 0.1; done", queue=queue.name))
    queue_namespace.until_workload(first["metadata"]["uid"], "Admitted")
    second = queue_namespace.make("jobs", job("second", queue=queue.name))
    found = queue_namespace.until_workload(second["metadata"]["uid"], "QuotaReserved", "False")
    waiting = queue.pending()
    assert [each["metadata"]["name"] for each in waiting] == [found["metadata"]["name"]]
    assert waiting[0]["positionInLocalQueue"] == 0
    queue_namespace.api.delete(queue_namespace.path("jobs", "first"), propagationPolicy="Background")
    queue_namespace.until("jobs", "second", is_true("Complete"))


def test_an_appwrapper_runs_its_job_to_the_end(queue_namespace: QueueNamespace):
    queue_namespace.make("appwrappers", appwrapper("one", job("inner")))
    queue_namespace.until("appwrappers", "one", in_phase("Succeeded", "Failed"))
    found = queue_namespace.get("appwrappers", "one")
    assert found["status"]["phase"] == "Succeeded"
    assert found["metadata"]["labels"]["workload.codeflare.dev/user"]


def test_an_appwrapper_waits_for_the_quota_of_kueue(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue(cpu="100m")
    made = queue_namespace.make("appwrappers", appwrapper("one", job("inner"), queue=queue.name))
    uid = made["metadata"]["uid"]
    waiting = queue_namespace.until_workload(uid, "QuotaReserved", "False")
    assert waiting["spec"]["queueName"] == queue.name
    assert queue_namespace.get("appwrappers", "one")["status"]["phase"] == "Suspended"
    queue.set_quota(cpu="1")
    queue_namespace.until("appwrappers", "one", in_phase("Succeeded"))
    queue_namespace.until_workload(uid, "Finished")


def test_a_held_queue_admits_nothing_until_it_is_released(queue_namespace: QueueNamespace):
    queue = queue_namespace.queue()
    queue.hold()
    uid = queue_namespace.make("jobs", job("one", queue=queue.name))["metadata"]["uid"]
    waiting = queue_namespace.until_workload(uid, "QuotaReserved", "False")
    assert [one["reason"] for one in waiting["status"]["conditions"]] == ["Inadmissible"]
    queue.release()
    queue_namespace.until("jobs", "one", is_true("Complete"))


def test_the_webhook_of_appwrapper_refuses_what_has_no_pods(queue_namespace: QueueNamespace):
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"clusterIP": "None"}}
    with pytest.raises(ApiError) as caught:
        queue_namespace.make("appwrappers", appwrapper("one", service))
    assert caught.value.status == 403


@pytest.mark.alone
@pytest.mark.parametrize("name", ["appwrapper", "kueue"])
def test_a_controller_that_is_down_makes_the_api_server_refuse_its_kinds(queue_namespace: QueueNamespace, name: str):
    queue_namespace.controllers("stop", name=name)
    kind, body = ("appwrappers", appwrapper("one", job("inner"))) if name == "appwrapper" else ("jobs", job("one"))
    with pytest.raises(ApiError, match="failed calling webhook") as caught:
        queue_namespace.make(kind, body)
    assert caught.value.status == 500
    queue_namespace.controllers("start", name=name)
    assert queue_namespace.make(kind, body)["metadata"]["uid"]


@pytest.mark.alone
def test_kueue_takes_other_settings_for_one_test(queue_namespace: QueueNamespace):
    strategy = {"backoffLimitCount": 0, "backoffBaseSeconds": 0}
    settings = {"waitForPodsReady": {"timeout": "1s", "requeuingStrategy": strategy}}
    queue_namespace.controllers("restart", name="kueue", settings=settings)
    queue = queue_namespace.queue()
    body = job("nowhere", queue=queue.name)
    body["spec"]["template"]["spec"]["nodeSelector"] = {"there-is": "none"}
    uid = queue_namespace.make("jobs", body)["metadata"]["uid"]
    found = queue_namespace.until_workload(uid, "Evicted")
    reasons = {one["type"]: one["reason"] for one in found["status"]["conditions"]}
    assert reasons["Evicted"] in ("PodsReadyTimeout", "DeactivatedDueToRequeuingLimitExceeded")


@pytest.mark.parametrize(("script", "condition"), [("true", "Complete"), ("exit 3", "Failed")])
def test_mcad_calls_every_end_of_a_job_completed(mcad_namespace: Namespace, script: str, condition: str):
    name = f"{mcad_namespace.name}-one"[-50:].strip("-")  # MCAD needs names that are unique in the whole cluster
    mcad_namespace.make("appwrappers", mcad_appwrapper(name, job("inner", script), mcad_namespace.name))
    mcad_namespace.until("appwrappers", name, lambda found: (found or {}).get("status", {}).get("state") == "Completed")
    assert is_true(condition)(mcad_namespace.get("jobs", "inner"))
