"""Clocks, deadlines and pauses. Only this module calls `time.*` to wait; tests pass a fake clock."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    """The functions of `time` that code needs to wait."""

    def time(self) -> float:
        """Seconds since the epoch, for people and records; never for durations."""
        ...

    def monotonic(self) -> float:
        """Seconds that never decrease, for durations and deadlines."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()


class Deadline:
    """A point in monotonic time, or never."""

    def __init__(self, timeout_s: float | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else clock.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below zero; infinite when there is no deadline."""
        return float("inf") if self._at is None else max(0.0, self._at - self._clock.monotonic())

    @property
    def is_past(self) -> bool:
        return self.remaining_s == 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past the deadline."""
        self._clock.sleep(min(seconds, self.remaining_s))


def backoff(
    first_s: float, *, factor: float = 1.5, cap_s: float, jitter: float = 0.0, rng: random.Random | None = None
) -> Iterator[float]:
    """Growing pauses: `first_s`, times `factor` each, up to `cap_s`; `jitter=0.2` spreads each by ±20 %."""
    rng = rng or random.Random()
    pause = first_s
    while True:
        yield pause * (1 + rng.uniform(-jitter, jitter))
        pause = min(cap_s, pause * factor)
