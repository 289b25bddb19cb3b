"""The driver for real life: answers a protocol's requests with a store, a clock and a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from atoll._time import Clock
from atoll.rounds.ops import Create, Delete, Gather, Get, List, Op, Put, Request, Sleep, Steps
from atoll.stores.base import Store

T = TypeVar("T")


def answer(store: Store, request: Request) -> Any:
    """Do one request."""
    match request:
        case Get(key):
            return store.get(key)
        case Put(key, data):
            return store.put(key, data)
        case Create(key, data):
            return store.create(key, data)
        case List(prefix):
            return list(store.list(prefix))
        case Delete(key):
            return store.delete(key)


class Driver:
    """Runs protocols to their end, blocking; several threads may each run one.

    Two pools, because a child that gathers in turn would otherwise wait for the very threads it fills.
    """

    def __init__(self, store: Store, clock: Clock, *, connections: int = 8) -> None:
        self._store, self._clock, self._connections = store, clock, max(1, connections)
        self._pools: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()

    def __call__(self, steps: Steps[T]) -> T:
        return self._run(steps, depth=0)

    def close(self) -> None:
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
        if isinstance(op, Sleep):
            return self._clock.sleep(op.seconds)
        if isinstance(op, Gather):
            return self._gather(op, depth)
        return answer(self._store, op)

    def _gather(self, op: Gather, depth: int) -> list[Any]:
        assert depth < 2, "a child of a child gathers no further"
        if len(op.children) == 1 or op.width == 1 or self._connections == 1:
            return [self._run(child, depth + 1) for child in op.children]
        pool = self._pool(depth)
        waiting = iter(op.children)
        running: list[Future[Any]] = []
        results: list[Any] = []
        error: BaseException | None = None
        for child in waiting:
            running.append(pool.submit(self._run, child, depth + 1))
            if len(running) >= op.width:
                error = _take(running, results)
                if error is not None:
                    break
        for child in waiting:
            child.close()
        while running:
            error = _take(running, results, error)
        if error is not None:
            raise error
        return results

    def _pool(self, depth: int) -> ThreadPoolExecutor:
        with self._lock:
            while len(self._pools) <= depth:
                self._pools.append(ThreadPoolExecutor(self._connections, thread_name_prefix="atoll-round"))
            return self._pools[depth]


def _take(running: list[Future[Any]], results: list[Any], error: BaseException | None = None) -> BaseException | None:
    """Wait for the oldest child; return the first error so far."""
    failure = (first := running.pop(0)).exception()
    if failure is None:
        results.append(first.result())
    return error or failure


def _sender(steps: Steps[Any], reply: Any) -> Callable[[], Op]:
    return lambda: steps.send(reply)


def _thrower(steps: Steps[Any], exc: BaseException) -> Callable[[], Op]:
    return lambda: steps.throw(exc)
