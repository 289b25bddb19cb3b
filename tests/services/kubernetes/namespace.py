"""One namespace of the cluster: what a test makes in it, and how it waits for it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from services.kubernetes.api import Api, ApiError
from services.kubernetes.cluster import Cluster
from services.kubernetes.remote import Remote

Object = dict[str, Any]
GROUPS = {
    "jobs": "/apis/batch/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "appwrappers": "/apis/workload.codeflare.dev/v1beta2",
    "localqueues": "/apis/kueue.x-k8s.io/v1beta2",
    "podgroups": "/apis/scheduling.x-k8s.io/v1alpha1",
    "workloads": "/apis/kueue.x-k8s.io/v1beta2",
}
"""Where the kinds are that are not in the core group."""
MCAD_GROUPS = {**GROUPS, "appwrappers": "/apis/workload.codeflare.dev/v1beta1"}


@dataclass(frozen=True)
class Namespace:
    cluster: Cluster
    name: str
    folder: Path
    groups: Mapping[str, str] = field(default_factory=lambda: GROUPS, repr=False)

    @classmethod
    def create(
        cls,
        cluster: Cluster,
        name: str,
        folder: Path,
        labels: dict[str, str] | None = None,
        *,
        groups: Mapping[str, str] = GROUPS,
    ) -> Self:
        cluster.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels or {}}})
        found = cls(cluster, name, folder, groups)
        found.until("serviceaccounts", "default", lambda account: account is not None)
        return found

    def remove(self) -> None:
        """End its processes at once, and let the controllers take the rest away."""
        self.cluster.kubelet("clear", namespace=self.name)
        with contextlib.suppress(ApiError):
            self.api.delete(f"/api/v1/namespaces/{self.name}")

    @property
    def api(self) -> Api:
        return self.cluster.api

    @property
    def controllers(self) -> Remote:
        """Stops and starts the controllers of the cluster: the methods of `controllers.processes.Controllers`."""
        assert self.cluster.controllers is not None, "this cluster has no controllers"
        return self.cluster.controllers

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig of the administrator, with this namespace as the default."""
        path = self.folder / f"kubeconfig-{self.name}"
        content = json.loads(self.cluster.kubeconfig.read_text())
        content["contexts"][0]["context"]["namespace"] = self.name
        path.write_text(json.dumps(content))
        return path

    def path(self, kind: str, name: str = "") -> str:
        return f"{self.groups.get(kind, '/api/v1')}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")

    def make(self, kind: str, body: Object, **query: object) -> Object:
        made: Object = self.api.create(self.path(kind), body, **query)
        return made

    def get(self, kind: str, name: str) -> Object:
        found: Object = self.api.get(self.path(kind, name))
        return found

    def pods(self, job: str) -> list[Object]:
        """The pods of a Job, by rank."""
        found = self.api.items(self.path("pods"), labelSelector=f"batch.kubernetes.io/job-name={job}")
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))

    def until(
        self, kind: str, name: str, is_so: Callable[[Object | None], bool], *, timeout_s: float = 60
    ) -> Object | None:
        return self.cluster.until(self.path(kind, name), is_so, timeout_s=timeout_s)

    def until_pods(self, job: str, is_so: Callable[[list[Object]], bool], *, timeout_s: float = 60) -> list[Object]:
        """Wait for pods of a Job; each change of one of them is looked at."""
        selector = f"batch.kubernetes.io/job-name={job}"
        deadline = time.monotonic() + timeout_s
        found: list[Object] = []
        while (left := deadline - time.monotonic()) > 0:
            listed = self.api.get(self.path("pods"), labelSelector=selector)
            found = listed["items"]
            if is_so(found):
                return self.pods(job)
            query = {"resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": int(left) + 1}
            with contextlib.suppress(TimeoutError):
                next(self.api.watch(self.path("pods"), timeout=left + 1, labelSelector=selector, **query), None)
        states = [pod.get("status") for pod in found]
        raise TimeoutError(f"the pods of {job} are not so after {timeout_s} s: {json.dumps(states, indent=1)}")

    def fault(self, kind: str, **values: Any) -> int:
        """A fault of the kubelet for pods of this namespace: see `kubelet.faults`."""
        number: int = self.cluster.kubelet("add_fault", fault={"kind": kind, "namespace": self.name, **values})
        return number

    def send_signal(self, number: int, **which: Any) -> int:
        """To a rank (`job`, `index`) or a pod (`pod`); with `out_of_memory` its end is called OOMKilled."""
        count: int = self.cluster.kubelet("send_signal", namespace=self.name, number=number, **which)
        return count

    def user(self, name: str, rules: list[Object], *, server: str | None = None) -> Path:
        """A kubeconfig of a user who may do in this namespace what the rules say, and nothing else."""
        group = "rbac.authorization.k8s.io"
        self.make("roles", {"metadata": {"name": name}, "rules": rules})
        reference = {"apiGroup": group, "kind": "Role", "name": name}
        subject = {"apiGroup": group, "kind": "User", "name": f"{name}@{self.name}"}
        self.make("rolebindings", {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
        self._wait_until_allowed(subject["name"], rules)
        path = self.cluster.plane.user(subject["name"], folder=self.folder, server=server)
        content = json.loads(path.read_text())
        content["contexts"][0]["context"]["namespace"] = self.name
        path.write_text(json.dumps(content))
        return path

    def _wait_until_allowed(self, user: str, rules: list[Object]) -> None:
        """The API server learns of a new role a moment later."""
        if not rules:
            return
        rule = rules[-1]
        resource, _, part = rule["resources"][0].partition("/")
        wanted = {"namespace": self.name, "verb": rule["verbs"][0], "group": rule["apiGroups"][0],
                  "resource": resource, "subresource": part}  # fmt: skip
        review = {"spec": {"user": user, "resourceAttributes": wanted}}
        deadline = time.monotonic() + 30
        while not self.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]:
            assert time.monotonic() < deadline, f"{user} is still not allowed to {rule}"
            time.sleep(0.05)
