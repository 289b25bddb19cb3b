"""Calls in daemon threads: a caller can stop waiting for an answer, and a call that hangs does not delay the exit.

The pools of `concurrent.futures` would: the interpreter joins them when it exits. Only `brought_to_its_end` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


_MOST_S = 1e8
"""The operating system refuses to wait for much longer."""


class Unanswered(Exception):
    """The call did not return in time. It continues in its thread, and its answer is dropped."""


def in_background(call: Callable[[], R], *, is_daemon: bool = True) -> Future[R]:
    """Start the call in a thread."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001  the caller of `result` gets it
            future.set_exception(exc)

    Thread(target=run, daemon=is_daemon, name="atoll-call").start()
    return future


def brought_to_its_end(call: Callable[[], R]) -> R:
    """What the call returns or raises. If the caller is interrupted, the process exits only after the call.

    For steps of which the first without the last does harm, such as delete and create again.
    """
    return in_background(call, is_daemon=False).result()


def answer_within(seconds: float | None, call: Callable[[], R]) -> R:
    """What the call returns or raises. `Unanswered` if that takes longer; with None, it may take any time."""
    future = in_background(call)
    wait_for([future], timeout=None if seconds is None else min(seconds, _MOST_S))
    if not future.done():
        raise Unanswered
    return future.result()


def map_in_background(call: Callable[[T], R], items: Sequence[T], *, most: int) -> list[R]:
    """`call(item)` for each item, at most `most` at once. Raises the first error in the order of the items."""
    queue: SimpleQueue[tuple[T, Future[R]]] = SimpleQueue()
    futures: list[Future[R]] = [Future() for _ in items]
    for pair in zip(items, futures, strict=True):
        queue.put(pair)

    def run() -> None:
        for item, future in _until_empty(queue):
            try:
                future.set_result(call(item))
            except BaseException as exc:  # noqa: BLE001  raised below
                future.set_exception(exc)

    for _ in range(min(most, len(items))):
        Thread(target=run, daemon=True, name="atoll-call").start()
    return [future.result() for future in futures]


def _until_empty(queue: SimpleQueue[R]) -> Iterator[R]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
