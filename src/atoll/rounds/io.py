"""Store requests of the rounds: steps yield them as values, a driver performs them.

The steps of a round are generators without threads, clocks or sockets, so a test can run many replicas in one thread
and switch between any two requests. Reading an object piece by piece is a request too: `Open` begins it, and `Read`
takes bytes. A request that fails raises at its `yield`. `ThreadedDriver` runs steps with a store, a clock and a few
threads; tests have their own driver. `StoreIO` is what steps use: it counts, retries and checks requests.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger("atoll.rounds")

T = TypeVar("T")


@dataclass(frozen=True)
class Get:
    """Answered with the object."""

    key: str


@dataclass(frozen=True)
class Open:
    """Answered with the object's `Body`. The steps close it; only a `Read` takes bytes from it."""

    key: str


@dataclass(frozen=True)
class Read:
    """Read from opened objects: answered with the result of `take`.

    `take` reads at least the front of a frame or all payloads of a chunk, so that compiled code can read, check and
    add them up in one call.
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
    """No replica needs this object any more: a store that can recycle its space deletes it, others do nothing."""

    key: str


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Gather:
    """Run the children concurrently, at most `width` at once; answered with their results, in order.

    The first error of a child is raised here, after every child has ended.
    """

    children: Sequence[Steps[Any]]
    width: int


Request: TypeAlias = Get | Open | Read | Put | Create | List | Delete | Discard
Op: TypeAlias = Request | Sleep | Gather
Steps: TypeAlias = Generator[Op, Any, T]
"""A generator that yields requests and returns a T."""

_MOST_THREADS = 1024
"""Threads start only when they are needed, so a high limit costs nothing."""


def answer(store: Store, request: Request) -> Any:
    """Perform one request."""
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


class _Interrupted(Exception):
    """The caller was interrupted, so its helper threads stop before their next request."""


class _GatherState:
    """The children of one `Gather`: the next one to run, the results, and the errors."""

    def __init__(self, children: Sequence[Steps[Any]]) -> None:
        self.children = children
        self.answers: list[Any] = [None] * len(children)
        self._next = count()
        self._errors: dict[int, BaseException] = {}

    def take(self) -> int | None:
        """The number of the next child to run; None when there is none left, or one has failed."""
        number = next(self._next)  # atomic, so threads can share it
        return number if number < len(self.children) and not self._errors else None

    def fail(self, number: int, error: BaseException) -> None:
        self._errors[number] = error

    def results(self) -> list[Any]:
        """The results in order. If a child failed, closes the others and raises the first error."""
        if self._errors:
            for child in self.children:
                child.close()
            raise self._errors[min(self._errors)]
        return self.answers


class ThreadedDriver:
    """Runs steps to their end, blocking; several threads may each run some.

    Each depth of `Gather` has its own pool, whose limit is never reached: otherwise a child that waits for its own
    children could hold the thread that one of them needs. The `width` of a `Gather` limits the concurrency.

    An interrupted call (Ctrl-C, SIGTERM) does not wait for its helper threads. They stop before their next request.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._pools: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._stopping: list[Future[None]] = []
        """Helpers of interrupted calls."""

    def __call__(self, steps: Steps[T]) -> T:
        if self._is_interrupted:
            wait(self._stopping)
            self._stopping.clear()
            self._is_interrupted = False
        return self._run(steps, depth=0)

    def close(self) -> None:
        self._is_interrupted = True
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
            except BaseException as exc:  # noqa: BLE001 - the steps decide what an error means
                give = _thrower(steps, exc)
            else:
                give = _sender(steps, reply)

    def _reply(self, op: Op, depth: int) -> Any:
        if self._is_interrupted:
            raise _Interrupted
        if isinstance(op, Sleep):
            return self._clock.sleep(op.seconds)
        if isinstance(op, Gather):
            return self._gather(op, depth)
        return answer(self._store, op)

    def _gather(self, op: Gather, depth: int) -> list[Any]:
        """Several threads run child after child. The calling thread is one of them, so that fewer threads are woken."""
        gathered = _GatherState(op.children)
        helpers = min(op.width, len(op.children)) - 1
        others = [self._pool(depth).submit(self._work, gathered, depth) for _ in range(helpers)]
        try:
            self._work(gathered, depth)
            for other in others:
                other.result()
        except BaseException:
            self._is_interrupted = True
            self._stopping += others
            raise
        return gathered.results()

    def _work(self, gathered: _GatherState, depth: int) -> None:
        while (number := gathered.take()) is not None:
            try:
                gathered.answers[number] = self._run(gathered.children[number], depth + 1)
            except Exception as exc:  # noqa: BLE001 - raised by `results`
                gathered.fail(number, exc)

    def _pool(self, depth: int) -> ThreadPoolExecutor:
        with self._lock:
            while len(self._pools) <= depth:
                self._pools.append(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="atoll-round"))
            return self._pools[depth]


