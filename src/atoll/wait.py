"""The only waiting loop for runs. Works over anything that can say how a run is doing; the clock is injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.errors import AtollError, WaitTimeout
from atoll.status import ReplicaState, RunStatus

OnDeadline = Literal["leave", "cancel"]

_FIRST_S, _LONGEST_S = 0.02, 2.0
_MOST_FAILURES = 10


def wait(
    status: Callable[[], RunStatus],
    *,
    timeout_s: float | None = None,
    fail_fast: bool = False,
    on_change: Callable[[RunStatus], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> RunStatus:
    """Return the status once the run is over; with `fail_fast`, as soon as one replica has failed.

    Raises `WaitTimeout` when the deadline passes first. A backend that is briefly out of reach is asked again.
    """
    deadline = Deadline(timeout_s, clock)
    pauses, failures = backoff(_FIRST_S, cap_s=_LONGEST_S), 0
    last: RunStatus | None = None
    while True:
        now: RunStatus | None
        try:
            now = status()
            failures = 0
        except AtollError as exc:
            failures += 1
            if not getattr(exc, "retryable", False) or failures > _MOST_FAILURES:
                raise
            now = last
        if now is not None and now != last:
            if last is None or now.counts() != last.counts():
                pauses = backoff(_FIRST_S, cap_s=_LONGEST_S)  # a change of state is seldom alone; a heartbeat is
            last = now
            if on_change is not None:
                on_change(now)
        if now is not None and (now.is_terminal or (fail_fast and _has_failed(now))):
            return now
        if deadline.is_past:
            counts = ", ".join(f"{n} {state}" for state, n in now.counts().items()) if now else "unknown"
            raise WaitTimeout(f"still going after {timeout_s:g} s: {counts}")
        deadline.sleep(next(pauses))


def _has_failed(status: RunStatus) -> bool:
    return any(r.state in (ReplicaState.FAILED, ReplicaState.LOST, ReplicaState.CANCELLED) for r in status.replicas)
