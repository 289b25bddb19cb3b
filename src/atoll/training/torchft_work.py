"""What the manager gives back for a tensor: a work to wait for, and a future whose callbacks have run by then."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Future:
    """The tensor once it is averaged. Callbacks run, in order, in the thread that waits, before waiting is over."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._next: list[tuple[Callable[[Future], Any], Future]] = []
        self._value: Any = None
        self._is_done = False

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """A future of what `callback` makes of this one."""
        following = Future(self._settle)
        if self._is_done:
            following.set_result(callback(self))
        else:
            self._next.append((callback, following))
        return following

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        self.then(callback)

    def wait(self) -> Any:
        self._settle()
        return self._value

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        return self._is_done

    def set_result(self, value: Any) -> None:
        """Called once, when the round is over."""
        self._value, self._is_done = value, True
        callbacks, self._next = self._next, []
        for callback, following in callbacks:
            following.set_result(callback(self))


class Work:
    """One tensor on its way. `settle` brings the whole round to its end, whichever work is waited for first."""

    def __init__(self, tensor: Tensor, settle: Callable[[], bool]) -> None:
        self.tensor = tensor
        self._settle = settle
        self._future = Future(settle)

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - torch's signature; the round has its own deadline
        """Whether the tensor now holds the mean. Never raises: the manager has the error."""
        return self._settle()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: object = None) -> None:
        self.wait(timeout)

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future:
        return self._future

    def finish(self) -> None:
        """The tensor is final."""
        if not self._future.done():
            self._future.set_result(self.tensor)


class Job(Generic[T]):
    """Something the background thread was asked to do."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.action = action
        self.result: futures.Future[T] = futures.Future()


class Background:
    """One thread that does one thing after the other. It ends with the process, whatever it waits for."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], T]) -> futures.Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        job = Job(action)
        self._jobs.put(job)
        return job.result

    def do(self, action: Callable[[], T]) -> T:
        """Have it done and wait; its error is raised here."""
        return self.submit(action).result()

    def close(self, *, wait: bool) -> None:
        """No more jobs; with `wait`, those that were asked for are done first."""
        if self._thread is not None:
            self._jobs.put(None)
            if wait:
                self._thread.join()


def _work_off(jobs: queue.SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            value = job.action()
        except BaseException as exc:  # noqa: BLE001 - whoever waits for the job gets it
            job.result.set_exception(exc)
        else:
            job.result.set_result(value)
        del job  # or the thread would keep the last tensors alive while it waits for the next
