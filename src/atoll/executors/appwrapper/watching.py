"""The status of one run in an AppWrapper while a process waits for it."""

from __future__ import annotations

from threading import Lock
from types import TracebackType
from typing import Any

from atoll._time import Clock, Deadline
from atoll.errors import BackendError
from atoll.executors.appwrapper.reading import SILENT_S, Snapshot, may_be_created_again, replaced
from atoll.executors.appwrapper.wrappers import Wrappers
from atoll.kube.appwrapper import WrapperView
from atoll.kube.jobs import Object
from atoll.kube.reading import JobView
from atoll.kube.watch import Changes
from atoll.status import RunStatus

_LEAST_PAUSE_S = 0.1
"""Between two statuses, also while one change follows the other: N pods that start are not N statuses."""


class WrapperWatch:
    """Each status reads the AppWrapper and its Job. The pods are listed again only if one of the two has another
    version, or if the watch of the pods has seen a change or does not work.

    A process that waits for a run also ends what MCAD would start again without end.
    """

    def __init__(self, wrappers: Wrappers, namespace: str, name: str, replicas: int, clock: Clock) -> None:
        self._wrappers, self._namespace, self._name = wrappers, namespace, name
        self._replicas, self._clock = replicas, clock
        self._changes: Changes | None = None
        self._lock, self._is_closed = Lock(), False
        """A status that was not awaited may still be read in another thread when the watch is closed."""
        self._version: Any = None
        self._pods: list[Object] = []
        self._last: tuple[str, RunStatus] | None = None
        """The last AppWrapper that another process may delete and create again, and its status."""
        self._until: Deadline | None = None

    def __enter__(self) -> WrapperWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closed, changes = True, self._changes
        if changes is not None:
            changes.close()

    def status(self) -> RunStatus:
        wrapper, job = self._wrappers.heads(self._namespace, self._name)
        self._read_pods(wrapper, job)
        queue = self._wrappers.queue(wrapper)
        seen = Snapshot(wrapper, job, self._pods, queue=queue, now=self._clock.time())
        status = self._wrappers.status_of(seen, self._replicas)
        self._end_loop(wrapper, job, status)
        return self._unless_replaced(wrapper, status)

    def wait(self, seconds: float) -> None:
        if self._changes is None:
            self._clock.sleep(seconds)
            return
        least_s = min(seconds, _LEAST_PAUSE_S)
        self._clock.sleep(least_s)
        self._changes.wait(seconds - least_s)

    def _read_pods(self, wrapper: Object | None, job: Object | None) -> None:
        """List the pods unless nothing has changed."""
        version = [each and (each["metadata"]["uid"], each["metadata"]["resourceVersion"]) for each in (wrapper, job)]
        changes = self._opened()
        if changes is not None and self._version == version and changes.is_quiet:
            return
        if changes is not None:
            changes.listing()
        self._version = None  # if the list fails, the next status lists again
        self._pods, listed = self._wrappers.jobs.pods_named(self._namespace, self._name)
        self._version = version
        if changes is not None:
            changes.listed(listed)

    def _opened(self) -> Changes | None:
        with self._lock:
            if self._changes is None and not self._is_closed:
                self._changes = self._wrappers.jobs.named_pod_changes(self._namespace, self._name)
            return self._changes

    def _unless_replaced(self, wrapper: Object | None, status: RunStatus) -> RunStatus:
        """The status; a run on MCAD is not lost while another process may be starting it again, by delete and
        re-create."""
        if wrapper is not None:
            may_be_replaced = not status.is_terminal and may_be_created_again(wrapper)
            self._last = (str(wrapper["metadata"]["uid"]), status) if may_be_replaced else None
            self._until = None
        if wrapper is not None or self._last is None or not status.is_terminal:
            return status
        uid, last = self._last
        self._until = self._until or Deadline(SILENT_S, self._clock)
        return status if self._until.is_past or self._wrappers.has_deleted(uid) else replaced(last)

    def _end_loop(self, wrapper: Object | None, job: Object | None, status: RunStatus) -> None:
        """Delete an AppWrapper of MCAD that has failed with its Job: MCAD would dispatch it again, without end."""
        if wrapper is None or job is None or not status.is_terminal:
            return
        if WrapperView.of(wrapper).starts_again and JobView.of(job, self._replicas).failing:
            try:
                self._wrappers.delete(wrapper)
            except BackendError:  # the next reading tries again
                return
