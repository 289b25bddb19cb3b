"""The AppWrappers of runs in one cluster: find, create, annotate, delete. The Jobs inside are in `kube.jobs`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, ConfigError, Conflict, RunNotFound
from atoll.executors.appwrapper.reading import (
    SILENT_S,
    Snapshot,
    ended_rows,
    notes_to_keep,
    runs_own_program,
    wrapper_status,
)
from atoll.kube.appwrapper import DIALECTS, GROUPS, Dialect, Phase, WrapperView, components_of, served_dialect
from atoll.kube.job import token_of
from atoll.kube.job_watch import may_have_events
from atoll.kube.jobs import Jobs, Object
from atoll.kube.kueue import queue_of
from atoll.kube.names import MANAGED_BY, MANAGER, POKE, context_of
from atoll.kube.pod_state import needs_log
from atoll.kube.reading import newest_pods
from atoll.kube.stopping import name_of
from atoll.status import ReplicaState, RunStatus

MERGE_PATCH = "application/merge-patch+json"
NO_APPWRAPPER = (
    "the cluster has no AppWrappers ({groups}); ask the administrator for the AppWrapper controller, or use "
    "`--on kubernetes`"
)

log = logging.getLogger("atoll.executors")


class Wrappers:
    """The AppWrappers in one cluster, in one dialect: the given one, or the newest that the cluster serves."""

    def __init__(self, jobs: Jobs, clock: Clock, dialect: Dialect | None = None) -> None:
        self.jobs, self._clock, self._dialect = jobs, clock, dialect
        self._may_annotate = True
        self._deleted: set[str] = set()

    # Reading.

    def dialect(self, operation: str = "status") -> Dialect:
        """The dialect of this cluster; `ConfigError` with the reason `no_appwrapper` if it has none."""
        if self._dialect is None:
            served = [version for group in GROUPS for version in self._versions(group, operation)]
            self._dialect = served_dialect(served)
        if self._dialect is None:
            raise ConfigError(NO_APPWRAPPER.format(groups=", ".join(GROUPS)), reason="no_appwrapper")
        return self._dialect

    def is_served(self, dialect: Dialect, operation: str = "submit") -> bool:
        return dialect.api_version in self._versions(dialect.group, operation)

    def _versions(self, group: str, operation: str) -> list[str]:
        try:
            found = self.jobs.client.get(f"/apis/{group}", f"API group {group}", operation)
        except RunNotFound:
            return []
        return [str(each["groupVersion"]) for each in found.get("versions") or ()]

    def find(self, namespace: str, name: str, operation: str = "status") -> Object | None:
        """The AppWrapper of a run; None if the cluster has none of this name, or if it is not one of Atoll."""
        path = self.dialect(operation).path(namespace, name)
        try:
            found = self.jobs.client.get(path, f"AppWrapper `{name}`", operation)
        except RunNotFound:
            return None
        return None if context_of(found) is None else found

    def of_atoll(self, namespace: str) -> list[Object]:
        """Every AppWrapper with Atoll's label."""
        query = {"labelSelector": f"{MANAGED_BY}={MANAGER}"}
        return self.jobs.client.list(
            self.dialect("sweep").path(namespace), "AppWrappers of Atoll", "sweep", query=query
        )

    def look(self, namespace: str, name: str, operation: str = "status") -> Snapshot:
        """What the cluster says about the run now: AppWrapper, Job, pods, and queue."""
        wrapper, job = self.heads(namespace, name, operation)
        pods = self.jobs.orphans(namespace, name, operation)
        return Snapshot(wrapper, job, pods, queue=self.queue(wrapper), now=self._clock.time())

    def heads(self, namespace: str, name: str, operation: str = "status") -> tuple[Object | None, Object | None]:
        """The AppWrapper and its Job."""
        wrapper = self.find(namespace, name, operation)
        job = self.jobs.of_run(namespace, name, operation)
        if wrapper is not None and job is None and WrapperView.of(wrapper).phase is Phase.DISPATCHED:
            wrapper = self.find(namespace, name, operation)  # it may have given up between the two requests
        return wrapper, job

    def queue(self, wrapper: Object | None) -> Any:
        """What Kueue says; None if the AppWrapper has no queue, or is over and the store has the attempts of its
        replicas. Of a program of the image only Kueue knows the attempts that it stopped."""
        if wrapper is None or not queue_of(wrapper):
            return None
        is_over = WrapperView.of(wrapper).phase in (Phase.SUCCEEDED, Phase.FAILED)
        if is_over and not runs_own_program(components_of(wrapper)):
            return None
        return self.jobs.queues.state(wrapper, with_position=not is_over)

    def status_of(self, seen: Snapshot, replicas: int) -> RunStatus:
        """The status; events and logs are read only if they can explain it. What would be lost is kept."""
        seen = self.explained(seen, replicas)
        self._keep(seen, replicas)
        return wrapper_status(seen, replicas=replicas)

    def explained(self, seen: Snapshot, replicas: int) -> Snapshot:
        """The same with the events and the last lines that say more than the objects do."""
        if seen.job is None or seen.wrapper is None:
            return seen
        is_waiting = any(map(may_have_events, wrapper_status(seen, replicas=replicas).replicas))
        pods = newest_pods(seen.job_pods, replicas)
        unclear = [pod for _, pod in sorted(pods.items()) if needs_log(pod, seen.job)]
        events = self.jobs.events(dict(seen.job)) if is_waiting else ()
        return replace(seen, events=events, log_tails=self.jobs.tails(unclear))

    def _keep(self, seen: Snapshot, replicas: int) -> None:
        """Keep how the attempt failed before the controller deletes its pods, and wake the controller."""
        if not self._may_annotate or not notes_to_keep(seen, replicas, {}):
            return
        assert seen.wrapper is not None
        self.annotate(seen.wrapper, notes_to_keep(seen, replicas, self.last_lines(seen, replicas)))

    def last_lines(self, seen: Snapshot, replicas: int) -> dict[int, str]:
        """The last lines of some ranks of an attempt that has failed, by rank: first of those that failed."""
        rows = ended_rows(seen, replicas)
        named = {row.native_id: row for row in (rows.replicas if rows else ())}
        pods = [pod for pod in seen.job_pods if pod["metadata"]["name"] in named]
        pods.sort(key=lambda pod: named[pod["metadata"]["name"]].state is not ReplicaState.FAILED)
        return {named[name].rank: text for name, text in self.jobs.tails(pods).items() if text}

    # Writing.

    def create(self, wrapper: Mapping[str, Any], namespace: str, run_id: str) -> tuple[Object, bool]:
        """Create the AppWrapper, or adopt the one that an earlier request of ours created; see `Jobs.create`.

        `Conflict` if another object has the name of something inside: the controller would delete that object.
        """
        if self.jobs.same(wrapper, namespace, "submit") is None and (taken := self.taken(wrapper, namespace)):
            raise Conflict(run_id, taken)
        return self.jobs.create(wrapper, namespace, run_id)

    def taken(self, wrapper: Mapping[str, Any], namespace: str) -> list[str]:
        """Objects of others that have the name of something inside."""
        found = []
        for each in components_of(wrapper):
            there = self.jobs.same(each, namespace, "submit")
            if there is not None and (token_of(each) is None or token_of(there) != token_of(each)):
                name = each["metadata"]["name"]
                found.append(
                    f"{each['kind']} `{name}` in namespace `{namespace}` is there already, and is not of this run"
                )
        return found

    def annotate(self, wrapper: Mapping[str, Any], annotations: Mapping[str, str | None]) -> None:
        """Write annotations, which also wakes the controller. Without the permission it is left out."""
        metadata = wrapper["metadata"]
        path = self.dialect().path(metadata["namespace"], metadata["name"])
        body = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
        what = f"annotations of AppWrapper `{metadata['name']}`"
        try:
            self.jobs.client.call("PATCH", path, what, "status", body=body, content_type=MERGE_PATCH, tries=1)
        except (BackendError, ConfigError) as exc:
            log.info("%s", exc.message)
            self._may_annotate = exc.reason != "forbidden"

    # Deleting.

    def delete(self, wrapper: Mapping[str, Any]) -> None:
        """Request the deletion of exactly this AppWrapper and of everything inside."""
        self._deleted.add(_uid(wrapper))
        self.jobs.delete(wrapper, "Background")

    def has_deleted(self, uid: str) -> bool:
        """Whether this process has deleted the AppWrapper."""
        return uid in self._deleted

    def wait_until_gone(
        self,
        wrapper: Mapping[str, Any] | None,
        namespace: str,
        name: str,
        limit: Deadline,
        *,
        job: Mapping[str, Any] | None = None,
    ) -> list[Object]:
        """Wait until the AppWrapper, its Job and its pods are gone. Returns what is left at the deadline. With `job`,
        a Job of the same name that was created later does not count.

        On MCAD the AppWrapper is gone at once, and its pods end later. On v1beta2 it is the last, after a pause of the
        controller, which a note ends. A controller that is down does not delete the Job: then it is deleted here.
        """
        pauses, has_poked = backoff(0.1, factor=1.5, cap_s=1.0), False
        silence, has_deleted = Deadline(SILENT_S, self._clock), False
        while True:
            there = None if wrapper is None else self.find(namespace, name, "cancel")
            is_there = there is not None and wrapper is not None and _uid(there) == _uid(wrapper)
            left: list[Object] = self.jobs.orphans(namespace, name, "cancel") if job is None else self.jobs.pods(job)
            inside = self.jobs.of_run(namespace, name, "cancel")
            if job is not None and inside is not None and _uid(inside) != _uid(job):
                inside = None
            if not (is_there or left or inside):
                return []
            if limit.is_past:
                return left or [each for each in (inside, there) if each is not None]
            if is_there and there is not None and not left and inside is None and not has_poked:
                self.annotate(there, {POKE: "deleted"})
                has_poked = True
            if inside is not None and silence.is_past and not has_deleted:
                self._delete_inside(inside)
                has_deleted = True
            limit.sleep(next(pauses))

    def _delete_inside(self, job: Object) -> None:
        """Delete a Job that its controller should have deleted. Without the permission it is left."""
        if job["metadata"].get("deletionTimestamp"):
            return
        log.warning("Job `%s` is deleted here: its controller, which may be down, has not done it", name_of(job))
        try:
            self.jobs.delete(job)
        except (BackendError, ConfigError) as exc:
            log.warning("%s", exc.message)


def fixed_dialect(setting: str) -> Dialect | None:
    """The dialect of a setting; None if the cluster decides."""
    return DIALECTS.get(setting)


def _uid(thing: Mapping[str, Any]) -> str:
    return str(thing["metadata"]["uid"])
