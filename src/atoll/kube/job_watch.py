"""The status of a run from its Job and pods: read once, or again and again while a process waits for the run."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from types import TracebackType
from typing import Any

from atoll._time import Clock
from atoll.kube.coscheduling import group_of
from atoll.kube.jobs import Jobs, Object
from atoll.kube.pod_state import needs_log
from atoll.kube.reading import JobView, has_outcomes, newest_pods, run_status
from atoll.kube.watch import Changes
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

_LEAST_PAUSE_S = 0.1
"""Between two statuses, also while one change follows the other: N pods that start are not N statuses."""
_EXPLAINED_BY_EVENTS = (Reason.WAITING, Reason.STARTING, Reason.RESTARTING)


def status_of(jobs: Jobs, job: Object | None, pods: Sequence[Object], replicas: int) -> RunStatus:
    """The status; the queue, events and logs are read only if they can explain it."""
    if job is None:
        return run_status(job, pods, replicas=replicas)
    view = JobView.of(job, replicas)
    queue = jobs.queues.state(job) if view.is_suspended and not view.is_deleted else None
    status = run_status(job, pods, replicas=replicas, queue=queue)
    is_in_group = any(map(group_of, pods))
    is_waiting = queue is None and any(may_have_events(row, is_in_group=is_in_group) for row in status.replicas)
    unclear = [pod for _, pod in sorted(newest_pods(pods, replicas).items()) if needs_log(pod, job)]
    events = jobs.events(job) if is_waiting else ()
    is_counted = not (status.is_terminal and has_outcomes(job))
    evictions = jobs.queues.evictions(job, may_ask=is_counted and not is_waiting) if queue is None else 0
    if not (is_waiting or unclear or evictions):
        return status
    tails = jobs.tails(unclear)
    return run_status(job, pods, replicas=replicas, events=events, log_tails=tails, queue=queue, evictions=evictions)


def may_have_events(row: ReplicaStatus, *, is_in_group: bool = False) -> bool:
    """Whether an event may say more about this rank than its pod does. In a PodGroup another pod may say it."""
    is_rejected = is_in_group and row.reason is Reason.UNSCHEDULABLE
    return row.state is ReplicaState.PENDING and (row.reason in _EXPLAINED_BY_EVENTS or is_rejected)


class JobWatch:
    """The status of one run while a process waits for it. Each status reads the Job.

    The pods are listed again only if the Job has another version, or if the watch of the pods has seen a change or does
    not work. So a change is noticed at the next status even if a watch is dead: Kubernetes counts the states of pods in
    the Job.
    """

    def __init__(self, jobs: Jobs, namespace: str, name: str, replicas: int, clock: Clock) -> None:
        self._jobs, self._namespace, self._name, self._replicas, self._clock = jobs, namespace, name, replicas, clock
        self._changes: Changes | None = None
        self._lock, self._is_closed = Lock(), False
        """A status that was not awaited may still be read in another thread when the watch is closed."""
        self._version: Any = None
        self._pods: list[Object] = []

    def __enter__(self) -> JobWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._replace_changes(None)

    def status(self) -> RunStatus:
        job = self._jobs.of_run(self._namespace, self._name)
        if job is None:
            orphans = self._jobs.orphans(self._namespace, self._name)
            return status_of(self._jobs, None, orphans, self._replicas)
        self._read_pods(job)
        return status_of(self._jobs, job, self._pods, self._replicas)

    def wait(self, seconds: float) -> None:
        if self._changes is None:
            self._clock.sleep(seconds)
            return
        least_s = min(seconds, _LEAST_PAUSE_S)
        self._clock.sleep(least_s)
        self._changes.wait(seconds - least_s)

    def _read_pods(self, job: Object) -> None:
        """List the pods unless nothing has changed."""
        version = (job["metadata"]["uid"], job["metadata"]["resourceVersion"])
        if self._version is None or self._version[0] != version[0]:
            self._replace_changes(self._jobs.pod_changes(job))
        changes = self._changes
        if changes is not None and self._version == version and changes.is_quiet:
            return
        if changes is not None:
            changes.listing()
        self._version = (version[0], None)  # if the list fails, the next status lists again
        self._pods, listed = self._jobs.listed_pods(job)
        self._version = version
        if changes is not None:
            changes.listed(listed)

    def _replace_changes(self, changes: Changes | None) -> None:
        with self._lock:
            before, self._changes = self._changes, changes
            to_close = [each for each in (before, changes if self._is_closed else None) if each is not None]
        for each in to_close:
            each.close()
