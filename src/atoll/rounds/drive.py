"""The driver for real life: answers a protocol's requests with a store, a clock and a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import Any, TypeVar

from atoll._time import Clock
from atoll.rounds.ops import Create, Delete, Discard, Gather, Get, List, Op, Open, Put, Read, Request, Sleep, Steps
from atoll.stores.base import Store
from atoll.stores.fast import open_body, recycles

T = TypeVar("T")
_MANY = 1024
"""Threads start only when they are needed, so this is no cost."""


def answer(store: Store, request: Request) -> Any:
    """Do one request."""
    match request:
        case Get(key):
            return store.get(key)
        case Open(key):
            return open_body(store, key)
        case Read(take):
            return take()
        case Put(key, data):
            return store.put(key, data)
        case Create(key, data):
            return store.create(key, data)
        case List(prefix):
            return list(store.list(prefix))
        case Delete(key):
            return store.delete(key)
        case Discard(key):
            return store.delete(key) if recycles(store) else None


class _GivenUp(Exception):
    """Nobody wants to know any more what comes of this."""


class _Crowd:
    """The children of one `Gather`: who is next, what came of them, and whether one has failed."""

    def __init__(self, children: Sequence[Steps[Any]]) -> None:
        self.children = children
        self.answers: list[Any] = [None] * len(children)
        self._next = count()
        self._errors: dict[int, BaseException] = {}

    def take(self) -> int | None:
        """The number of a child nobody has taken; None when there is none, or there is no point any more."""
        number = next(self._next)  # one step, also between threads
        return number if number < len(self.children) and not self._errors else None

    def fail(self, number: int, error: BaseException) -> None:
        self._errors[number] = error

    def results(self) -> list[Any]:
        """In order; the first error is raised instead, and children that never began are closed."""
        if self._errors:
            for child in self.children:
                child.close()
            raise self._errors[min(self._errors)]
        return self.answers


class Driver:
    """Runs protocols to their end, blocking; several threads may each run one.

    One pool for each depth of gathering, and none with a limit that could be reached: a child that waits for others
    must never keep the thread that one of them needs. How much goes on at once is the protocol's own choice.

    Whoever is interrupted (Ctrl-C, SIGTERM) does not wait for its helpers. They give up before their next request.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._pools: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()
        self._is_given_up = False
        self._left: list[Future[None]] = []
        """Helpers of those who were interrupted."""

    def __call__(self, steps: Steps[T]) -> T:
        if self._is_given_up:
            wait(self._left)
            self._left.clear()
            self._is_given_up = False
        return self._run(steps, depth=0)

    def close(self) -> None:
        self._is_given_up = True
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        self._pools.clear()

    def _run(self, steps: Steps[T], depth: int) -> T:
        give: Callable[[], Op] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                op = give()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                reply = self._reply(op, depth)
            except BaseException as exc:  # noqa: BLE001 - the protocol decides what an error means
                give = _thrower(steps, exc)
            else:
                give = _sender(steps, reply)

    def _reply(self, op: Op, depth: int) -> Any:
        if self._is_given_up:
            raise _GivenUp
        if isinstance(op, Sleep):
            return self._clock.sleep(op.seconds)
        if isinstance(op, Gather):
            return self._gather(op, depth)
        return answer(self._store, op)

    def _gather(self, op: Gather, depth: int) -> list[Any]:
        """Some workers take child after child; the calling thread is one of them, so that few are woken up."""
        crowd = _Crowd(op.children)
        helpers = min(op.width, len(op.children)) - 1
        others = [self._pool(depth).submit(self._work, crowd, depth) for _ in range(helpers)]
        try:
            self._work(crowd, depth)
            for other in others:
                other.result()
        except BaseException:
            self._is_given_up = True
            self._left += others
            raise
        return crowd.results()

    def _work(self, crowd: _Crowd, depth: int) -> None:
        while (number := crowd.take()) is not None:
            try:
                crowd.answers[number] = self._run(crowd.children[number], depth + 1)
            except Exception as exc:  # noqa: BLE001 - raised by whoever gathers
                crowd.fail(number, exc)

    def _pool(self, depth: int) -> ThreadPoolExecutor:
        with self._lock:
            while len(self._pools) <= depth:
                self._pools.append(ThreadPoolExecutor(_MANY, thread_name_prefix="atoll-round"))
            return self._pools[depth]


def _sender(steps: Steps[Any], reply: Any) -> Callable[[], Op]:
    return lambda: steps.send(reply)


def _thrower(steps: Steps[Any], exc: BaseException) -> Callable[[], Op]:
    return lambda: steps.throw(exc)
