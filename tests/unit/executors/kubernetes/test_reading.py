"""How many requests a status takes, what the watch of a run does with a Job that changes, and whose Job is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from kube_api import Reply, Request, ScriptedApi, failure

from atoll.context import RunContext
from atoll.errors import AuthError, BackendUnavailable, RunNotFound, StopFailed, SubmitError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.kube.names import CONTAINER, FAILURES, INDEX, RUN_ID, STORE, TOKEN
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing.fakes import FakeClock

pytestmark = pytest.mark.server
NAME = "a-name-of-a-job-that-is-so-long-that-the-names-of-its-pods-have-it-cut"[:60]
LOG = "Traceback\nValueError: no\n"


class Cluster:
    """One Job and its pods, as plain objects."""

    def __init__(self, api: ScriptedApi, replicas: int) -> None:
        self.api, self.watch = api, Event()
        self.version = 1
        self.replicas = replicas
        self.pods = [self.pod(rank) for rank in range(replicas)]
        self.conditions: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.is_there = self.is_ours = True
        self.broken: dict[str, Reply] = {}
        """The end of a path, or a method -> the answer of the next such request."""
        api.answer = self.answer

    @property
    def job(self) -> dict[str, Any]:
        metadata = {"name": NAME, "namespace": "ns", "uid": "j", "resourceVersion": str(self.version)}
        marks = {RUN_ID: "run", STORE: "s3://bucket", TOKEN: "token"} if self.is_ours else {}
        return {
            "metadata": {**metadata, "annotations": marks},
            "spec": {"completions": self.replicas, "backoffLimitPerIndex": 0},
            "status": {"conditions": self.conditions} if self.conditions else {},
        }

    def pod(self, rank: int, phase: str = "Running", state: dict[str, Any] | None = None) -> dict[str, Any]:
        marks = {INDEX: str(rank), FAILURES: "0"}
        metadata = {"name": f"p{rank}", "namespace": "ns", "uid": f"u{rank}", "annotations": marks}
        status = {"phase": phase, "containerStatuses": [{"name": CONTAINER, "state": state or {"running": {}}}]}
        return {"metadata": metadata, "spec": {}, "status": status}

    def fail_all(self) -> None:
        ended = {"terminated": {"exitCode": 1}}
        self.pods = [self.pod(rank, "Failed", ended) for rank in range(len(self.pods))]

    def answer(self, request: Request) -> Reply:
        if request.query.get("watch"):
            return Reply(pieces=[], held=self.watch)
        for key in (request.path.split("/")[-1], request.method):
            if key in self.broken:
                return self.broken.pop(key)
        if not self.is_there:
            return failure(404, "NotFound")
        if request.path.endswith("/log"):
            return Reply(pieces=[LOG.encode()])
        if request.path.endswith("/pods"):
            return Reply(body={"metadata": {"resourceVersion": "5"}, "items": self.pods})
        return Reply(body={"items": self.events} if request.path.endswith("/events") else self.job)

    def asked(self) -> list[str]:
        """The ends of the paths of the requests since the last time, without watches."""
        found = [each.path.split("/")[-1] for each in self.api.requests if not each.query.get("watch")]
        self.api.requests.clear()
        return found


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi().running() as api:
        yield api


@pytest.fixture
def executor(api: ScriptedApi, tmp_path: Path) -> KubernetesExecutor:
    return KubernetesExecutor(kubeconfig=str(api.kubeconfig(tmp_path)), namespace="ns")


def handle(replicas: int) -> RunHandle:
    return RunHandle("kubernetes", "ns", NAME, replicas)


@pytest.mark.parametrize("replicas", [2, 1200])
def test_a_status_is_two_requests_for_any_number_of_replicas(api, executor, replicas):
    cluster = Cluster(api, replicas)
    assert executor.status(handle(replicas)).counts() == {ReplicaState.RUNNING: replicas}
    assert cluster.asked() == [NAME, "pods"]


def test_the_log_of_a_rank_needs_only_the_pods_of_this_rank(api, executor):
    cluster = Cluster(api, 1200)
    assert list(executor.logs(handle(1200), 700, tail=1)) == LOG.splitlines()
    asked = api.requests[1].query["labelSelector"]
    assert cluster.asked() == [NAME, "pods", "log"]
    assert asked.split(",") == ["batch.kubernetes.io/controller-uid=j", f"{INDEX}=700"]


def test_the_log_of_a_rank_whose_first_pod_is_not_there_yet_is_empty(api, executor):
    cluster = Cluster(api, 2)
    cluster.pods.clear()
    assert list(executor.logs(handle(2), 0)) == []
    cluster.conditions = [{"type": "Failed", "status": "True"}]
    with pytest.raises(RunNotFound, match="which has no pod"):
        executor.logs(handle(2), 0)


def test_few_logs_are_read_and_each_only_once(api, executor):
    cluster = Cluster(api, 50)
    cluster.fail_all()
    status = executor.status(handle(50))
    assert {replica.state for replica in status.replicas} == {ReplicaState.FAILED}
    assert cluster.asked() == [NAME, "pods", "log", "log", "log", "log"]
    assert executor.status(handle(50)) == status
    assert cluster.asked() == [NAME, "pods"]


def test_warnings_are_read_once_in_a_while_and_found_although_names_are_cut(api, executor):
    cluster = Cluster(api, 1)
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    cluster.pods = [cluster.pod(0, "Pending", waiting)]
    cluster.pods[0]["metadata"]["name"] = f"{NAME[:50]}-0-abcde"
    cluster.pods[0]["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    about = {"name": cluster.pods[0]["metadata"]["name"], "uid": "u0"}
    cluster.events = [{"reason": "FailedMount", "message": "no volume", "involvedObject": about}]
    (replica,) = executor.status(handle(1)).replicas
    assert (replica.state, replica.reason) == (ReplicaState.PENDING, Reason.CONFIG)
    assert cluster.asked() == [NAME, "pods", "events"]
    executor.status(handle(1))
    assert cluster.asked() == [NAME, "pods"]


def test_a_watched_status_lists_pods_only_if_something_may_have_changed(api, executor):
    cluster = Cluster(api, 3)
    with executor.watch(handle(3)) as watch:
        assert watch.status().counts() == {ReplicaState.RUNNING: 3}
        assert cluster.asked() == [NAME, "pods"]
        for _ in range(3000):
            if watch._changes.is_quiet:
                break
            Event().wait(0.01)
        watch.status()
        assert cluster.asked() == [NAME]
        cluster.fail_all()  # and the watch is dead: it reports nothing
        cluster.version += 1
        assert watch.status().counts() == {ReplicaState.FAILED: 3}
        assert cluster.asked()[:2] == [NAME, "pods"]
        cluster.is_there = False
        assert watch.status().counts() == {ReplicaState.LOST: 3}
    watch.wait(0.0)


def test_a_status_that_is_read_after_the_end_of_the_watch_starts_no_thread(api, executor):
    Cluster(api, 1)
    with executor.watch(handle(1)) as watch:
        pass
    assert watch.status().counts() == {ReplicaState.RUNNING: 1}
    assert watch._changes._thread is None


def test_a_list_that_fails_does_not_hide_the_change_before_it(api, executor):
    cluster = Cluster(api, 2)
    impatient = KubernetesExecutor(kubeconfig=executor.settings.kubeconfig, namespace="ns", patience_s=0.001)
    with impatient.watch(handle(2)) as watch:
        watch.status()
        changes = watch._changes
        for _ in range(3000):
            if changes.is_quiet:
                break
            Event().wait(0.01)
        cluster.fail_all()
        changes._has_changed = True  # the watch reports it
        cluster.broken["pods"] = failure(403, "Forbidden")
        with pytest.raises(AuthError):
            watch.status()
        assert watch.status().counts() == {ReplicaState.FAILED: 2}
        assert watch._changes is changes


def test_a_job_of_somebody_else_under_the_same_name_is_neither_read_nor_deleted(api, executor):
    cluster = Cluster(api, 2)
    cluster.is_ours = False
    cluster.pods = []
    assert executor.status(handle(2)).counts() == {ReplicaState.LOST: 2}
    with executor.watch(handle(2)) as watch:
        assert watch.status().counts() == {ReplicaState.LOST: 2}
    executor.cancel(handle(2))
    assert executor.uid(handle(2)) is None
    assert {request.method for request in api.requests} == {"GET"}


@pytest.mark.parametrize("place", [NAME, "pods", "DELETE"])
def test_a_cancel_that_fails_at_any_request_names_the_job(api, executor, place):
    cluster = Cluster(api, 2)
    cluster.broken[place] = failure(403, "Forbidden")
    with pytest.raises(StopFailed) as caught:
        executor.cancel(handle(2))
    assert caught.value.left_running == (NAME,)
    assert isinstance(caught.value.__cause__, AuthError)


def test_a_cancel_waits_for_pods_that_are_to_be_deleted_with_their_job(api, executor):
    cluster = Cluster(api, 2)
    owned = [{**pod, "metadata": {**pod["metadata"], "ownerReferences": [{"uid": "j"}]}} for pod in cluster.pods]
    lists = [owned, owned, []]

    def answer(request: Request) -> Reply:
        if request.path.endswith("/pods"):
            return Reply(body={"items": lists.pop(0)})
        return failure(404, "NotFound")

    api.answer = answer
    executor.cancel(handle(2))
    assert lists == []


def test_a_launcher_that_cannot_look_at_the_job_of_another_one_leaves_it(api, executor):
    impatient = KubernetesExecutor(
        kubeconfig=executor.settings.kubeconfig, namespace="ns", image="image", patience_s=0.001
    )
    plan = impatient.plan(RunContext("run", "s3://bucket"), Placement(replicas=1))
    name = plan.request["job"]["metadata"]["name"]
    Cluster(api, 1).broken.update(POST=failure(409, "AlreadyExists"), **{name: failure(500)})
    with pytest.raises(SubmitError) as caught:
        impatient.submit(plan)
    assert (caught.value.left_running, caught.value.created) == ((name,), ())
    assert isinstance(caught.value.__cause__, BackendUnavailable)
    assert [request.method for request in api.requests] == ["POST", "GET"]


def test_a_create_waits_for_as_long_as_the_api_server_asks(api, tmp_path):
    clock = FakeClock()
    patient = KubernetesExecutor(
        kubeconfig=str(api.kubeconfig(tmp_path)), namespace="ns", image="image", patience_s=60.0, clock=clock
    )
    plan = patient.plan(RunContext("run", "s3://bucket"), Placement(replicas=1))
    api.replies = [failure(429, "TooManyRequests", Retry_After="30"), Reply(201, plan.request["job"])]
    began = clock.monotonic()
    patient.submit(plan)
    assert 30 <= clock.monotonic() - began < 31
    assert [request.method for request in api.requests] == ["POST", "POST"]


@pytest.mark.parametrize("second", [failure(401, "Unauthorized"), failure(409, "AlreadyExists")])
def test_a_job_that_may_exist_is_named_although_the_login_has_ended(api, tmp_path, second):
    path = api.kubeconfig(tmp_path)
    executor = KubernetesExecutor(kubeconfig=str(path), namespace="ns", image="image", clock=FakeClock())
    plan = executor.plan(RunContext("run", "s3://bucket"), Placement(replicas=1))
    replies = [Reply(pieces=[b"half of it"], is_cut=True), second]

    def answer(request: Request) -> Reply:
        if len(replies) == 1:
            path.unlink()
        return replies.pop(0) if replies else failure(401, "Unauthorized")

    api.answer = answer
    with pytest.raises(SubmitError) as caught:
        executor.submit(plan)
    assert caught.value.left_running == (str(executor.handle(plan)),)
