"""A run in a queue of Kueue: what each status asks, what it says, and what a refused question changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_api import Reply, Request, ScriptedApi, failure

from atoll.context import RunContext
from atoll.errors import CapacityError, SubmitError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.kube.names import CONTAINER, FAILURES, INDEX, RUN_ID, STORE
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState, ReplicaStatus

pytestmark = pytest.mark.server
HANDLE = RunHandle("kubernetes", "ns", "job", 2)
LONG_AGO, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
FULL = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 600m more needed"
NEVER = "couldn't assign flavors to pod set main: resource nvidia.com/gpu unavailable in ClusterQueue"
PREEMPTED = "Preempted to accommodate a workload (UID: w2, JobUID: j2) due to prioritization in the ClusterQueue; rest"


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": LATER}


class Cluster:
    """One Job in a queue, its Workload and the list of what waits."""

    def __init__(self, api: ScriptedApi) -> None:
        self.api = api
        self.is_suspended = True
        self.job_status: dict[str, Any] = {}
        self.conditions: list[dict[str, Any]] = [condition("QuotaReserved", "Pending", FULL, "False")]
        self.spec: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.has_workload = True
        self.created = LONG_AGO
        self.pods: list[dict[str, Any]] = []
        self.refusals: dict[str, Callable[[Request], Reply | None]] = {}
        """The end of a path -> what is answered instead."""
        api.answer = self.answer

    def refuse(self, end: str, status: int, message: str = "no", only: str = "") -> None:
        self.refusals[end] = lambda request: failure(status, "", message) if only in request.path else None

    def answer(self, request: Request) -> Reply:
        end = request.path.split("/")[-1]
        if end in self.refusals and (reply := self.refusals[end](request)) is not None:
            return reply
        if end == "pods":
            return Reply(body={"metadata": {"resourceVersion": "5"}, "items": self.pods})
        if end == "workloads":
            return Reply(body={"items": self.workloads(request.query["labelSelector"])})
        if end == "pendingworkloads":
            return Reply(body={"items": [self.pending("w2", 0), self.pending("w1", 1)]})
        return Reply(body=self.job if "/jobs" in request.path else {"items": []})

    @property
    def job(self) -> dict[str, Any]:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": "job",
                "namespace": "ns",
                "uid": "j1",
                "resourceVersion": "1",
                "creationTimestamp": self.created,
                "annotations": {RUN_ID: "run", STORE: "s3://bucket"},
                "labels": {"kueue.x-k8s.io/queue-name": "team"},
            },
            "spec": {"completions": 2, "backoffLimitPerIndex": 0, "suspend": self.is_suspended},
            "status": self.job_status,
        }

    def workloads(self, selector: str) -> list[dict[str, Any]]:
        if selector.endswith("=j2"):
            owner = {"kind": "Job", "name": "urgent", "uid": "j2", "controller": True}
            return [{"metadata": {"name": "w2", "ownerReferences": [owner]}}]
        metadata = {"name": "w1", "labels": {"kueue.x-k8s.io/job-uid": "j1"}}
        status = {"conditions": self.conditions, **self.stats}
        return [{"metadata": metadata, "spec": self.spec, "status": status}] if self.has_workload else []

    def pending(self, name: str, place: int) -> dict[str, Any]:
        owner = {"kind": "Job", "name": f"of-{name}"}
        places = {"positionInLocalQueue": place, "positionInClusterQueue": place}
        return {"metadata": {"name": name, "ownerReferences": [owner]}, **places}

    def run(self, evictions: int = 0) -> None:
        """The Job has been admitted, and its replicas run."""
        self.is_suspended, self.job_status = False, {"active": 2, "startTime": LATER}
        self.conditions = [condition("QuotaReserved"), condition("Admitted")]
        self.stats = {"schedulingStats": {"evictions": [{"reason": "Preempted", "count": evictions}]}}
        self.pods = [_pod(rank) for rank in range(2)]

    def asked(self) -> list[str]:
        found = [each.path.split("/")[-1] for each in self.api.requests]
        self.api.requests.clear()
        return found


def _pod(rank: int) -> dict[str, Any]:
    metadata = {
        "name": f"p{rank}",
        "namespace": "ns",
        "uid": f"u{rank}",
        "annotations": {INDEX: str(rank), FAILURES: "0"},
    }
    running = {"name": CONTAINER, "state": {"running": {"startedAt": LATER}}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "containerStatuses": [running]}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ScriptedApi().running() as api:
        yield Cluster(api)


@pytest.fixture
def executor(cluster: Cluster, tmp_path: Path) -> KubernetesExecutor:
    path = cluster.api.kubeconfig(tmp_path)
    return KubernetesExecutor(
        kubeconfig=str(path), namespace="ns", gang="kueue:team", image="i", default_cpus=1, patience_s=0.1
    )


def first(executor: KubernetesExecutor) -> ReplicaStatus:
    return executor.status(HANDLE).replicas[0]


# What a status asks.


def test_a_queued_run_costs_three_requests(cluster: Cluster, executor: KubernetesExecutor) -> None:
    row = first(executor)
    assert cluster.asked() == ["job", "workloads", "pendingworkloads"]
    assert (row.state, row.reason, row.attempt) == (ReplicaState.PENDING, Reason.QUOTA, 0)
    assert "600m more cpu" in row.message
    assert "position 2, behind Job `of-w2`" in row.message
    first(executor)
    assert cluster.asked() == ["job", "workloads"], "the position is a few seconds old at most"


def test_a_preempted_run_costs_one_more_once(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.conditions = [
        condition("Evicted", "Preempted", PREEMPTED),
        condition("QuotaReserved", "Pending", FULL, "False"),
    ]
    cluster.stats = {"schedulingStats": {"evictions": [{"reason": "Preempted", "count": 2}]}}
    row = first(executor)
    assert cluster.asked() == ["job", "workloads", "pendingworkloads", "workloads"]
    assert (row.state, row.reason, row.attempt) == (ReplicaState.PENDING, Reason.PREEMPTED, 2)
    assert "Job `urgent`" in row.message
    first(executor)
    assert cluster.asked() == ["job", "workloads"]


def test_a_run_that_came_back_is_another_attempt(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.run(evictions=1)
    row = first(executor)
    assert (row.state, row.reason, row.attempt) == (ReplicaState.RUNNING, Reason.OK, 1)
    assert cluster.asked() == ["job", "pods", "workloads"]
    assert first(executor).attempt == 1
    assert cluster.asked() == ["job", "pods"], "the count changes only when the Job starts again"


def test_an_ended_run_asks_no_queue_and_has_the_attempts_of_its_pods(
    cluster: Cluster, executor: KubernetesExecutor
) -> None:
    cluster.run(evictions=1)
    cluster.job_status = {"completedIndexes": "0-1", "conditions": [condition("Complete")], "startTime": LATER}
    assert (first(executor).state, first(executor).attempt) == (ReplicaState.SUCCEEDED, 0)
    assert "workloads" not in cluster.asked()


def test_replicas_that_are_being_stopped_say_why(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.run()
    cluster.is_suspended = True
    cluster.conditions = [condition("Evicted", "Preempted", PREEMPTED), condition("Admitted")]
    row = first(executor)
    assert (row.state, row.reason) == (ReplicaState.RUNNING, Reason.STOPPING)
    assert "Job `urgent`" in row.message


# What Kueue ends.


def test_a_run_that_kueue_ended_has_failed_although_its_job_is_suspended(
    cluster: Cluster, executor: KubernetesExecutor
) -> None:
    cluster.spec = {"active": False}
    cluster.conditions = [condition("Evicted", "DeactivatedDueToMaximumExecutionTimeExceeded", "too long")]
    status = executor.status(HANDLE)
    assert status.is_terminal
    assert {(row.state, row.reason) for row in status.replicas} == {(ReplicaState.FAILED, Reason.TIMEOUT)}
    assert status.replicas[0].ended_at is not None


def test_the_watch_of_a_run_sees_its_workload(cluster: Cluster, executor: KubernetesExecutor) -> None:
    with executor.watch(HANDLE) as watch:
        assert watch.status().replicas[0].reason is Reason.QUOTA
        cluster.spec = {"active": False}
        cluster.conditions = [condition("Evicted", "DeactivatedDueToRequeuingLimitExceeded", "never ready")]
        assert watch.status().is_terminal, "the Job has the same version as before"


# Without a permission, or without an answer.


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_without_positions_the_reason_is_still_known(
    cluster: Cluster, executor: KubernetesExecutor, status: int
) -> None:
    cluster.refuse("pendingworkloads", status)
    row = first(executor)
    assert cluster.asked() == ["job", "workloads", "pendingworkloads"], "it is not tried again"
    assert row.reason is Reason.QUOTA
    assert "position" not in row.message
    first(executor)
    assert cluster.asked() == ["job", "workloads"]


@pytest.mark.parametrize("status", [403, 500])
def test_without_the_workload_the_run_only_waits(cluster: Cluster, executor: KubernetesExecutor, status: int) -> None:
    cluster.refuse("workloads", status)
    row = first(executor)
    assert (row.state, row.reason) == (ReplicaState.PENDING, Reason.WAITING)
    assert "team" in row.message
    assert cluster.asked() == ["job", "workloads"]


def test_an_older_kueue_is_asked_in_its_own_version(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.refuse("workloads", 404, only="v1beta2")
    assert first(executor).reason is Reason.QUOTA
    paths = [each.path for each in cluster.api.requests]
    assert "v1beta1" in paths[-1]
    cluster.asked()
    first(executor)
    assert cluster.asked() == ["job", "workloads"]


def test_without_kueue_the_job_is_only_suspended(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.refuse("workloads", 404)
    row = first(executor)
    assert (row.state, row.reason, row.message) == (ReplicaState.PENDING, Reason.WAITING, "the Job is suspended")


@pytest.mark.parametrize(("created", "reason"), [(LONG_AGO, Reason.CONFIG), ("2999-01-01T00:00:00Z", Reason.WAITING)])
def test_a_job_without_a_workload(cluster: Cluster, executor: KubernetesExecutor, created: str, reason: Reason) -> None:
    cluster.has_workload, cluster.created = False, created
    assert first(executor).reason is reason


# Limits of waiting.


def test_a_run_that_never_fits_may_not_wait(cluster: Cluster, executor: KubernetesExecutor) -> None:
    assert executor.queue_left_s(HANDLE) == float("inf")
    cluster.conditions = [condition("QuotaReserved", "Pending", NEVER, "False")]
    assert executor.queue_left_s(HANDLE) == float("-inf")
    assert first(executor).state is ReplicaState.PENDING, "a status ends nothing"


def test_a_launch_that_never_fits_is_refused_and_undone(cluster: Cluster, executor: KubernetesExecutor) -> None:
    cluster.conditions = [condition("QuotaReserved", "Pending", NEVER, "False")]
    is_deleted: list[bool] = []

    def job(request: Request) -> Reply | None:
        if request.method == "DELETE":
            is_deleted.append(True)
        elif request.method == "GET" and is_deleted:
            return failure(404, "NotFound")
        return None

    plan = executor.plan(RunContext("run", "s3://bucket"), Placement(replicas=2))
    cluster.refusals[plan.request["job"]["metadata"]["name"]] = job
    cluster.refusals["job"] = job
    with pytest.raises(SubmitError) as caught:
        executor.submit(plan)
    assert isinstance(caught.value.__cause__, CapacityError)
    assert (caught.value.__cause__.reason, caught.value.left_running) == ("never_fits", ())
    assert is_deleted


def test_a_launch_into_a_full_queue_waits(cluster: Cluster, executor: KubernetesExecutor) -> None:
    handle = executor.submit(executor.plan(RunContext("run", "s3://bucket"), Placement(replicas=2)))
    assert handle.replicas == 2
    assert cluster.asked() == ["jobs", "workloads"]


def test_a_launch_whose_credentials_end_after_the_create_still_has_its_handle(
    cluster: Cluster, executor: KubernetesExecutor
) -> None:
    cluster.refuse("workloads", 401)
    handle = executor.submit(executor.plan(RunContext("run", "s3://bucket"), Placement(replicas=2)))
    assert handle.replicas == 2
    assert [request.method for request in cluster.api.requests] == ["POST", "GET", "GET"]
