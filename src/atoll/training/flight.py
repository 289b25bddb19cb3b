"""How a round in the background is stopped: where it waits, and before each piece it reads or writes.

Stopping takes no longer than the requests that are under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from atoll._time import SYSTEM_CLOCK
from atoll.rounds.codecs.base import F32
from atoll.rounds.layout import Parts

T = TypeVar("T")


class Stopped(Exception):
    """This replica is ending; nobody waits for the round any more."""


class StoppableClock:
    """The real clock; sleeping ends with `Stopped` once it is stopped."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def time(self) -> float:
        return SYSTEM_CLOCK.time()

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        self._stop.set()

    def go_on(self) -> None:
        self._stop.clear()

    def check(self) -> None:
        """Raise `Stopped` if it is time to end."""
        if self._stop.is_set():
            raise Stopped


class StoppableParts(Parts):
    """An array as the source and the sink of a round that may be stopped."""

    def __init__(self, array: F32, clock: StoppableClock) -> None:
        super().__init__([array])
        self._clock = clock

    def read(self, start: int, stop: int) -> F32:
        self._clock.check()
        return super().read(start, stop)

    def write(self, start: int, values: F32) -> None:
        self._clock.check()
        super().write(start, values)


def done(action: Callable[[], T]) -> Future[T]:
    """The result, or the error, of doing it here and now."""
    result: Future[T] = Future()
    try:
        result.set_result(action())
    except Exception as exc:  # noqa: BLE001 - whoever asks for the result gets it
        result.set_exception(exc)
    return result
