"""Ends a run whose replicas wait for too long, while a process waits for it. `Run.wait` calls this at each reading.

Kubernetes has a limit for waiting and running together, and none for waiting alone.
"""

from __future__ import annotations

from atoll._time import Clock
from atoll.executors.base import Executor, QueueLimiter
from atoll.handle import RunHandle
from atoll.status import ReplicaState, RunStatus

_LATE = "cancelled because replicas waited for longer than their limit"
_NEVER = "cancelled because replicas can never start"


class WaitedTooLong(Exception):
    """Why the run is to be ended: a replica has waited for too long, or can never start."""


class QueueLimit:
    """Asks the executor how long replicas may wait, again only when that time is over, or when they wait for something
    else."""

    def __init__(self, executor: Executor, handle: RunHandle | None, clock: Clock) -> None:
        self._executor, self._handle, self._clock = executor, handle, clock
        self._ask_at, self._known = float("-inf"), ""

    def checked(self, status: RunStatus) -> RunStatus:
        """The same status. Raises `WaitedTooLong` if a replica of it has waited for too long."""
        waiting = [row for row in status.replicas if row.state is ReplicaState.PENDING]
        now = self._clock.monotonic()
        if self._handle is None or not waiting or not isinstance(self._executor, QueueLimiter):
            return status
        first = waiting[0]
        text = first.message or str(first.reason)
        if now < self._ask_at and text == self._known:
            return status
        left_s = self._executor.queue_left_s(self._handle)
        if left_s <= 0:
            why = _NEVER if left_s == float("-inf") else _LATE
            raise WaitedTooLong(f"{why}; rank {first.rank}: {text}")
        self._ask_at, self._known = now + left_s, text
        return status
