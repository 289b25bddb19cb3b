"""Restarts on MCAD, by delete and re-create, against a scripted cluster: what a restart keeps, and what stops it; and
cancels of runs whose controller would go on, or does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kube_api import Reply, Request, ScriptedApi, failure

from atoll import journal
from atoll.errors import AuthError, ConfigError, RunNotFound, StopFailed, StoreUnavailable
from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.journal import Cancel
from atoll.kube.appwrapper import MCAD, V1BETA2, components_of
from atoll.kube.names import ATTEMPT, CONTROLLER_UID
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.status import ReplicaState
from atoll.testing.fakes import FakeClock

pytestmark = pytest.mark.server

Object = dict[str, Any]


class Dispatcher:
    """One namespace of a cluster with MCAD.

    A Job inside an AppWrapper gets the condition `end` at once; if that is empty, the Job goes on. The deletion of an
    object deletes what it owns, and then calls `on_delete`; `on_create` may replace the answer.
    """

    def __init__(self, api: ScriptedApi) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[str] = []
        self.on_delete: Callable[[], None] = lambda: None
        self.on_create: Callable[[], Reply | None] = lambda: None
        self.end = "Failed"
        self.is_down = False
        """Whether the controller of v1beta2, which removes what is inside before the AppWrapper, is down."""
        self._number = 0
        api.answer = self.answer

    def named(self, kind: str) -> list[Object]:
        return [found for path, found in self.objects.items() if f"/{kind}/" in path]

    def answer(self, request: Request) -> Reply:
        path = request.path
        if request.query.get("dryRun"):
            return Reply(201, request.body)
        self.requests.append(f"{request.method} {path}")
        if path == "/version":
            return Reply(body={"major": "1", "minor": "36"})
        if path == f"/apis/{MCAD.group}":
            return Reply(body={"versions": [{"groupVersion": each.api_version} for each in (MCAD, V1BETA2)]})
        if path in self.objects and request.method == "GET":
            return Reply(body=self.objects[path])
        if path in self.objects and request.method == "DELETE":
            if self.is_down and "/appwrappers/" in path:  # its finalizer waits for the controller
                self.objects[path]["metadata"]["deletionTimestamp"] = "2026-11-18T09:00:00Z"
                return Reply(body={})
            self.remove(path)
            self.on_delete()
            return Reply(body={})
        if request.method == "POST":
            return self._create(path, request.body)
        if path.endswith(("/pods", "/events")):
            return Reply(body={"items": [], "metadata": {"resourceVersion": "1"}})
        return failure(404, "NotFound")

    def _create(self, path: str, body: Object) -> Reply:
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            return failure(409, "AlreadyExists")
        made = self._stored(key, body)
        if body["kind"] == "AppWrapper":
            job = {**components_of(made)[0]}
            ended: Object = {"conditions": [{"type": self.end, "status": "True"}]} if self.end else {}
            ended |= {"completedIndexes": "0"} if self.end == "Complete" else {}
            owner = {"ownerReferences": [{"uid": made["metadata"]["uid"]}]}
            job = {**job, "status": ended, "metadata": {**job["metadata"], **owner}}
            self._stored(f"/apis/batch/v1/namespaces/team/jobs/{body['metadata']['name']}", job)
        return self.on_create() or Reply(201, made)

    def _stored(self, key: str, body: Object) -> Object:
        self._number += 1
        given = {"uid": f"uid-{self._number}", "resourceVersion": str(self._number), "namespace": "team"}
        made = {**body, "metadata": {**body["metadata"], **given}}
        if body["kind"] == "Job":
            made["metadata"]["labels"] = {**made["metadata"].get("labels", {}), CONTROLLER_UID: given["uid"]}
        self.objects[key] = made
        return made

    def remove(self, path: str) -> None:
        uid = self.objects.pop(path)["metadata"]["uid"]
        owned = [
            key
            for key, found in self.objects.items()
            if uid in [each["uid"] for each in found["metadata"].get("ownerReferences") or ()]
        ]
        for key in owned:
            self.remove(key)


@pytest.fixture(scope="module")
def running_api() -> Iterator[ScriptedApi]:
    with ScriptedApi().running() as running:
        yield running


@pytest.fixture
def mcad(running_api: ScriptedApi) -> Dispatcher:
    return Dispatcher(running_api)


@pytest.fixture
def launch(running_api: ScriptedApi, mcad: Dispatcher, tmp_path) -> Callable[..., Run]:
    def made(**settings: Any) -> Run:
        executor = AppWrapperExecutor(
            kubeconfig=str(running_api.kubeconfig(tmp_path)),
            image="registry.example/train:1",
            command=["train"],
            store_is_mounted=True,
            **{"dialect": "v1beta1", **settings},
        )
        store = (tmp_path / "store").as_uri()
        return prepare("", on=executor, store=store, program=("train",), replicas=1, max_restarts=1).submit()

    return made


def test_a_failed_run_is_created_again_with_its_next_attempt(mcad: Dispatcher, launch):
    run = launch()
    mcad.on_delete = lambda: setattr(mcad, "end", "Complete")
    assert run.wait(timeout_s=20).state is ReplicaState.SUCCEEDED
    (wrapper,) = mcad.named("appwrappers")
    assert wrapper["metadata"]["annotations"][ATTEMPT] == "1"


def test_a_run_that_is_cancelled_while_its_failed_attempt_is_deleted_is_not_created_again(mcad: Dispatcher, launch):
    run = launch()
    mcad.on_delete = lambda: journal.record_cancel(run.store, run.id, Cancel("enough"), launch=run.launch)
    before = len(mcad.requests)
    assert run.wait(timeout_s=20).state is ReplicaState.CANCELLED
    assert mcad.objects == {}
    assert [each for each in mcad.requests[before:] if each.startswith("POST")] == []


@pytest.mark.parametrize("answer", [None, failure(422, "Invalid")], ids=["created", "refused"])
def test_a_run_that_is_cancelled_while_it_is_created_again_is_stopped(mcad: Dispatcher, launch, answer):
    run = launch()

    def cancelled() -> Reply | None:
        journal.record_cancel(run.store, run.id, Cancel("enough"), launch=run.launch)
        return answer

    mcad.on_create, mcad.on_delete = cancelled, lambda: setattr(mcad, "end", "")
    if answer is None:
        assert run.wait(timeout_s=20).state is ReplicaState.CANCELLED
    else:
        with pytest.raises(ConfigError, match="scripted"):
            run.wait(timeout_s=20)
    assert mcad.objects == {}


def test_a_store_that_does_not_answer_during_a_restart_does_not_lose_the_run(mcad: Dispatcher, launch, monkeypatch):
    run, asked = launch(), []

    def is_cancelled(*_: Any, **__: Any) -> bool:
        asked.append(len(mcad.named("appwrappers")))
        if not asked[-1]:
            raise StoreUnavailable("no answer")
        return False

    monkeypatch.setattr(journal, "is_cancelled", is_cancelled)
    mcad.on_delete = lambda: setattr(mcad, "end", "Complete")
    assert run.wait(timeout_s=20).state is ReplicaState.SUCCEEDED
    assert asked == [1, 0, 1]


def test_the_files_of_a_run_come_back_with_its_next_attempt(mcad: Dispatcher, launch):
    run = launch(command_args={"rate": 1})
    (before,) = mcad.named("configmaps")
    mcad.on_delete = lambda: setattr(mcad, "end", "Complete")
    assert run.wait(timeout_s=20).state is ReplicaState.SUCCEEDED
    (wrapper,), (after,) = mcad.named("appwrappers"), mcad.named("configmaps")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert [each["uid"] for each in after["metadata"]["ownerReferences"]] == [wrapper["metadata"]["uid"]]
    assert (after["data"], after["metadata"]["labels"]) == (before["data"], before["metadata"]["labels"])


def test_a_restart_that_cannot_read_the_files_of_the_run_deletes_nothing(mcad: Dispatcher, launch, running_api):
    run = launch(command_args={"rate": 1})
    answer, before = mcad.answer, dict(mcad.objects)
    running_api.answer = lambda request: (
        failure(403, "Forbidden", "no access") if "/configmaps/" in request.path else answer(request)
    )
    with pytest.raises(AuthError, match="no access"):
        run.wait(timeout_s=20)
    assert mcad.objects == before


def test_a_second_command_that_waits_does_not_take_a_restart_for_a_loss(mcad: Dispatcher, launch):
    """For a moment there is no AppWrapper. If the first command is killed then, the run is lost."""
    clock = FakeClock()
    run = launch(clock=clock)
    seen = []
    with run.executor.watch(run.handle) as watch:
        seen.append(watch.status())
        (path,) = [path for path in mcad.objects if "/appwrappers/" in path]
        mcad.remove(path)
        seen.append(watch.status())
        clock.advance(60)
        seen.append(watch.status())
        mcad.end = "Complete"
        run.executor.submit(run.plan())
        seen.append(watch.status())
    assert [status.state for status in seen[:2]] == [ReplicaState.PENDING] * 2
    assert [status.state for status in seen[2:]] == [ReplicaState.LOST, ReplicaState.SUCCEEDED]


@pytest.mark.parametrize("state", ["Completed", "Failed", "Deleted"])
def test_cancel_deletes_what_mcad_would_dispatch_again(mcad: Dispatcher, launch, state):
    """`Completed` is its only final state: there nothing runs, and the objects stay to be read."""
    run = launch()
    (wrapper,) = mcad.named("appwrappers")
    wrapper["metadata"]["annotations"][ATTEMPT] = "1"  # no restart is left
    wrapper["status"] = {"state": state}
    assert run.executor.status(run.handle).is_terminal
    run.executor.cancel(run.handle)
    assert bool(mcad.named("appwrappers")) is (state == "Completed")


def test_cancel_stops_the_pods_also_if_the_controller_is_down(mcad: Dispatcher, launch):
    mcad.end, mcad.is_down = "", True
    run = launch(dialect="v1beta2", clock=FakeClock())
    with pytest.raises(StopFailed, match="its pods have ended, and its controller, which may be down"):
        run.executor.cancel(run.handle)
    assert mcad.named("jobs") == []


def test_the_log_of_a_rank_whose_first_pod_is_not_there_yet_is_empty(mcad: Dispatcher, launch):
    mcad.end = ""
    run = launch()
    assert list(run.executor.logs(run.handle, 0)) == []
    (wrapper,) = mcad.named("appwrappers")
    wrapper["metadata"]["annotations"][ATTEMPT] = "1"  # the pods of the attempt before are gone
    with pytest.raises(RunNotFound, match="its pods are gone"):
        run.executor.logs(run.handle, 0)
