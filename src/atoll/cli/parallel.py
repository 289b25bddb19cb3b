"""Asking many at once, for a bounded time: one that does not answer holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import TypeVar

from atoll._time import SYSTEM_CLOCK, Deadline

T = TypeVar("T")
R = TypeVar("R")


def ask_all(ask: Callable[[T], R], items: Sequence[T], *, within_s: float, workers: int = 8) -> list[R | None]:
    """The answers in the order of `items`; None where there was none in time. `ask` must not raise.

    The threads are daemons: a question that hangs does not keep the command from ending.
    """
    waiting: Queue[tuple[int, T]] = Queue()
    answered: Queue[tuple[int, R]] = Queue()
    for numbered in enumerate(items):
        waiting.put(numbered)
    for _ in range(min(workers, len(items))):
        threading.Thread(target=_work, args=(ask, waiting, answered), daemon=True).start()
    answers: list[R | None] = [None] * len(items)
    deadline = Deadline(within_s, SYSTEM_CLOCK)
    for _ in items:
        try:
            number, answer = answered.get(timeout=max(0.001, deadline.remaining_s))
        except Empty:
            break
        answers[number] = answer
    return answers


def _work(ask: Callable[[T], R], waiting: Queue[tuple[int, T]], answered: Queue[tuple[int, R]]) -> None:
    while True:
        try:
            number, item = waiting.get_nowait()
        except Empty:
            return
        answered.put((number, ask(item)))
