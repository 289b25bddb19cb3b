"""Requests as the protocol makes them: counted, tried again while the store is unavailable, and checked when read.

The protocol asks, a driver answers: every store request of a round is a value yielded by a generator.

So the protocol is plain code without threads, clocks or sockets, and a test can run many replicas in one thread,
switching between any two requests. That includes reading an object piece by piece: `Open` begins it, and only the
driver, with `Read`, takes bytes from what was opened. `drive` is the driver for real life; tests have their own.
A request that fails raises at its `yield`.

The driver for real life: answers a protocol's requests with a store, a clock and a few threads.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, TypeVar

from atoll._time import Clock, backoff
from atoll.errors import CorruptUpdate, KeyExists, KeyNotFound, StoreUnavailable
from atoll.rounds.timeline import Timeline
from atoll.stores.base import Buffer, Data, Store
from atoll.stores.fast import Body, open_body, recycles, size_of

T = TypeVar("T")


@dataclass(frozen=True)
class Get:
    """Answered with the object."""

    key: str


@dataclass(frozen=True)
class Open:
    """Answered with the object's `Body`. The protocol closes it; only a `Read` takes bytes from it."""

    key: str


@dataclass(frozen=True)
class Read:
    """Take bytes from opened objects: answered with what `take` returns.

    `take` reads no less than the front of a frame or the payloads of a chunk, so that compiled code can read, check
    and add them up in one call.
    """

    take: Callable[[], Any]


@dataclass(frozen=True)
class Put:
    key: str
    data: Data


@dataclass(frozen=True)
class Create:
    key: str
    data: Data


@dataclass(frozen=True)
class List:
    """Answered with a list of keys."""

    prefix: str


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Discard:
    """Nobody needs this object any more: a store that can use its space again takes it, others do nothing."""

    key: str


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Gather:
    """Run the children side by side, at most `width` at once; answered with their results, in order.

    The first error of a child is raised here, after every child has ended.
    """

    children: Sequence[Steps[Any]]
    width: int


Request: TypeAlias = Get | Open | Read | Put | Create | List | Delete | Discard
Op: TypeAlias = Request | Sleep | Gather
Steps: TypeAlias = Generator[Op, Any, T]
"""A piece of protocol that ends with a T."""


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


class _GatherState:
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


class ThreadedDriver:
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
        crowd = _GatherState(op.children)
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

    def _work(self, crowd: _GatherState, depth: int) -> None:
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


class StoreIO:
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
