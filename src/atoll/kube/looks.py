"""Reads what a cluster has: its version, gang schedulers, Pod Security, and objects that a run names.

`preflight.py` and `doctor.py` call this. Apart from the version and from discovery, which every user may read, a look
needs permissions that a launcher need not have: without them its answer is None, and the launch goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from atoll.errors import AuthError, RunNotFound
from atoll.kube.client import JSON, METADATA_ONLY, path_to
from atoll.kube.gang import COSCHEDULING_API, NATIVE_SINCE, Gang
from atoll.kube.jobs import Jobs
from atoll.kube.references import Reference

Version = tuple[int, int]
ENFORCE = "pod-security.kubernetes.io/enforce"
NAMESPACE_HINT = "`kubectl get namespaces` lists them; choose one with the setting `namespace`"
_KUEUE, _VOLCANO, _NATIVE = "kueue.x-k8s.io", "scheduling.volcano.sh", "scheduling.k8s.io"


def server_version(jobs: Jobs, operation: str = "submit", *, tries: int | None = None) -> Version:
    """Major and minor version of the API server; EKS reports a minor version such as `29+`."""
    found = jobs.client.get("/version", "the version of the cluster", operation, tries=tries)
    numbers = [re.match(r"\d*", str(found.get(name, "")))[0] or "0" for name in ("major", "minor")]  # type: ignore[index]
    return int(numbers[0]), int(numbers[1])


class Looks:
    """What the cluster has, for runs in one namespace."""

    def __init__(self, jobs: Jobs, namespace: str, operation: str = "submit") -> None:
        self._client, self.namespace, self._operation = jobs.client, namespace, operation

    def pod_security(self) -> str | None:
        """The Pod Security level that the namespace enforces, empty if none; None if we may not look."""
        path = path_to("namespaces", name=self.namespace)
        found = self._read(path, f"namespace `{self.namespace}`", METADATA_ONLY)
        return None if found is None else str((found["metadata"].get("labels") or {}).get(ENFORCE, ""))

    def exists(self, thing: Reference) -> bool | None:
        """Whether the cluster has this object; None if we may not look."""
        path = path_to(thing.plural, self.namespace if thing.is_namespaced else None, thing.name, api=thing.api)
        try:
            return None if self._read(path, str(thing), METADATA_ONLY) is None else True
        except RunNotFound:
            return False

    def missing(self, things: list[Reference]) -> Iterator[str]:
        """A problem for each object that the cluster surely does not have."""
        for thing in things:
            if self.exists(thing) is False:
                where = f"namespace `{self.namespace}`" if thing.is_namespaced else "the cluster"
                yield f"{thing.setting}: {where} has no {thing}"

    def gang_problems(self, gang: Gang, version: Version, queue_priority: str | None = None) -> Iterator[str]:
        """Why this cluster cannot start such a gang."""
        name = f"gang=`{gang.kind}{f':{gang.name}' if gang.name else ''}`"
        match gang.kind:
            case "native":
                yield from self._native_problems(name, version)
            case "coscheduling" if not self._serves(COSCHEDULING_API, "podgroups"):
                yield f"{name}: the cluster has no PodGroup of {COSCHEDULING_API}; ask for it, or use another gang"
            case "kueue":
                yield from self._queue_problems(name, gang.name, _KUEUE, "localqueues", "Kueue", self.namespace)
                if queue_priority is not None:
                    yield from self._priority_problems(queue_priority)
            case "volcano":
                yield from self._queue_problems(name, gang.name, _VOLCANO, "queues", "Volcano", None)

    def queues(self) -> dict[str, list[str] | None]:
        """The queues of each queueing system that the cluster has; None instead of those that we may not list."""
        found: dict[str, list[str] | None] = {}
        for group, plural, namespace in ((_KUEUE, "localqueues", self.namespace), (_VOLCANO, "queues", None)):
            if (api := self._api(group)) is not None:
                listed = self._read(path_to(plural, namespace, api=api), plural)
                names = None if listed is None else [each["metadata"]["name"] for each in listed.get("items") or ()]
                found["kueue" if group == _KUEUE else "volcano"] = names
        return found

    def listed(self, plural: str) -> list[Any] | None:
        """All objects of a core kind, of every namespace; None if we may not list them."""
        try:
            return self._client.list(path_to(plural), plural, self._operation)
        except AuthError as exc:
            if exc.reason != "forbidden":
                raise
            return None

    def _queue_problems(
        self, setting: str, queue: str, group: str, plural: str, system: str, namespace: str | None
    ) -> Iterator[str]:
        api = self._api(group)
        if api is None:
            yield f"{setting}: the cluster has no {system}; ask for it, or use another gang"
            return
        where = f"namespace `{namespace}`" if namespace else "the cluster"
        try:
            found = self._read(path_to(plural, namespace, queue, api=api), f"queue `{queue}`") or {}
        except RunNotFound:
            yield f"{setting}: {where} has no queue `{queue}` of {system}{self._others(plural, namespace, api)}"
            return
        conditions = (found.get("status") or {}).get("conditions") or ()
        inactive = [each for each in conditions if each.get("type") == "Active" and each.get("status") == "False"]
        yield from (
            f"{setting}: the queue is not active: {each.get('message') or each.get('reason')}" for each in inactive
        )

    def _priority_problems(self, priority: str) -> Iterator[str]:
        """Kueue says nothing about a class that does not exist: the run would wait for ever."""
        api, plural = self._api(_KUEUE), "workloadpriorityclasses"
        try:
            if api is not None:
                self._read(
                    path_to(plural, name=priority, api=api), f"WorkloadPriorityClass `{priority}`", METADATA_ONLY
                )
        except RunNotFound:
            others = self._others(plural, None, str(api))
            yield f"queue_priority: the cluster has no WorkloadPriorityClass `{priority}`{others}"

    def _others(self, plural: str, namespace: str | None, api: str) -> str:
        """Such as `; there are a, b`; nothing if we may not look."""
        found = self._read(path_to(plural, namespace, api=api), plural)
        if found is None:
            return ""
        names = sorted(str(each["metadata"]["name"]) for each in found.get("items") or ())
        return f"; there are {', '.join(names)}" if names else "; there are none, ask the administrator"

    def _native_problems(self, setting: str, version: Version) -> Iterator[str]:
        if version < NATIVE_SINCE:
            have, need = (".".join(map(str, each)) for each in (version, NATIVE_SINCE))
            yield f"{setting}: Kubernetes {have}; Jobs are gangs only from {need} on; use another gang"
            return
        served = (self._read(f"/apis/{_NATIVE}", "API groups") or {}).get("versions") or ()
        versions = [str(each["groupVersion"]) for each in served]
        if not any(self._serves(each, "podgroups") for each in versions):
            yield f"{setting}: its feature gates are off in this cluster; ask for them, or use another gang"

    def _api(self, group: str) -> str | None:
        """The path of the version of a group that the cluster prefers; None if it does not have the group."""
        try:
            found = self._read(f"/apis/{group}", f"API group {group}") or {}
        except RunNotFound:
            return None
        return f"/apis/{found['preferredVersion']['groupVersion']}" if "preferredVersion" in found else None

    def _serves(self, api: str, plural: str) -> bool:
        """Whether the cluster has this kind of objects."""
        try:
            found = self._read(f"/apis/{api}", f"API {api}") or {}
        except RunNotFound:
            return False
        return plural in {each.get("name") for each in found.get("resources") or ()}

    def _read(self, path: str, what: str, content_type: str = JSON) -> dict[str, Any] | None:
        """An object or a list; None if we may not read it. `RunNotFound` if it does not exist."""
        try:
            return self._client.get(path, what, self._operation, content_type=content_type)
        except AuthError as exc:
            if exc.reason != "forbidden":
                raise
            return None
