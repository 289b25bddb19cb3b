"""The scheduler against a scripted API server: requests, states, logs, refusals."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from datetime import UTC, datetime, timedelta
from unittest.mock import MagicMock, patch

import pytest
from kube_api import Reply, Request, ScriptedApi, failure
from kubernetes.client.exceptions import ApiException
from torchx import specs
from torchx.specs import AppState, ReplicaState

from atoll.kube import connection
from atoll.torchx import kubernetes_mcad_scheduler as module
from atoll.torchx.options import LEGACY, V1BETA1, V1BETA2, Options
from atoll.torchx.problems import InvalidApp
from atoll.torchx.wrapping import wrapper
from torchx_apps import app, pod, role

pytestmark = pytest.mark.server


class FakeCluster:
    """One namespace with AppWrappers, pods and Workloads, behind a scripted API."""

    def __init__(self, api: ScriptedApi, *dialects: str) -> None:
        self.api, self.dialects = api, dialects or (V1BETA2,)
        self.wrappers: dict[str, dict] = {}
        self.pods: list[dict] = []
        self.jobs: list[dict] = []
        self.workloads: list[dict] = []
        self.logs: dict[str, str] = {}
        self.refused: dict[str, Reply] = {}
        api.answer = self.answer

    def add(self, resource: dict, **status) -> None:
        name = resource["metadata"]["name"]
        resource["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": "2026-11-18T00:00:00Z"}
        self.wrappers[name] = {**resource, **({"status": status} if status else {})}

    def answer(self, request: Request) -> Reply:
        for part, reply in self.refused.items():
            if part in f"{request.method} {request.path}":
                return reply
        if request.path == "/apis":
            versions = [{"versions": [{"groupVersion": each}]} for each in self.dialects]
            return Reply(body={"groups": versions})
        kind, _, name = request.path.partition("/namespaces/")[2].partition("/")[2].partition("/")
        if kind == "appwrappers":
            return self._wrapper(request, name)
        if kind == "workloads":
            if request.method == "PATCH":
                return Reply(body={})
            return Reply(body={"items": self.workloads})
        if name.endswith("/log"):
            suffix = " previous" if request.query.get("previous", "").lower() == "true" else ""
            text = self.logs.get(name.partition("/")[0] + suffix)
            return failure(404, "NotFound") if text is None else Reply(pieces=[text.encode("utf-8", "surrogateescape")])
        wanted = dict(each.split("=") for each in request.query["labelSelector"].split(","))
        there = self.jobs if kind == "jobs" else self.pods
        found = [p for p in there if wanted.items() <= p["metadata"]["labels"].items()]
        return Reply(body={"items": found})

    def _wrapper(self, request: Request, name: str) -> Reply:
        if not any(f"/apis/{each}/" in request.path for each in self.dialects):
            return failure(404, "NotFound")
        if request.method == "POST":
            self.add(request.body)
            return Reply(201, request.body)
        if not name:
            return Reply(body={"items": list(self.wrappers.values())})
        if name not in self.wrappers:
            return failure(404, "NotFound")
        if request.method == "DELETE":
            del self.wrappers[name]
            return Reply(body={})
        if request.method == "PATCH":
            self.wrappers[name]["metadata"].setdefault("annotations", {}).update(
                request.body["metadata"]["annotations"]
            )
            self.wrappers[name]["spec"] |= request.body.get("spec") or {}
        return Reply(body=self.wrappers[name])

    @property
    def calls(self) -> list[str]:
        return [f"{each.method} {each.path}" for each in self.api.requests]


@pytest.fixture(scope="module")
def running_api():
    with ScriptedApi().running() as running:
        yield running


@pytest.fixture
def api(running_api):
    running_api.requests.clear()
    return running_api


@pytest.fixture
def connect(api, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    from kubernetes import config

    monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))

    def make(*dialects: str) -> tuple[FakeCluster, module.KubernetesMCADScheduler]:
        return FakeCluster(api, *dialects), module.create_scheduler("test")

    return make


def made(*roles, dialect=V1BETA2, **options):
    given = Options(**{"namespace": "ns", **options})
    return wrapper(app(*roles), "fit-x", given, dialect, "1.0")


def replicas(described):
    return {(each.role, r.id): r.state for each in described.roles_statuses for r in each.replicas}


def submitted(scheduler, *roles, **cfg):
    return scheduler.schedule(scheduler.submit_dryrun(app(*roles), {"namespace": "ns", **cfg}))


# ── submitting ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dialect", [V1BETA2, V1BETA1, LEGACY])
def test_the_dialect_of_the_cluster_is_used(connect, dialect):
    cluster, scheduler = connect(dialect)
    app_id = submitted(scheduler)
    assert app_id.startswith("ns:fit-")
    assert cluster.wrappers[app_id.partition(":")[2]]["apiVersion"] == dialect
    assert cluster.calls[-1] == f"POST /apis/{dialect}/namespaces/ns/appwrappers"


def test_the_layout_pods_is_sent_as_plain_json(connect):
    cluster, scheduler = connect(V1BETA1)
    app_id = submitted(scheduler, role(replicas=2), layout="pods")
    items = cluster.wrappers[app_id.partition(":")[2]]["spec"]["resources"]["GenericItems"]
    assert [each["generictemplate"]["kind"] for each in items] == ["Pod", "Pod", "Service"]
    assert json.loads(json.dumps(items)) == items


def test_without_a_cluster_the_layout_decides_the_dialect(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    scheduler = module.create_scheduler("test")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jobs = scheduler.submit_dryrun(app(), {})
        pods = scheduler.submit_dryrun(app(), {"layout": "pods"})
    assert jobs.request.resource["apiVersion"] == V1BETA2
    assert pods.request.resource["apiVersion"] == V1BETA1
    assert str(jobs).startswith("apiVersion: workload.codeflare.dev/v1beta2\n")


def test_a_request_without_a_kubeconfig_says_so(monkeypatch, tmp_path):
    from atoll.errors import ConfigError

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    scheduler = module.create_scheduler("test", dialect="v1beta2")
    with pytest.warns(UserWarning, match="kube config"), pytest.raises(ConfigError) as caught:
        scheduler.describe("ns:x")
    assert caught.value.reason == "kubeconfig"


def test_a_wrong_app_is_refused_before_any_request(connect):
    cluster, scheduler = connect(V1BETA2)
    with pytest.raises(InvalidApp) as caught:
        scheduler.submit_dryrun(app(role(image="")), {"dialect": "v1beta2", "priority": 3})
    assert set(caught.value.fields) == {"roles[trainer].image", "priority"}
    assert cluster.calls == []


def test_an_app_that_no_dialect_can_run_is_refused_before_any_request(connect):
    cluster, scheduler = connect(V1BETA2)
    roles = [role(f"r{i}", port_map={"not a port": 1}) for i in range(9)]
    with pytest.raises(InvalidApp) as caught:
        scheduler.submit_dryrun(app(*roles), {})
    assert {"roles", "roles[r0].port_map.not a port"} <= set(caught.value.fields)
    assert cluster.calls == []


@pytest.mark.parametrize("ports", [{}, {"not a port": 1}])
@pytest.mark.parametrize(
    ("layout", "changes"), [("jobs", {"env": {"LONG": "x" * 1_400_000}}), ("pods", {"replicas": 1500})]
)
def test_an_app_that_is_too_big_is_refused_before_any_request(connect, layout, changes, ports):
    cluster, scheduler = connect(V1BETA1)
    with pytest.raises(InvalidApp) as caught:
        scheduler.submit_dryrun(app(role(port_map=ports, **changes)), {"layout": layout})
    assert "bytes, and at most" in caught.value.problems[-1]
    assert any("port_map" in each for each in caught.value.problems) == bool(ports)
    assert cluster.calls == []


@pytest.mark.parametrize(("layout", "replicas"), [("jobs", 1), ("pods", 9)])
def test_the_check_before_a_build_is_that_of_the_dialect_of_the_cluster(connect, layout, replicas):
    given = {"layout": layout, "priority": 5}
    _, mcad = connect(V1BETA1)
    mcad._pre_build_validate(app(role(replicas=replicas)), "kubernetes_mcad", given)
    _, scheduler = connect(V1BETA2)
    with pytest.raises(InvalidApp) as caught:
        scheduler._pre_build_validate(app(role(replicas=replicas)), "kubernetes_mcad", given)
    assert "priority" in caught.value.fields


def test_the_dry_run_does_not_change_the_app(connect):
    import copy

    _, scheduler = connect(V1BETA2)
    original = app(role(image="sha256:abc"))
    before = copy.deepcopy(original)
    info = scheduler.submit_dryrun(original, {"image_repo": "example.com/repo"})
    assert original == before
    assert info.request.images_to_push == {"sha256:abc": ("example.com/repo", "abc")}
    assert "example.com/repo:abc" in str(info)


def test_one_scheduler_does_not_submit_to_the_cluster_of_another_context(connect):
    cluster, scheduler = connect(V1BETA2)
    submitted(scheduler)
    before = len(cluster.api.requests)
    with pytest.raises(ValueError, match="another-one"):
        submitted(scheduler, context="another-one")
    assert len(cluster.api.requests) == before


@pytest.mark.parametrize(
    "overlay",
    [
        "/no/such/file",
        5,
        {"spec": None},
        {"spec": 5},
        {"metadata": []},
        {"metadata": {"labels": 5}},
        {"spec": {"containers": 5}},
        {"spec": {"containers": ["x"]}},
    ],
    ids=str,
)
def test_a_wrong_overlay_is_a_problem_of_the_app(connect, overlay):
    cluster, scheduler = connect(V1BETA2)
    with pytest.raises(module.InvalidApp) as caught:
        submitted(scheduler, role(metadata={"kubernetes": overlay}))
    assert len(caught.value.problems) == 1
    assert not [call for call in cluster.calls if call.startswith("POST")]


def test_a_name_that_is_taken_is_a_value_error(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.refused["POST"] = failure(409, "AlreadyExists")
    with pytest.raises(ValueError, match="exists"):
        submitted(scheduler)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [('namespaces "nowhere" not found', "no namespace `nowhere`"), ("404 page not found", "install the controller")],
)
def test_a_missing_namespace_is_told_from_a_missing_controller(connect, words, wanted):
    cluster, scheduler = connect(V1BETA2)
    cluster.refused["POST"] = failure(404, "NotFound", message=words)
    with pytest.raises(ValueError, match=wanted):
        submitted(scheduler, namespace="nowhere")


@pytest.mark.parametrize("status", [401, 403])
def test_refused_requests_name_the_verb_and_the_resource(connect, status):
    cluster, scheduler = connect(V1BETA2)
    cluster.refused["appwrappers"] = failure(status, "Forbidden")
    for call, verb in (
        (lambda: submitted(scheduler), "create"),
        (lambda: scheduler.describe("ns:x"), "get"),
        (scheduler.list, "list"),
    ):
        with pytest.raises(ValueError, match=f"cannot {verb} appwrappers"):
            call()


def test_other_refusals_are_those_of_the_client(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.refused["appwrappers"] = failure(400, "BadRequest")
    with pytest.raises(ApiException):
        scheduler.describe("ns:x")


def test_restarts_of_mcad_are_announced_as_unlimited(connect):
    _, scheduler = connect(V1BETA1)
    with pytest.warns(UserWarning, match="limit of restarts"):
        scheduler.submit_dryrun(app(role(max_retries=1)), {"layout": "pods"})


def test_images_are_pushed_before_the_wrapper_is_created():
    docker = MagicMock()
    scheduler = module.KubernetesMCADScheduler("test", client=MagicMock(), docker_client=docker)
    job = module.KubernetesMCADJob({"sha256:a": ("repo.example/img", "a")}, {})
    assert scheduler.schedule(specs.AppDryRunInfo(job, repr))
    assert docker.images.get.call_count == 1
    assert docker.images.push.call_count == 1


# ── describe ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_app_that_is_gone_is_none(connect):
    cluster, scheduler = connect(V1BETA2)
    assert scheduler.describe("ns:fit-x") is None
    assert scheduler.exists("ns:fit-x") is False
    scheduler.cancel("ns:fit-x")
    scheduler.delete("ns:fit-x")
    assert [call for call in cluster.calls if not call.startswith("GET")] == []


def test_an_id_of_another_scheduler_is_refused(connect):
    _, scheduler = connect(V1BETA2)
    for text in ("fit-x", "a:b:c", ":x"):
        with pytest.raises(ValueError, match="NAMESPACE:NAME"):
            scheduler.describe(text)


def test_pods_say_the_state_of_each_replica_in_three_calls(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2), role("b")), phase="Running", resettingCount=1)
    cluster.pods = [
        pod("a", 1, is_job=True),
        pod("a", 0, "Succeeded", is_job=True, exit_code=0),
        pod("b", 0, "Pending", is_job=True),
    ]
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.RUNNING
    assert replicas(found) == {
        ("a", 0): ReplicaState.SUCCEEDED,
        ("a", 1): ReplicaState.RUNNING,
        ("b", 0): ReplicaState.PENDING,
    }
    assert found.roles_statuses[0].replicas[1].hostname == "fit-x-1.fit-x.ns.svc"
    assert found.num_restarts == 1
    assert [each.num_replicas for each in found.roles] == [2, 1]
    assert len(cluster.calls) == 3


@pytest.mark.parametrize("count", [1, 1000])
def test_the_number_of_calls_does_not_depend_on_the_replicas(connect, count):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", count)), phase="Running")
    cluster.pods = [pod("a", index, is_job=True) for index in range(count)]
    assert scheduler.describe("ns:fit-x").state is AppState.RUNNING
    assert len(cluster.calls) == 3


def test_a_queued_app_says_why_in_one_call_more(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(queue="team"), phase="Suspended")
    message = (
        "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 600m more needed"
    )
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    cluster.workloads = [
        {
            "metadata": {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": "uid-fit-x"}},
            "status": {"conditions": [condition]},
        }
    ]
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.PENDING
    assert "600m" in found.msg
    assert "team" in found.msg
    assert len(cluster.calls) == 4


def test_an_app_that_kueue_has_ended_is_failed(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(queue="team"), phase="Suspended")
    evicted = {"type": "Evicted", "status": "True", "reason": "DeactivatedDueToMaximumExecutionTimeExceeded"}
    labels = {"kueue.x-k8s.io/job-uid": "uid-fit-x"}
    cluster.workloads = [
        {
            "metadata": {"name": "w", "labels": labels},
            "spec": {"active": False},
            "status": {"conditions": [evicted]},
        }
    ]
    assert scheduler.describe("ns:fit-x").state is AppState.FAILED


def test_a_failed_replica_fails_the_app_when_no_restart_is_left(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2)), phase="Running")
    cluster.pods = [pod("a", 0, is_job=True), pod("a", 1, "Failed", is_job=True, exit_code=3)]
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.FAILED
    assert found.msg.startswith("a[1]: exit code 3")
    cluster.add(made(role("a", 2, max_retries=2)), phase="Running", resettingCount=1)
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.RUNNING
    assert "1 restarts left" in found.msg


def test_a_restarting_app_is_pending_with_its_count(connect):
    cluster, scheduler = connect(V1BETA2)
    unhealthy = {"type": "Unhealthy", "status": "True", "reason": "FoundFailedPods", "message": "Found 1 failed pods"}
    cluster.add(made(role(max_retries=3)), phase="Resetting", resettingCount=2, conditions=[unhealthy])
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.PENDING
    assert found.num_restarts == 2
    assert "Found 1 failed pods" in found.msg


def test_a_finished_app_of_mcad_ends(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(role("a", 2), dialect=V1BETA1, layout="pods"), state="Running")
    cluster.pods = [pod("a", index, "Succeeded", exit_code=0) for index in range(2)]
    assert scheduler.describe("ns:fit-x").state is AppState.SUCCEEDED
    cluster.pods[1] = pod("a", 1, "Failed", exit_code=1)
    assert scheduler.describe("ns:fit-x").state is AppState.FAILED


def test_mcad_says_completed_also_for_a_failed_job(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(role("a", 2), dialect=V1BETA1), state="Completed", failed=1)
    cluster.pods = [pod("a", 1, "Failed", is_job=True, exit_code=1)]
    assert scheduler.describe("ns:fit-x").state is AppState.FAILED
    cluster.add(made(role("a", 2), dialect=V1BETA1), state="Completed", Succeeded=2)
    cluster.pods = []
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.SUCCEEDED
    assert set(replicas(found).values()) == {ReplicaState.SUCCEEDED}


@pytest.mark.parametrize("word", ["Running", "Completed"])
@pytest.mark.parametrize("verb", ["describe", "list"])
def test_a_job_that_gave_up_in_place_restarts_fails_an_app_of_mcad(connect, word, verb):
    """Such a Job deletes its pods, and MCAD says Completed also then."""
    cluster, scheduler = connect(V1BETA1)
    resource = made(role("a", 2, max_retries=1, retry_policy=specs.RetryPolicy.REPLICA), role("b"), dialect=V1BETA1)
    cluster.add(resource, state=word)
    labels = {"app.kubernetes.io/managed-by": "torchx.pytorch.org"}
    cluster.pods = [pod("b", 0, "Succeeded", is_job=True, exit_code=0)]
    cluster.pods[0]["metadata"]["labels"] |= labels
    items = resource["spec"]["resources"]["GenericItems"]
    cluster.jobs = [copy.deepcopy(item["generictemplate"]) for item in items[:2]]
    reason = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
    cluster.jobs[0]["status"] = {"conditions": [{"type": "Failed", "status": "True", **reason}]}

    def state() -> AppState:
        return scheduler.describe("ns:fit-x").state if verb == "describe" else scheduler.list()[0].state

    assert state() is AppState.FAILED
    assert "BackoffLimitExceeded" in scheduler.describe("ns:fit-x").msg
    del cluster.jobs[0]["status"]
    assert state() is (AppState.RUNNING if word == "Running" else AppState.SUCCEEDED)
    cluster.api.requests.clear()
    cluster.pods += [pod("a", index, "Succeeded", is_job=True, exit_code=0) for index in range(2)]
    for each in cluster.pods:
        each["metadata"]["labels"] |= labels
    assert state() is AppState.SUCCEEDED
    assert not any("/jobs" in call for call in cluster.calls)


def test_mcad_running_without_pods_is_pending(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(role("a", 2), dialect=V1BETA1, layout="pods"), state="Running")
    assert scheduler.describe("ns:fit-x").state is AppState.PENDING


def test_a_waiting_app_of_mcad_says_why(connect):
    cluster, scheduler = connect(V1BETA1)
    conditions = [{"type": "Backoff", "reason": "AppWrapperNotRunnable.", "message": "Insufficient resources"}]
    cluster.add(made(dialect=V1BETA1), state="Pending", conditions=conditions)
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.PENDING
    assert "Insufficient resources" in found.msg


def test_restarts_in_place_count_as_restarts(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2, max_retries=3, retry_policy=specs.RetryPolicy.REPLICA)), phase="Running")
    cluster.pods = [pod("a", index, is_job=True) for index in range(2)]
    cluster.pods[1]["status"]["containerStatuses"][0]["restartCount"] = 2
    assert scheduler.describe("ns:fit-x").num_restarts == 2


@pytest.mark.parametrize("dialect", [V1BETA2, V1BETA1])
def test_an_app_that_no_controller_has_seen_says_so(connect, dialect):
    cluster, scheduler = connect(dialect)
    cluster.add(made(dialect=dialect))
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.PENDING
    assert "controller may be down" in found.msg


def test_a_new_app_is_not_called_suspended(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Suspended")
    assert scheduler.describe("ns:fit-x").msg == "the controller is about to create the objects"
    cluster.wrappers["fit-x"]["spec"]["suspend"] = True
    assert scheduler.describe("ns:fit-x").msg == "Suspended"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"state": "RunningHoldCompletion"}, AppState.RUNNING),
        ({"state": "Deleted"}, AppState.CANCELLED),
        ({"state": "Deleted", "conditions": [{"type": "PreemptCandidate"}]}, AppState.FAILED),
        ({"state": "Surprise"}, AppState.UNKNOWN),
        ({"phase": "Surprise"}, AppState.UNKNOWN),
        ({"other": 1}, AppState.PENDING),
        ({"phase": "Succeeded"}, AppState.SUCCEEDED),
    ],
)
def test_states_never_raise(status, state):
    assert module.get_appwrapper_status({"status": status}) is state
    assert module.get_appwrapper_status({}) is AppState.PENDING


def test_without_access_to_pods_the_wrapper_is_believed(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(role("a", 3), dialect=V1BETA1, layout="pods"), state="Running", running=1, Succeeded="1")
    cluster.refused["/pods"] = failure(403, "Forbidden")
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.RUNNING
    assert list(replicas(found).values()) == [ReplicaState.RUNNING, ReplicaState.SUCCEEDED, ReplicaState.PENDING]


def test_replicas_of_an_ended_app_without_pods(connect):
    cluster, scheduler = connect(V1BETA2)
    for phase, state in (("Failed", ReplicaState.UNKNOWN), ("Succeeded", ReplicaState.SUCCEEDED)):
        cluster.add(made(role("a", 2)), phase=phase)
        assert set(replicas(scheduler.describe("ns:fit-x")).values()) == {state}


def test_a_cluster_without_appwrappers_says_so(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.dialects = ("batch/v1",)
    with pytest.raises(ValueError, match="no AppWrappers of workload"):
        submitted(scheduler)
    assert scheduler.describe("ns:x") is None


def test_the_reason_of_a_webhook_is_kept(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.refused["POST"] = failure(403, "Forbidden", message="x" * 9000 + " User bob may not create jobs")
    with pytest.raises(ValueError, match="User bob may not create jobs") as caught:
        submitted(scheduler)
    assert len(str(caught.value)) < 1000


def test_pending_pods_say_why(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a")), phase="Running")
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]
    cluster.pods = [pod("a", 0, "Pending", is_job=True, conditions=conditions)]
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.PENDING
    assert "0/3 nodes" in found.msg


def test_a_running_app_says_why_a_replica_does_not_run(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2)), phase="Running")
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]
    cluster.pods = [pod("a", 0, is_job=True), pod("a", 1, "Pending", is_job=True, conditions=conditions)]
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.RUNNING
    assert found.msg.startswith("a[1]: ")
    assert "0/3 nodes" in found.msg


# ── list ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_has_apps_of_torchx_in_any_state(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Running")
    cluster.add({"metadata": {"name": "foreign"}, "spec": {"components": []}}, phase="Strange")
    old = made(dialect=V1BETA1, layout="pods")
    old["metadata"]["name"] = "old"
    cluster.add(old, state="Completed")
    found = {each.app_id: each.state for each in scheduler.list()}
    assert found == {"team:fit-x": AppState.RUNNING, "team:old": AppState.SUCCEEDED}
    everything = {each.app_id: each.state for each in scheduler.list({"all_apps": True, "namespace": "ns"})}
    assert everything["ns:foreign"] is AppState.UNKNOWN


@pytest.mark.parametrize(("dialect", "status"), [(V1BETA2, {"phase": "Running"}), (V1BETA1, {"state": "Running"})])
def test_the_app_of_somebody_else_is_described_as_its_controller_says(connect, dialect, status):
    cluster, scheduler = connect(dialect)
    cluster.add({"metadata": {"name": "other"}, "spec": {}}, **status)
    assert scheduler.list({"all_apps": True})[0].state is AppState.RUNNING
    found = scheduler.describe("ns:other")
    assert (found.state, found.roles) == (AppState.RUNNING, [])


def test_the_list_of_the_namespace_default_is_not_that_of_the_context(connect):
    cluster, scheduler = connect(V1BETA2)
    scheduler.list({"namespace": "default"})
    assert cluster.calls[-1] == f"GET /apis/{V1BETA2}/namespaces/default/appwrappers"


def test_the_list_has_the_apps_of_every_dialect_of_the_cluster(connect):
    cluster, scheduler = connect(V1BETA2, LEGACY)
    scheduler.list({"namespace": "ns"})
    listed = [call for call in cluster.calls if "appwrappers" in call]
    assert listed == [f"GET /apis/{each}/namespaces/ns/appwrappers" for each in (V1BETA2, LEGACY)]


def test_the_list_of_a_cluster_that_does_not_say_what_it_serves(connect):
    cluster, scheduler = connect(V1BETA2)
    answer = cluster.answer
    cluster.api.answer = lambda request: failure(403, "Forbidden") if request.path == "/apis" else answer(request)
    cluster.add(made(), phase="Running")
    assert [each.app_id for each in scheduler.list()] == ["team:fit-x"]


def test_the_list_of_a_cluster_without_appwrappers_says_so(connect):
    cluster, scheduler = connect()
    cluster.dialects = ()
    with pytest.raises(ValueError, match="no AppWrappers") as caught:
        scheduler.list()
    assert isinstance(caught.value, ApiException)  # as in the original
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("phases", "state"),
    [
        (["Succeeded", "Succeeded"], AppState.SUCCEEDED),
        (["Succeeded", "Failed"], AppState.FAILED),
        (["Succeeded", "Running"], AppState.RUNNING),
        ([], AppState.PENDING),
    ],
)
def test_the_list_knows_the_end_of_an_app_that_mcad_calls_running(connect, phases, state):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(role("a", 2), dialect=V1BETA1, layout="pods"), state="Running")
    cluster.pods = [pod("a", index, phase) for index, phase in enumerate(phases)]
    cluster.pods.append(pod("a", 0, "Running", app_id="other"))
    for each in cluster.pods:
        each["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "torchx.pytorch.org"
    assert [each.state for each in scheduler.list()] == [state]
    assert len([call for call in cluster.calls if call.endswith("/pods")]) == 1
    cluster.refused["/pods"] = failure(403, "Forbidden")
    assert [each.state for each in scheduler.list()] == [AppState.RUNNING]


def test_a_context_without_a_namespace_is_default(connect):
    cluster, scheduler = connect(V1BETA2)
    with patch.object(module.KubernetesMCADScheduler, "_get_active_context", return_value={"context": {}}):
        scheduler.list()
    assert cluster.calls[-1] == f"GET /apis/{V1BETA2}/namespaces/default/appwrappers"


@pytest.mark.parametrize("is_in_pod", [True, False])
def test_without_a_kubeconfig_the_list_is_that_of_the_namespace_of_the_pod(monkeypatch, tmp_path, is_in_pod):
    from kubernetes import config

    for name in ("token", "namespace"):
        (tmp_path / name).write_text("of-the-pod")
    monkeypatch.setattr(connection, "POD_FOLDER", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1" if is_in_pod else "")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    scheduler = module.create_scheduler("test", dialect="v1beta2")
    with patch.object(scheduler, "_listed", return_value=[]) as listed:
        scheduler.list()
    assert listed.call_args.args == ("of-the-pod" if is_in_pod else "default",)


# ── cancel and delete ───────────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_keeps_a_suspended_wrapper(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Running")
    scheduler.cancel("ns:fit-x")
    assert cluster.wrappers["fit-x"]["spec"]["suspend"] is True
    cluster.wrappers["fit-x"]["status"] = {"phase": "Suspended"}
    found = scheduler.describe("ns:fit-x")
    assert found.state is AppState.CANCELLED
    scheduler.cancel("ns:fit-x")
    scheduler.delete("ns:fit-x")
    assert cluster.wrappers == {}


def test_cancel_of_a_queued_app_holds_its_workload(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(queue="team"), phase="Running")
    cluster.workloads = [{"metadata": {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": "uid-fit-x"}}}]
    scheduler.cancel("ns:fit-x")
    patched = [request for request in cluster.api.requests if request.method == "PATCH"]
    assert [each.path.rpartition("/")[2] for each in patched] == ["w", "fit-x"]
    assert patched[0].body == {"spec": {"active": False}}
    assert "suspend" not in (patched[1].body.get("spec") or {})


def test_an_older_kueue_is_asked_in_its_own_version(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(queue="team"), phase="Suspended")
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Inadmissible", "message": "LocalQueue team …"}
    labels = {"kueue.x-k8s.io/job-uid": "uid-fit-x"}
    cluster.workloads = [{"metadata": {"name": "w", "labels": labels}, "status": {"conditions": [condition]}}]
    cluster.refused["/apis/kueue.x-k8s.io/v1beta2"] = failure(404, "NotFound")
    assert "LocalQueue team" in scheduler.describe("ns:fit-x").msg
    scheduler.cancel("ns:fit-x")
    workloads = [call for call in cluster.calls if "kueue" in call]
    older = "/apis/kueue.x-k8s.io/v1beta1/namespaces/ns/workloads"
    assert workloads[1:] == [f"GET {older}"] * (len(workloads) - 2) + [f"PATCH {older}/w"]
    assert "fit-x" in cluster.wrappers


def test_cancel_deletes_where_nothing_can_be_kept(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.add(made(dialect=V1BETA1), state="Running")
    scheduler.cancel("ns:fit-x")
    assert cluster.wrappers == {}
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Running")
    cluster.refused["PATCH"] = failure(403, "Forbidden")
    scheduler.cancel("ns:fit-x")
    assert cluster.wrappers == {}


def test_cancel_leaves_a_finished_app_alone(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Succeeded")
    scheduler.cancel("ns:fit-x")
    assert [call for call in cluster.calls if call.startswith(("PATCH", "DELETE"))] == []


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_logs_are_those_of_the_replica_of_the_role(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.pods = [pod("a", 0, is_job=True), pod("b", 0, is_job=True)]
    cluster.pods[1]["metadata"]["name"] = "of-b"
    cluster.logs["of-b"] = "2026-11-18T12:00:00Z one reg\n2026-11-18T12:00:01Z two\n2026-11-18T12:00:02Z three reg"
    since = datetime.now(UTC) - timedelta(seconds=100)
    lines = list(scheduler.log_iter("ns:fit-x", "b", 0, regex="reg", since=since))
    assert lines == ["2026-11-18T12:00:00Z one reg\n", "2026-11-18T12:00:02Z three reg\n"]
    query = cluster.api.requests[-1].query
    assert query["timestamps"].lower() == "true"
    assert 100 <= int(query["sinceSeconds"]) < 200


def test_a_replica_without_a_pod_has_not_the_log_of_another_role(connect):
    cluster, scheduler = connect(V1BETA1)
    cluster.pods = [pod("a", 0)]
    cluster.logs["fit-x-0"] = "of a\n"
    assert list(scheduler.log_iter("ns:fit-x", "b")) == []
    assert list(scheduler.log_iter("ns:fit-x", "a")) == ["of a\n"]


def test_times_of_logs_can_be_switched_off(connect):
    cluster, _ = connect(V1BETA2)
    scheduler = module.create_scheduler("test", log_timestamps="0")
    cluster.pods = [pod("a", 0, is_job=True)]
    cluster.logs["fit-x-0-abcde"] = "2026-11-18T12:00:00.5Z one\n2026-11-18T12:00:02Z two\n"
    assert list(scheduler.log_iter("ns:fit-x", "a")) == ["one\n", "two\n"]
    until = datetime(2026, 11, 18, 12, 0, 1, tzinfo=UTC)
    assert list(scheduler.log_iter("ns:fit-x", "a", until=until)) == ["one\n"]


def test_the_newest_pod_of_a_restarted_replica_has_the_log(connect):
    cluster, scheduler = connect(V1BETA2)
    old, new = pod("a", 0, "Failed", is_job=True), pod("a", 0, is_job=True, created="2026-11-18T01:00:00Z")
    new["metadata"]["name"] = "newest"
    cluster.pods = [new, old]
    cluster.logs["newest"] = "now\n"
    assert list(scheduler.log_iter("ns:fit-x", "a")) == ["now\n"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_log_that_the_user_may_not_read_names_the_verb_and_the_resource(connect, status):
    cluster, scheduler = connect(V1BETA2)
    cluster.pods = [pod("trainer", 0)]
    cluster.refused["/log"] = failure(status, "Forbidden")
    with pytest.raises(ValueError, match="cannot get pods/log"):
        list(scheduler.log_iter("ns:fit-x", "trainer"))


def test_a_log_is_not_followed_beyond_a_time_that_has_passed(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(), phase="Running")
    cluster.pods = [pod("trainer", 0)]
    cluster.logs["fit-x-0"] = "2026-11-18T00:00:00Z one\n"
    until = datetime(2026, 11, 18, 0, 0, 1, tzinfo=UTC)
    lines = list(scheduler.log_iter("ns:fit-x", "trainer", until=until, should_tail=True))
    assert lines == ["2026-11-18T00:00:00Z one\n"]
    assert "follow" not in cluster.api.requests[-1].query


def test_a_container_that_has_not_started_has_no_lines(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.pods = [pod("a", 0, "Pending", is_job=True)]
    cluster.refused["/log"] = failure(400, "BadRequest", message='container "replica" is waiting to start')
    assert list(scheduler.log_iter("ns:fit-x", "a")) == []


def test_followed_logs_go_on_after_a_cut_and_end_with_the_app(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a")), phase="Running")
    cluster.pods = [pod("a", 0, is_job=True)]
    answers = [
        Reply(pieces=[b"2026-11-18T12:00:00Z one\n2026-11-18T12:00:01Z tw"], is_cut=True),
        Reply(pieces=[b"2026-11-18T12:00:00Z one\n2026-11-18T12:00:01Z two\n"]),
    ]
    plain_answer = cluster.answer

    def answer(request: Request) -> Reply:
        if not request.path.endswith("/log"):
            return plain_answer(request)
        reply = answers.pop(0) if len(answers) > 1 else answers[0]
        if not reply.is_cut:
            cluster.wrappers["fit-x"]["status"] = {"phase": "Succeeded"}
            cluster.pods = [pod("a", 0, "Succeeded", is_job=True, exit_code=0)]
        return reply

    cluster.api.answer = answer
    lines = list(scheduler.log_iter("ns:fit-x", "a", should_tail=True))
    assert lines == ["2026-11-18T12:00:00Z one\n", "2026-11-18T12:00:01Z two\n"]


def test_a_followed_log_that_is_gone_has_no_lines(connect, caplog):
    """A Job that fails deletes the pods of the other replicas, and `torchx log -t` shows all replicas."""
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2)), phase="Failed")
    cluster.pods = [pod("a", 1, "Failed", is_job=True, exit_code=3)]
    cluster.logs["fit-x-1-abcde"] = "one\n"
    assert list(scheduler.log_iter("ns:fit-x", "a", 0, should_tail=True)) == []
    assert "no log of replica 0 of role `a`" in caplog.text
    assert list(scheduler.log_iter("ns:fit-x", "a", 1, should_tail=True)) == ["one\n"]


def test_a_log_cannot_be_followed_without_access_to_pods(connect):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a", 2)), phase="Running")
    cluster.refused["/pods"] = failure(403, "Forbidden")
    with pytest.raises(ValueError, match="cannot follow the log of replica 0"):
        list(scheduler.log_iter("ns:fit-x", "a", 0, should_tail=True))


def test_the_attempt_before_a_restart_has_a_log_of_its_own(connect):
    cluster, _ = connect(V1BETA2)
    scheduler = module.create_scheduler("test", log_previous="1")
    cluster.add(made(role("a", 3)), phase="Running")
    cluster.pods = [pod("a", index, is_job=True) for index in range(3)]
    cluster.pods[0]["status"]["containerStatuses"][0]["restartCount"] = 1
    cluster.pods += [pod("a", 1, is_job=True, created="2026-11-18T01:00:00Z")]
    cluster.pods[-1]["metadata"]["name"] = "fit-x-1-newer"
    cluster.logs = {"fit-x-0-abcde previous": "zero\n", "fit-x-1-abcde": "one\n"}
    logs = [list(scheduler.log_iter("ns:fit-x", "a", index, should_tail=True)) for index in range(3)]
    assert logs == [["zero\n"], ["one\n"], []]


@pytest.mark.parametrize("should_tail", [False, True])
def test_a_log_that_is_not_utf_8_is_shown(connect, should_tail):
    cluster, scheduler = connect(V1BETA2)
    cluster.add(made(role("a")), phase="Succeeded")
    cluster.pods = [pod("a", 0, "Succeeded", is_job=True, exit_code=0)]
    cluster.logs["fit-x-0-abcde"] = "caf\udce9\nok\n"
    assert list(scheduler.log_iter("ns:fit-x", "a", 0, should_tail=should_tail)) == ["caf\\xe9\n", "ok\n"]


def test_only_the_combined_stream_exists(connect):
    _, scheduler = connect(V1BETA2)
    with pytest.raises(ValueError, match="COMBINED"):
        scheduler.log_iter("ns:x", "a", streams=module.Stream.STDERR)


# ── the scheduler itself ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_factory_keeps_the_clients_and_ignores_other_arguments():
    client, docker = MagicMock(), MagicMock()
    scheduler = module.create_scheduler("s", client=client, docker_client=docker, other="x")
    assert scheduler._client is client
    assert scheduler._docker_client is docker
    assert scheduler.backend == "kubernetes_mcad"
    scheduler.close()


def test_a_session_with_a_slash_is_refused():
    with pytest.raises(ValueError, match="session"):
        module.create_scheduler("a/b")


def test_options_have_those_of_the_original():
    opts = module.create_scheduler("s").run_opts()
    found = dict(iter(opts))
    original = {
        "namespace", "image_repo", "service_account", "priority", "priority_class_name", "image_secret",
        "coscheduler_name", "network",
    }  # fmt: skip
    assert original <= found.keys()
    assert set(found) == {*Options.__dataclass_fields__, "quiet"}
    assert set(found) == set(module.KubernetesMCADOpts.__annotations__)
    assert found["namespace"].default == "default"
    assert found["priority"].opt_type is int
    assert "[namespace=NAMESPACE]" in repr(opts)


def test_options_work_without_the_client(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "kubernetes"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    scheduler = module.create_scheduler("s")
    assert scheduler.run_opts() is not None
    with pytest.raises(ModuleNotFoundError):
        scheduler.describe("a:b")
    with pytest.raises(ModuleNotFoundError):
        scheduler.submit_dryrun(app(), {"layout": "pods"})


def test_counters_are_passed_on_as_they_are():
    given = {"state": "Running", "running": "1", "pending": "2", "failed": "3", "Succeeded": "4"}
    assert module.get_tasks_status_description(given) == {
        "running": "1",
        "pending": "2",
        "failed": "3",
        "Succeeded": "4",
    }


def test_roles_are_read_back_from_the_wrapper():
    job = made(role("a", 3))["spec"]["components"][0]["template"]
    found = module.get_role_information([{"generictemplate": job}, {"generictemplate": {"kind": "Service"}}, {}])
    assert list(found) == ["a"]
    assert found["a"].num_replicas == 3
    assert found["a"].image == "example.com/train:1"
    assert found["a"].args[0] == "python"
    assert found["a"].resource.cpu == "1900m"
    assert found["a"].resource.gpu == "1"
