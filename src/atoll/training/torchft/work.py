"""The result of `Manager.allreduce`: a work to wait for, and a future whose callbacks run before the wait returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Future:
    """The averaged tensor. Callbacks run in order, in the waiting thread, before its wait returns."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._next: list[tuple[Callable[[Future], Any], Future]] = []
        self._value: Any = None
        self._is_done = False

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """A future of the result of `callback(self)`."""
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
        """Called once, at the end of the round."""
        self._value, self._is_done = value, True
        callbacks, self._next = self._next, []
        for callback, following in callbacks:
            following.set_result(callback(self))


class Work:
    """One tensor of a round in progress. `settle` finishes the whole round, even if other works are unfinished."""

    def __init__(self, tensor: Tensor, settle: Callable[[], bool]) -> None:
        self.tensor = tensor
        self._settle = settle
        self._future = Future(settle)

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - torch's signature; the round has its own deadline
        """Finish the round; whether the tensor has the mean. Never raises: the manager keeps the error."""
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
        """Run the callbacks: the tensor is final."""
        if not self._future.done():
            self._future.set_result(self.tensor)