def _sender(steps: Steps[Any], reply: Any) -> Callable[[], Op]:
    return lambda: steps.send(reply)


def _thrower(steps: Steps[Any], exc: BaseException) -> Callable[[], Op]:
    return lambda: steps.throw(exc)


LEAST_PAUSE_S = 0.001
"""Every pause is this long, so that a test clock always moves."""


@dataclass
class Counters:
    """Store requests of a replica by verb, bytes in each direction, and seconds by phase."""

    requests: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    """GETs of keys that did not exist yet."""
    retries: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: encode, put, wait, get, reduce. Concurrent phases are summed."""

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
    """The store as steps: counted, retried while the store is unavailable, and checked when read. Thread-safe."""

    def __init__(self, clock: Clock, rng: random.Random, *, retry_s: float = 120.0, reread: int = 6) -> None:
        self.clock, self.rng = clock, rng
        self.counters = Counters()
        self._retry_s, self._reread = retry_s, reread
        self._lock = threading.Lock()
        self.timeline = Timeline(clock, self)
        self.is_cut_off = False
        """Whether the last request found the store unavailable."""

    def counted(self) -> Counters:
        """A copy of the counters. Can be called while requests run."""
        with self._lock:
            return self.counters.copy()

    def get(self, key: str) -> Steps[Buffer]:
        data: Buffer = yield from self._ask(Get(key))
        with self._lock:
            self.counters.bytes_down += memoryview(data).nbytes
        return data

    def probe(self, key: str, *, is_awaited: bool = True) -> Steps[Buffer | None]:
        """The object, or None if it does not exist; that counts as a miss if the object `is_awaited`."""
        try:
            return (yield from self.get(key))
        except KeyNotFound:
            with self._lock:
                self.counters.misses += is_awaited
            return None

    def open(self, key: str) -> Steps[Body | None]:
        """The object, to be read with `receive`; None if it does not exist. A failed read is not retried."""
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
        """The result of `take`, which reads from opened objects. An error is not retried."""
        taken: T = yield Read(take)
        return taken

    def put(self, key: str, data: Data) -> Steps[None]:
        yield from self._ask(Put(key, data))
        self._count_up(data)

    def create(self, key: str, data: Data) -> Steps[bool]:
        """Whether the key was free. After a retry, False can also mean that our own first attempt had succeeded."""
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
        """The object, parsed and checked. An object that fails its check is read again, up to `reread` times.

        `is_promised`: another object says that this one exists, so a missing object is read again too.
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
        """Pause, counted as phase `wait`. The timeline may use the pause for its own upload."""
        asked = self.clock.monotonic()
        yield from self.timeline.use_pause(self)
        began = self.clock.monotonic()
        yield Sleep(max(seconds - (began - asked), LEAST_PAUSE_S))
        self.spend("wait", began)

    def spend(self, phase: str, began: float, ended: float | None = None) -> None:
        """Count a phase that began and ended at these times of `clock.monotonic`; it ended now if `ended` is None."""
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
                self.spend("wait", began)  # the object does not exist yet
                raise
            except KeyExists:
                self.spend(_PHASES[verb], began)
                raise
            except StoreUnavailable as exc:
                self.is_cut_off = True
                if self.clock.monotonic() - began >= self._retry_s:
                    exc.message = f"{exc.message}; retried for {self._retry_s:g} s, the value of `Tuning(retry_s=…)`"
                    raise
                with self._lock:
                    self.counters.retries += 1
                log.debug("store unavailable, %s is retried: %s", verb, exc)
            yield Sleep(next(pauses))
        self.is_cut_off = False
        self.spend(_PHASES[verb], began)
        return reply

    def _count_up(self, data: Data) -> None:
        with self._lock:
            self.counters.bytes_up += size_of(data)
