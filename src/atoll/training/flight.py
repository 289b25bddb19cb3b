"""A round under way in the background: one thread that does one thing after the other and can be stopped.

Stopping works where a round waits, and before each piece it reads or writes; it takes no longer than the requests
that are under way. The thread ends with the process, whatever it waits for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

from atoll._time import SYSTEM_CLOCK
from atoll.rounds.codec import F32
from atoll.rounds.vectors import Parts

T = TypeVar("T")
_WAKE_S = 0.5
_Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]


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


class Background:
    """The thread. Made when it is first needed; a blocking loop never needs it."""

    def __init__(self, clock: StoppableClock) -> None:
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Have it done after all that was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="atoll-flight", daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._jobs.put((action, result))
        return result

    def close(self, *, stop: bool) -> None:
        """Wait until all that was submitted is done, or, with `stop`, until it has been given up."""
        if self._thread is None:
            return
        if stop:
            self._clock.stop()
        self._jobs.put(None)
        self._thread.join()
        self._thread = None
        self._clock.go_on()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            action, result = job
            try:
                self._clock.check()
                value = action()
            except BaseException as exc:  # noqa: BLE001 - whoever waits for it gets it
                result.set_exception(exc)
            else:
                result.set_result(value)
            del job, action, result  # or the last arrays would stay alive while the thread waits for the next


def awaited(pending: Future[T]) -> T:
    """The result, once it is there. Wakes up now and then: a signal that comes just before a wait without an end
    begins is not heard before it is over."""
    while not wait([pending], _WAKE_S).done:
        pass
    return pending.result()


def done(action: Callable[[], T]) -> Future[T]:
    """The result, or the error, of doing it here and now."""
    result: Future[T] = Future()
    try:
        result.set_result(action())
    except Exception as exc:  # noqa: BLE001 - whoever asks for the result gets it
        result.set_exception(exc)
    return result
