"""A token bucket: so many calls a second, a few of them at once. Time is injected."""

from __future__ import annotations

from threading import Lock

from atoll._time import SYSTEM_CLOCK, Clock


class Pace:
    """Lets callers through at a rate; `wait` sleeps until it is one's turn."""

    def __init__(self, per_s: float, *, at_once: int = 2, clock: Clock = SYSTEM_CLOCK) -> None:
        self._per_s, self._at_once, self._clock = per_s, float(at_once), clock
        self._tokens, self._seen_at = float(at_once), clock.monotonic()
        self._lock = Lock()

    def wait(self) -> None:
        """Returns when the call may be made. Turns are given out in order, so nobody sleeps twice."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self._at_once, self._tokens + max(0.0, now - self._seen_at) * self._per_s) - 1.0
            self._seen_at = now
            pause = max(0.0, -self._tokens / self._per_s)
        if pause > 0.0:
            self._clock.sleep(pause)
