"""A namespace on the cluster with AppWrapper and Kueue, and the queues and priorities that a test makes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.kubernetes.api import Api, ApiError
from services.kubernetes.namespace import Namespace

Object = dict[str, Any]
QUEUES = "/apis/kueue.x-k8s.io/v1beta2"
FLAVOR = "default"
OWNER = "atoll.test/namespace"
"""The label of cluster-wide objects, with the namespace whose test made them."""
_PREEMPTION = {"withinClusterQueue": "LowerPriority"}


def make_flavor(api: Api) -> None:
    """The only flavor of resources, which all queues share."""
    api.create(f"{QUEUES}/resourceflavors", {**_header("ResourceFlavor"), "metadata": {"name": FLAVOR}})


@dataclass(frozen=True)
class Queue:
    """A LocalQueue of one namespace with a ClusterQueue of its own."""

    namespace: QueueNamespace
    name: str
    cluster_name: str

    def hold(self, *, is_drained: bool = False) -> None:
        """Admit nothing more; with `is_drained` what was admitted is evicted, too."""
        self._set_policy("HoldAndDrain" if is_drained else "Hold", is_active=False)

    def release(self) -> None:
        self._set_policy("None", is_active=True)

    def hold_cluster_queue(self, *, is_drained: bool = False) -> None:
        policy = "HoldAndDrain" if is_drained else "Hold"
        self.namespace.api.patch(f"{QUEUES}/clusterqueues/{self.cluster_name}", {"spec": {"stopPolicy": policy}})

    def set_quota(self, **quota: str) -> None:
        """Change the quota, as in `QueueNamespace.queue`."""
        path = f"{QUEUES}/clusterqueues/{self.cluster_name}"
        self.namespace.api.patch(path, {"spec": {"resourceGroups": _resource_groups(quota)}})

    def pending(self) -> list[Object]:
        """The queue's pending workloads in their order, as Kueue's visibility API tells them."""
        path = f"/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{self.namespace.name}/localqueues/{self.name}"
        return self.namespace.api.items(f"{path}/pendingworkloads")

    def _set_policy(self, policy: str, *, is_active: bool) -> None:
        self.namespace.api.patch(self.namespace.path("localqueues", self.name), {"spec": {"stopPolicy": policy}})
        self.namespace.until("localqueues", self.name, lambda queue: _is_active(queue) is is_active)


@dataclass(frozen=True)
class QueueNamespace(Namespace):
    def queue(self, name: str = "queue", *, spec: Object | None = None, **quota: str) -> Queue:
        """Make a LocalQueue with its own ClusterQueue, and wait until both are active.

        `quota` is by resource: `cpu="2"`, `memory="4Gi"`, `gpu="1"`; one of them that is not named is not limited in
        practice (cpu and memory), or not covered at all (gpu). `spec` has further keys of the ClusterQueue.
        """
        found = Queue(self, name, f"{self.name}-{name}")
        wanted: Object = {
            "namespaceSelector": {},
            "preemption": _PREEMPTION,
            "resourceGroups": _resource_groups(quota),
            **(spec or {}),
        }
        self._make_for_all("clusterqueues", found.cluster_name, {**_header("ClusterQueue"), "spec": wanted})
        local = {"metadata": {"name": name}, "spec": {"clusterQueue": found.cluster_name}}
        self.make("localqueues", {**_header("LocalQueue"), **local})
        self.until("localqueues", name, _is_active)
        return found

    def priority_class(self, name: str, value: int) -> str:
        """Make a WorkloadPriorityClass; returns its name, which is this namespace's alone."""
        full = f"{self.name}-{name}"
        self._make_for_all("workloadpriorityclasses", full, {**_header("WorkloadPriorityClass"), "value": value})
        return full

    def workload(self, uid: str) -> Object | None:
        """The Workload of the Job or AppWrapper with this uid."""
        listed = self.api.items(self.path("workloads"))
        return next((each for each in listed if uid in _owners(each)), None)

    def until_workload(self, uid: str, condition: str, status: str = "True", *, timeout_s: float = 60) -> Object:
        """Wait until the Workload of an object has a condition; returns the Workload."""

        def is_so(workload: Object) -> bool:
            conditions = workload.get("status", {}).get("conditions", [])
            return any((one["type"], one["status"]) == (condition, status) for one in conditions)

        for each in self._workloads(uid, timeout_s):
            if is_so(each):
                return each
        raise TimeoutError(f"no Workload of {uid} is {condition}={status} after {timeout_s} s: {self.workload(uid)}")

    def _workloads(self, uid: str, timeout_s: float) -> Iterator[Object]:
        listed = self.api.get(self.path("workloads"))
        yield from (each for each in listed["items"] if uid in _owners(each))
        version = listed["metadata"]["resourceVersion"]
        query = {"resourceVersion": version, "timeoutSeconds": int(timeout_s) + 1}
        with contextlib.suppress(TimeoutError):
            for _, each in self.api.watch(self.path("workloads"), timeout=timeout_s, **query):
                if uid in _owners(each):
                    yield each

    def remove(self) -> None:
        super().remove()
        for kind in ("clusterqueues", "workloadpriorityclasses"):
            for each in self.api.items(f"{QUEUES}/{kind}", labelSelector=f"{OWNER}={self.name}"):
                with contextlib.suppress(ApiError):
                    self.api.delete(f"{QUEUES}/{kind}/{each['metadata']['name']}")

    def _make_for_all(self, kind: str, name: str, body: Object) -> None:
        self.api.create(f"{QUEUES}/{kind}", {"metadata": {"name": name, "labels": {OWNER: self.name}}, **body})


def _header(kind: str) -> Object:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind}


def _resource_groups(quota: dict[str, str]) -> list[Object]:
    wanted = {"cpu": "1000", "memory": "1000Gi", **quota}
    if "gpu" in wanted:
        wanted["nvidia.com/gpu"] = wanted.pop("gpu")
    resources = [{"name": name, "nominalQuota": amount} for name, amount in wanted.items()]
    return [{"coveredResources": list(wanted), "flavors": [{"name": FLAVOR, "resources": resources}]}]


def _is_active(queue: Object | None) -> bool:
    conditions = (queue or {}).get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("Active", "True") for one in conditions)


def _owners(thing: Object) -> list[str]:
    return [owner["uid"] for owner in thing["metadata"].get("ownerReferences", [])]
