"""The only loop that waits for a run. The status function and the clock are injected.

With a deadline, each status is read in a thread of its own, so that a service or a store that does not answer,
throttles or repeats itself cannot delay the end of the wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from atoll._threads import Unanswered, answer_within
from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.errors import AtollError, WaitTimeout
from atoll.executors.base import Executor, RunWatch, Watcher
from atoll.handle import RunHandle
from atoll.status import ReplicaState, RunStatus

log = logging.getLogger("atoll.runs")

OnDeadline = Literal["leave", "cancel"]

_FIRST_S, _LONGEST_S = 0.02, 2.0
_LEAST_READING_S = 0.5
"""The time that a reading has even if the deadline is nearer, so that `wait(0)` returns when the run has ended."""
_LOST_S = 3.0
"""How long a replica has to be lost to be taken for lost. A cancel by another process records itself only when the
replicas are gone."""
_MAX_OUTAGE_S = 300.0
"""The longest outage that is retried: replicas survive shorter ones, so a waiting process should, too."""


def wait(
    status: Callable[[], RunStatus],
    *,
    timeout_s: float | None = None,
    ranks: Collection[int] | None = None,
    fail_fast: bool = False,
    on_change: Callable[[RunStatus], None] | None = None,
    on_trouble: Callable[[AtollError | None], None] | None = None,
    pause: Callable[[float], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> RunStatus:
    """Return the status when the run, or each of these `ranks`, has ended.

    With `fail_fast`, return as soon as one replica has failed. `pause` sleeps between two readings, for at most the
    given time: see `watching`.

    Raises `WaitTimeout` with the last status if the deadline passes first, also while a reading takes longer. Errors
    that are `retryable` are retried for five minutes; `on_trouble` is called with each of them, and with None after
    the next success.
    """
    deadline, outage = Deadline(timeout_s, clock), _Outage(on_trouble, clock)
    pauses = backoff(_FIRST_S, cap_s=_LONGEST_S)
    last: RunStatus | None = None

    def read() -> RunStatus:
        return status() if timeout_s is None else answer_within(max(deadline.remaining_s, _LEAST_READING_S), status)

    while True:
        now: RunStatus | None
        try:
            now = read()
            if last is not None and _lost(now) - _lost(last):
                clock.sleep(min(_LOST_S, deadline.remaining_s))
                now = read()
            outage.end()
        except Unanswered:
            raise timed_out(deadline, last) from None
        except AtollError as exc:
            if not outage.should_retry(exc):
                raise
            now = last
        if now is not None and now != last:
            if last is None or now.counts() != last.counts():
                log.info("the run is now %s", counts_text(now))
                pauses = backoff(_FIRST_S, cap_s=_LONGEST_S)  # changes of state come in groups; heartbeats do not
            last = now
            if on_change is not None:
                on_change(now)
        if now is not None and (_is_over(now, ranks) or (fail_fast and _has_failed(now))):
            return now
        if deadline.is_past:
            raise timed_out(deadline, now)
        pause_s = next(pauses)
        log.debug("ask again in %.2f s", pause_s)
        (pause or clock.sleep)(min(pause_s, deadline.remaining_s))


@contextmanager
def watching(executor: Executor, handle: RunHandle, clock: Clock = SYSTEM_CLOCK) -> Iterator[RunWatch]:
    """The executor's own watch of a run, or one that reads the status and sleeps."""
    if isinstance(executor, Watcher):
        with executor.watch(handle) as watch:
            yield watch
    else:
        yield _Polling(executor, handle, clock)


class _Polling:
    """Reads the status each time it is asked for."""

    def __init__(self, executor: Executor, handle: RunHandle, clock: Clock) -> None:
        self._executor, self._handle, self._clock = executor, handle, clock

    def status(self) -> RunStatus:
        return self._executor.status(self._handle)

    def wait(self, seconds: float) -> None:
        self._clock.sleep(seconds)


class _Outage:
    """How long there was no status, reported to a callback."""

    def __init__(self, report: Callable[[AtollError | None], None] | None, clock: Clock) -> None:
        self._report, self._clock = report or (lambda _: None), clock
        self._until: float | None = None

    def should_retry(self, error: AtollError) -> bool:
        """Whether to ask for the status again after this error; reports it."""
        now = self._clock.monotonic()
        self._until = now + _MAX_OUTAGE_S if self._until is None else self._until
        if not getattr(error, "retryable", False) or now >= self._until:
            return False
        log.debug("no status: %s; ask again", error.code)
        self._report(error)
        return True

    def end(self) -> None:
        """There is a status again."""
        if self._until is not None:
            self._until = None
            self._report(None)


def timed_out(deadline: Deadline, last: RunStatus | None) -> WaitTimeout:
    """The error of a wait whose deadline passed, with the last status that was read."""
    found = counts_text(last) if last else "no status could be read"
    return WaitTimeout(f"not over after {deadline.timeout_s:g} s: {found}", status=last)


def counts_text(status: RunStatus) -> str:
    """Such as `3 running, 1 failed`."""
    return ", ".join(f"{n} {state}" for state, n in status.counts().items())


def _is_over(status: RunStatus, ranks: Collection[int] | None) -> bool:
    return all(r.state.is_terminal for r in status.replicas if ranks is None or r.rank in ranks)


def _lost(status: RunStatus) -> set[int]:
    return {r.rank for r in status.replicas if r.state is ReplicaState.LOST}


def _has_failed(status: RunStatus) -> bool:
    return any(r.state in (ReplicaState.FAILED, ReplicaState.LOST, ReplicaState.CANCELLED) for r in status.replicas)
