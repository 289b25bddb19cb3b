"""The Job of a run and its pods: find, create, delete. Both executors on Kubernetes use this."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import quote

from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, BackendError, ConfigError, Conflict, RunNotFound, SubmitError
from atoll.kube.client import Answer, KubeClient, path_to
from atoll.kube.coscheduling import group_of
from atoll.kube.errors import retry_after_s
from atoll.kube.job import token_of
from atoll.kube.logs import last_lines
from atoll.kube.names import BATCH as BATCH_PREFIX
from atoll.kube.names import CONTROLLER_UID, INDEX, MANAGED_BY, MANAGER, context_of
from atoll.kube.queues import Queues
from atoll.kube.watch import Changes

BATCH = "/apis/batch/v1"
Object = dict[str, Any]
_EVENTS_S = 5.0
"""How old events may be that a status shows again."""
_WARNINGS = "type=Warning,reason!=FailedScheduling,reason!=BackOff,reason!=Failed"
_NAME_CHARS = 40
"""So much of the name of a Job is in the names of its pods."""
_MOST_TAILS = 4
"""How many logs a status reads, whatever the number of replicas that failed."""
_TAIL_LINES = 20

log = logging.getLogger("atoll.executors")


class Jobs:
    """The objects of runs in one cluster."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self.client, self._clock = client, clock
        self.queues = Queues(client, clock)
        self._events: dict[str, tuple[float, list[Object]]] = {}
        self._tails: dict[str, str] = {}

    # Reading.

    def find(self, namespace: str, name: str, operation: str = "status") -> Object | None:
        """The Job; None if the cluster has none of this name."""
        try:
            return self.client.get(path_to("jobs", namespace, name, api=BATCH), f"Job `{name}`", operation)
        except RunNotFound:
            return None

    def of_run(self, namespace: str, name: str, operation: str = "status") -> Object | None:
        """The Job of a run; None also if the Job of this name is not one of Atoll."""
        found = self.find(namespace, name, operation)
        return None if found is None or context_of(found) is None else found

    def pods(self, job: Mapping[str, Any], operation: str = "status", *, rank: int | None = None) -> list[Object]:
        """The pods of this Job, or of one rank of it, and of no other Job that had its name."""
        return self.listed_pods(job, operation, rank=rank)[0]

    def listed_pods(
        self, job: Mapping[str, Any], operation: str = "status", *, rank: int | None = None
    ) -> tuple[list[Object], str]:
        """The pods of this Job, in one request for any number of them, and the version of the list."""
        found = self.client.get(*_pods_of(job), operation, query=_selector(job, rank))
        return list(found.get("items") or []), str((found.get("metadata") or {}).get("resourceVersion") or "")

    def pod_changes(self, job: Mapping[str, Any]) -> Changes:
        """Notices changes of the pods of this Job."""
        return Changes(self.client, *_pods_of(job), query=_selector(job), clock=self._clock)

    def orphans(self, namespace: str, name: str, operation: str = "status") -> list[Object]:
        """The pods of a Job that is gone: they are ending, or the Job was deleted without them."""
        return self.pods_named(namespace, name, operation)[0]

    def pods_named(self, namespace: str, name: str, operation: str = "status") -> tuple[list[Object], str]:
        """The pods of every Job of Atoll that has or had this name, and the version of the list."""
        path, what, query = _named_pods(namespace, name)
        try:
            found = self.client.get(path, what, operation, query=query)
        except RunNotFound:
            return [], ""
        return list(found.get("items") or []), str((found.get("metadata") or {}).get("resourceVersion") or "")

    def named_pod_changes(self, namespace: str, name: str) -> Changes:
        """Notices changes of these pods."""
        path, what, query = _named_pods(namespace, name)
        return Changes(self.client, path, what, query=query, clock=self._clock)

    def events(self, job: Mapping[str, Any]) -> list[Object]:
        """Warnings about the Job and its pods, read at most every few seconds. Empty if we may not read them.

        The name of a pod begins with that of its Job, which is cut if it is long. So there may be some of other Jobs.
        What the scheduler says is in the status of the pods, too; its events would be too many for a large run.
        Only for a PodGroup they are read: there the status of a pod says less.
        """
        metadata = job["metadata"]
        now, uid = self._clock.monotonic(), str(metadata["uid"])
        read_at, found = self._events.get(uid, (float("-inf"), []))
        if now - read_at < _EVENTS_S:
            return found
        path, query = path_to("events", metadata["namespace"]), {"fieldSelector": _WARNINGS}
        template = (job.get("spec") or {}).get("template") or {}
        if group_of(template):  # only an event of one pod says what its group lacks
            query = {"fieldSelector": "type=Warning"}
        with suppress(BackendError):
            listed = self.client.list(path, f"events of Job `{metadata['name']}`", "status", query=query)
            begin = str(metadata["name"])[:_NAME_CHARS]
            found = [each for each in listed if str(each["involvedObject"].get("name", "")).startswith(begin)]
        self._events = {uid: (now, found)}
        return found

    def tails(self, pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """The last lines of some of these pods, by pod name. Each is read once; empty if it cannot be read."""
        found = {}
        for pod in islice(pods, _MOST_TAILS):
            metadata = pod["metadata"]
            if metadata["uid"] not in self._tails:
                self._tails[metadata["uid"]] = self._tail(metadata["namespace"], metadata["name"])
            found[str(metadata["name"])] = self._tails[metadata["uid"]]
        return found

    def _tail(self, namespace: str, pod: str) -> str:
        try:
            return "\n".join(last_lines(self.client, namespace, pod, _TAIL_LINES))
        except (BackendError, ConfigError):
            return ""

    def of_atoll(self, namespace: str) -> list[Object]:
        """Every Job with Atoll's label."""
        query = {"labelSelector": f"{MANAGED_BY}={MANAGER}"}
        return self.client.list(path_to("jobs", namespace, api=BATCH), "Jobs of Atoll", "sweep", query=query)

    # Creating.

    def dry_run(self, thing: Mapping[str, Any], namespace: str) -> Answer:
        """Let the API server check a Job, or an object that a Job will own, without storing it."""
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        what = f"{thing['kind']} `{thing['metadata']['name']}`"
        return self.client.call("POST", collection(thing, namespace), what, "submit", query=query, body=thing)

    def create(self, thing: Mapping[str, Any], namespace: str, run_id: str) -> tuple[Object, bool]:
        """Create the Job, or another object that is the run, or adopt the one that an earlier request of ours created.
        Returns it, and if it is new.

        A lost answer is followed by another try, which finds the name taken: the token tells whether by us.
        `SubmitError` if it may have been created and cannot be found.
        """
        name, what, executor = str(thing["metadata"]["name"]), _title(thing), self.client.executor
        path, deadline, pauses = collection(thing, namespace), self.client.deadline(), self.client.pauses()
        maybe_created = False
        while True:
            try:
                query = {"fieldValidation": "Strict"}
                answer = self.client.call("POST", path, what, "submit", query=query, body=thing, tries=1)
                for warning in answer.warnings:
                    log.warning("run %s: %s", run_id, warning)
                return answer.body, True
            except AtollError as exc:
                is_retryable = bool(getattr(exc, "retryable", False))
                maybe_created = maybe_created or (is_retryable and exc.reason not in ("throttled", "webhook"))
                if exc.reason == "taken":
                    return self._ours(thing, namespace, run_id, maybe_created), maybe_created
                if is_retryable and not deadline.is_past:
                    deadline.sleep(max(next(pauses), retry_after_s(exc.__cause__)))
                    continue
                if maybe_created and (found := self._found_ours(thing, namespace)) is not None:
                    return found, True
                if maybe_created:
                    text = f"run `{run_id}`: {exc.message}"
                    raise SubmitError(text, left_running=[name], created=[name], executor=executor) from exc
                if isinstance(exc, RunNotFound):  # such as a namespace that does not exist
                    raise BackendError(exc.message, executor=executor, operation="submit", hint=exc.hint) from exc
                raise

    def same(self, thing: Mapping[str, Any], namespace: str, operation: str) -> Object | None:
        """The object of this kind and name; None if the cluster has none."""
        path = f"{collection(thing, namespace)}/{quote(str(thing['metadata']['name']), safe='')}"
        try:
            return self.client.get(path, _title(thing), operation)
        except RunNotFound:
            return None

    def _found_ours(self, thing: Mapping[str, Any], namespace: str) -> Object | None:
        """Our object, if a create whose answer was lost has made it; None also if we cannot look."""
        with suppress(BackendError, ConfigError):  # the second: a login that has ended since
            found = self.same(thing, namespace, "submit")
            if found is not None and token_of(found) == token_of(thing):
                return found
        return None

    def _ours(self, thing: Mapping[str, Any], namespace: str, run_id: str, maybe_created: bool) -> Object:
        """The object of this name if it has our token; `Conflict` if it is another one."""
        name, executor = str(thing["metadata"]["name"]), self.client.executor
        try:
            found = self.same(thing, namespace, "submit")
        except (BackendError, ConfigError) as exc:  # it is left as it is, unless this launcher may have created it
            created = [name] if maybe_created else []
            text = f"run `{run_id}`: {exc.message}"
            raise SubmitError(text, left_running=[name], created=created, executor=executor, hint=exc.hint) from exc
        if found is None:
            message = f"{_title(thing)} was there and is not there any more"
            raise BackendError(message, executor=executor, operation="submit", hint="launch it again")
        if token_of(found) != token_of(thing):
            raise Conflict(run_id, [f"{_title(thing)} in namespace `{namespace}` was created by another request"])
        return found

    def create_owned(self, thing: Mapping[str, Any], owner: Mapping[str, Any], namespace: str) -> None:
        """Create an object that Kubernetes deletes together with the Job. An object that is there is accepted."""
        metadata = {**thing["metadata"], "ownerReferences": [_reference(owner)]}
        what = f"{thing['kind']} `{metadata['name']}`"
        try:
            self.client.call("POST", collection(thing, namespace), what, "submit", body={**thing, "metadata": metadata})
        except BackendError as exc:
            if exc.reason != "taken":
                raise

    # Deleting.

    def delete(self, job: Mapping[str, Any], policy: str = "Foreground") -> None:
        """Request the deletion of exactly this object and its pods; a Job stays visible until the pods are gone."""
        metadata = job["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": policy,
            "preconditions": {"uid": metadata["uid"]},
        }
        path = f"{collection(job, metadata['namespace'])}/{quote(metadata['name'], safe='')}"
        try:
            self.client.call("DELETE", path, f"delete {_title(job)}", "cancel", body=body)
        except BackendError as exc:
            if not isinstance(exc, RunNotFound) and exc.reason != "changed":
                raise
            found = self.same(job, metadata["namespace"], "cancel")
            if found is not None and found["metadata"]["uid"] == metadata["uid"]:
                raise  # otherwise ours is gone, and another object may have its name

    def wait_until_gone(self, job: Mapping[str, Any], deadline: Deadline) -> list[Object]:
        """Wait until the Job and its pods are gone. Returns the pods that are left at the deadline."""
        metadata = job["metadata"]
        pauses = backoff(0.1, factor=1.5, cap_s=2.0)
        while True:
            is_late = deadline.is_past
            found = self.find(metadata["namespace"], metadata["name"], "cancel")
            is_there = found is not None and found["metadata"]["uid"] == metadata["uid"]
            left = self.pods(job, "cancel") if is_late or not is_there else []
            if is_late and is_there and not left:
                return [dict(job)]
            if is_late or not (is_there or left):
                return left
            deadline.sleep(next(pauses))


def _title(thing: Mapping[str, Any]) -> str:
    return f"{thing.get('kind', 'Job')} `{thing['metadata']['name']}`"


def _pods_of(job: Mapping[str, Any]) -> tuple[str, str]:
    """The path of the pods of a Job, and what to call them."""
    metadata = job["metadata"]
    return path_to("pods", metadata["namespace"]), f"pods of Job `{metadata['name']}`"


def _named_pods(namespace: str, name: str) -> tuple[str, str, dict[str, str]]:
    query = {"labelSelector": f"{BATCH_PREFIX}job-name={name},{MANAGED_BY}={MANAGER}"}
    return path_to("pods", namespace), f"pods of Job `{name}`", query


def _selector(job: Mapping[str, Any], rank: int | None = None) -> dict[str, str]:
    of_rank = "" if rank is None else f",{INDEX}={rank}"
    return {"labelSelector": f"{CONTROLLER_UID}={job['metadata']['uid']}{of_rank}"}


def collection(thing: Mapping[str, Any], namespace: str) -> str:
    """The path to create this object at."""
    version, kind = thing.get("apiVersion", "batch/v1"), thing.get("kind", "Job")  # the Jobs of a list do not say it
    api = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return path_to(f"{kind.lower()}s", namespace, api=api)


def _reference(owner: Mapping[str, Any]) -> Object:
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
