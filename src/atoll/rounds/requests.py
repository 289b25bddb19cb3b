"""Requests as the protocol makes them: counted, tried again while the store is unavailable, and checked when read."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atoll._time import Clock, backoff
from atoll.errors import CorruptUpdate, KeyExists, KeyNotFound, StoreUnavailable
from atoll.rounds.ops import Create, Delete, Get, List, Open, Put, Read, Request, Sleep, Steps
from atoll.rounds.timeline import Timeline
from atoll.stores.base import Buffer, Data
from atoll.stores.fast import Body, size_of

T = TypeVar("T")

LEAST_PAUSE_S = 0.001


@dataclass
class Counters:
    """What a replica asked of the store: requests by verb, bytes each way, and seconds by phase."""

    requests: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    """GETs of keys that were not there yet."""
    retries: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: encode, put, wait, get, reduce. Phases that ran side by side are summed."""

    def since(self, earlier: Counters) -> Counters:
        """The difference to an earlier copy."""
        return Counters(
            self.requests - earlier.requests,
            self.misses - earlier.misses,
            self.retries - earlier.retries,
            self.bytes_up - earlier.bytes_up,
            self.bytes_down - earlier.bytes_down,
            {name: spent - earlier.seconds.get(name, 0.0) for name, spent in self.seconds.items()},
        )

    def copy(self) -> Counters:
        return self.since(Counters())


_VERBS: dict[type[Any], str] = {Get: "get", Open: "get", Put: "put", Create: "create", List: "list", Delete: "delete"}
_PHASES = {"get": "get", "list": "wait", "put": "put", "create": "put", "delete": "put"}


class Requests:
    """The store as generators. Shared by the children of a `Gather`, so counting is locked."""

    def __init__(self, clock: Clock, rng: random.Random, *, retry_s: float = 120.0, reread: int = 6) -> None:
        self.clock, self.rng = clock, rng
        self.counters = Counters()
        self._retry_s, self._reread = retry_s, reread
        self._lock = threading.Lock()
        self.timeline = Timeline(clock, self)
        self.is_cut_off = False
        """Whether the store was unavailable when it was last asked."""

    def counted(self) -> Counters:
        """A copy of the counters, also while requests are under way."""
        with self._lock:
            return self.counters.copy()

    def get(self, key: str) -> Steps[Buffer]:
        data: Buffer = yield from self._ask(Get(key))
        with self._lock:
            self.counters.bytes_down += memoryview(data).nbytes
        return data

    def probe(self, key: str, *, is_awaited: bool = True) -> Steps[Buffer | None]:
        """The object, or None while there is none. Unless it is awaited, finding none is no miss: it is good news."""
        try:
            return (yield from self.get(key))
        except KeyNotFound:
            with self._lock:
                self.counters.misses += is_awaited
            return None

    def open(self, key: str) -> Steps[Body | None]:
        """The object, to be read with `receive`; None while there is none. What fails on the way is not tried again."""
        try:
            body: Body = yield from self._ask(Open(key))
        except KeyNotFound:
            with self._lock:
                self.counters.misses += 1
            return None
        with self._lock:
            self.counters.bytes_down += body.size
        return body

    def receive(self, take: Callable[[], T]) -> Steps[T]:
        """What `take` makes of bytes that it reads from opened objects. An error is not tried again."""
        taken: T = yield Read(take)
        return taken

    def put(self, key: str, data: Data) -> Steps[None]:
        yield from self._ask(Put(key, data))
        self._count_up(data)

    def create(self, key: str, data: Data) -> Steps[bool]:
        """Whether the key was free. After an error on the way False may still mean that our own write won."""
        try:
            yield from self._ask(Create(key, data))
        except KeyExists:
            return False
        finally:
            self._count_up(data)
        return True

    def list(self, prefix: str) -> Steps[list[str]]:
        found: list[str] = yield from self._ask(List(prefix))
        return found

    def delete(self, key: str) -> Steps[None]:
        yield from self._ask(Delete(key))

    def read(self, key: str, parse: Callable[[Buffer], T], *, is_promised: bool = False) -> Steps[T]:
        """The object, parsed and checked. What fails a check is read again before the failure is believed.

        `is_promised`: another object says that this one is there, so its absence is doubted in the same way.
        """
        pauses = backoff(0.1, factor=2.0, cap_s=2.0, jitter=0.25, rng=self.rng)
        for left in reversed(range(self._reread)):
            try:
                return parse((yield from self.get(key)))
            except CorruptUpdate as exc:
                if not left:
                    exc.message = f"{exc.message} (`{key}`, read {self._reread} times)"
                    raise
            except KeyNotFound:
                if not left or not is_promised:
                    raise
            yield from self.sleep(next(pauses))
        raise AssertionError("unreachable")

    def sleep(self, seconds: float) -> Steps[None]:
        """Wait; counted as waiting. Never so short that a clock might not move."""
        asked = self.clock.monotonic()
        yield from self.timeline.use_pause(self)
        began = self.clock.monotonic()
        yield Sleep(max(seconds - (began - asked), LEAST_PAUSE_S))
        self.spend("wait", began)

    def spend(self, phase: str, began: float, ended: float | None = None) -> None:
        """A phase that began then (by the clock's `monotonic`) has ended, now if nothing else is said."""
        ended = self.clock.monotonic() if ended is None else ended
        with self._lock:
            self.counters.seconds[phase] = self.counters.seconds.get(phase, 0.0) + ended - began
        self.timeline.add(phase, began, ended)

    def _ask(self, request: Request) -> Steps[Any]:
        verb = _VERBS[type(request)]
        began = self.clock.monotonic()
        pauses = backoff(0.1, factor=2.0, cap_s=10.0, jitter=0.5, rng=self.rng)
        while True:
            with self._lock:
                self.counters.requests[verb] += 1
            try:
                reply = yield request
                break
            except KeyNotFound:
                self.spend("wait", began)  # it was asked for too early
                raise
            except KeyExists:
                self.spend(_PHASES[verb], began)
                raise
            except StoreUnavailable as exc:
                self.is_cut_off = True
                if self.clock.monotonic() - began >= self._retry_s:
                    exc.message = f"{exc.message}; asked again for {self._retry_s:g} s, which is `Tuning(retry_s=…)`"
                    raise
                with self._lock:
                    self.counters.retries += 1
            yield Sleep(next(pauses))
        self.is_cut_off = False
        self.spend(_PHASES[verb], began)
        return reply

    def _count_up(self, data: Data) -> None:
        with self._lock:
            self.counters.bytes_up += size_of(data)
