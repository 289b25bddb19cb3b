"""The background thread of a trainer: it runs one job after the other while the caller's thread trains the model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_WAKE_S = 0.5
_Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]
_Jobs: TypeAlias = "queue.SimpleQueue[_Job | None]"


class Background:
    """One daemon thread, which starts with the first job."""

    def __init__(self, name: str, check: Callable[[], None] | None = None) -> None:
        """The thread calls `check` before each job; if it raises, the future of the job has that error."""
        self._name, self._check = name, check
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run the action after all earlier ones."""
        if self._thread is None:
            arguments = (self._jobs, self._check)
            self._thread = threading.Thread(target=_run_jobs, args=arguments, name=self._name, daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._jobs.put((action, result))
        return result

    def do(self, action: Callable[[], T]) -> T:
        """Run the action after all earlier ones, wait for it, and return its result or raise its error."""
        return awaited(self.submit(action))

    def rest(self) -> None:
        """Wait until every submitted job has ended. Only the future of a job raises its error."""
        if self._thread is not None:
            self.do(lambda: None)

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the last submitted job; with `wait`, return after that."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if wait:
                thread.join()


def _run_jobs(jobs: _Jobs, check: Callable[[], None] | None) -> None:
    while (job := jobs.get()) is not None:
        action, result = job
        try:
            if check is not None:
                check()
            value = action()
        except BaseException as exc:  # noqa: BLE001 - the future raises it
            result.set_exception(exc)
        else:
            result.set_result(value)
            del value
        del job, action, result  # or the last arrays would stay alive while the thread waits for the next job


def awaited(pending: Future[T]) -> T:
    """Wait for the result. The wait is in short pieces, because Python handles a signal that arrives just before an
    endless wait only after that wait."""
    while not wait([pending], _WAKE_S).done:
        pass
    return pending.result()
