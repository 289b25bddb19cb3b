"""The only waiting loop for runs. Works over anything that can say how a run is doing; the clock is injected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.errors import AtollError, WaitTimeout
from atoll.status import ReplicaState, RunStatus

log = logging.getLogger("atoll.runs")

OnDeadline = Literal["leave", "cancel"]

_FIRST_S, _LONGEST_S = 0.02, 2.0
_PATIENCE_S = 300.0
"""How long nobody may answer: replicas live through shorter outages, and so should whoever waits for them."""


def wait(
    status: Callable[[], RunStatus],
    *,
    timeout_s: float | None = None,
    fail_fast: bool = False,
    on_change: Callable[[RunStatus], None] | None = None,
    on_trouble: Callable[[AtollError | None], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> RunStatus:
    """Return the status once the run is over; with `fail_fast`, as soon as one replica has failed.

    Raises `WaitTimeout` when the deadline passes first. A backend or store that is out of reach is asked again for
    some minutes; `on_trouble` is told of each time in vain, and with None that there are answers again.
    """
    deadline, trouble = Deadline(timeout_s, clock), _Trouble(on_trouble, clock)
    pauses = backoff(_FIRST_S, cap_s=_LONGEST_S)
    last: RunStatus | None = None
    while True:
        now: RunStatus | None
        try:
            now = status()
            trouble.is_over()
        except AtollError as exc:
            if not trouble.may_pass(exc):
                raise
            now = last
        if now is not None and now != last:
            if last is None or now.counts() != last.counts():
                log.info("the run is now %s", counts_text(now))
                pauses = backoff(_FIRST_S, cap_s=_LONGEST_S)  # a change of state is seldom alone; a heartbeat is
            last = now
            if on_change is not None:
                on_change(now)
        if now is not None and (now.is_terminal or (fail_fast and _has_failed(now))):
            return now
        if deadline.is_past:
            raise WaitTimeout(f"still going after {timeout_s:g} s: {counts_text(now) if now else 'unknown'}")
        pause_s = next(pauses)
        log.debug("ask again in %.2f s", pause_s)
        deadline.sleep(pause_s)


class _Trouble:
    """For how long nobody has answered, and whoever wants to know of it."""

    def __init__(self, tell: Callable[[AtollError | None], None] | None, clock: Clock) -> None:
        self._tell, self._clock = tell or (lambda _: None), clock
        self._until: float | None = None

    def may_pass(self, error: AtollError) -> bool:
        """Whether to ask again after this."""
        now = self._clock.monotonic()
        self._until = now + _PATIENCE_S if self._until is None else self._until
        if not getattr(error, "retryable", False) or now >= self._until:
            return False
        log.debug("no status: %s; ask again", error.code)
        self._tell(error)
        return True

    def is_over(self) -> None:
        if self._until is not None:
            self._until = None
            self._tell(None)


def counts_text(status: RunStatus) -> str:
    """Such as `3 running, 1 failed`."""
    return ", ".join(f"{n} {state}" for state, n in status.counts().items())


def _has_failed(status: RunStatus) -> bool:
    return any(r.state in (ReplicaState.FAILED, ReplicaState.LOST, ReplicaState.CANCELLED) for r in status.replicas)
