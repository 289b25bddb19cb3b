"""A clock that tests turn by hand, and a store that fails on cue. Both pass the contract of what they stand for."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from threading import Lock, RLock
from typing import Literal, TypeAlias

from atoll._time import Clock
from atoll.errors import StoreError, StoreUnavailable
from atoll.stores.base import Buffer, Data, Store
from atoll.stores.fast import size_of

Verb: TypeAlias = Literal["get", "put", "create", "list", "delete", "*"]


class FakeClock:
    """Time that moves only when someone sleeps or advances it. `on_sleep` hears of each sleep before it passes."""

    def __init__(self, start: float = 1_700_000_000.0, *, on_sleep: Callable[[float], None] | None = None) -> None:
        self.on_sleep = on_sleep
        self.slept: list[float] = []
        self._start, self._passed = start, 0.0
        self._lock = RLock()
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        with self._lock:
            return self._start + self._passed

    def monotonic(self) -> float:
        with self._lock:
            return self._passed

    def sleep(self, seconds: float) -> None:
        if self.on_sleep is not None:
            self.on_sleep(seconds)
        with self._lock:
            self.slept.append(seconds)
            self.advance(max(0.0, seconds))

    def call_at(self, monotonic_s: float, action: Callable[[], None]) -> None:
        """Do `action` when time reaches that point."""
        with self._lock:
            heapq.heappush(self._due, (monotonic_s, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Let time pass; what is due on the way happens at its own moment, in order."""
        with self._lock:
            end = self._passed + seconds
            while self._due and self._due[0][0] <= end:
                at, _, action = heapq.heappop(self._due)
                self._passed = max(self._passed, at)
                action()
            self._passed = max(self._passed, end)


@dataclass
class _Rule:
    """One scripted fault: which calls it meets, and what it does to them."""

    verb: Verb
    pattern: str
    nth: int
    times: int | None
    seen: int = 0
    delay_s: float = 0.0
    error: Callable[[str], Exception] | None = None
    is_after_effect: bool = False
    spoil: Callable[[bytes], bytes] | None = None

    def meets(self, verb: str, key: str) -> bool:
        if self.verb not in ("*", verb) or not fnmatchcase(key, self.pattern):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


@dataclass
class Traffic:
    """What went through a `FaultyStore`: requests by verb, and payload bytes both ways."""

    requests: Counter[str] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)


class FaultyStore:
    """Another store, with faults on cue and every request counted. Without faults it is that store.

    Each script says which calls it meets: a verb (or `*`), a shell pattern for the key (for `list`, the prefix),
    from the `nth` such call on, `times` times (`None` = for ever). Scripts are looked at in the order they were given.
    """

    def __init__(self, inner: Store, *, clock: Clock | None = None) -> None:
        self.inner, self.uri = inner, inner.uri
        self.traffic = Traffic()
        self.before: Callable[[str, str], None] | None = None
        """Called with the verb and key before each request: the place to switch to another replica, or to die."""
        self._clock = clock
        self._rules: list[_Rule] = []
        self._lock = Lock()

    def fail(
        self,
        verb: Verb = "*",
        pattern: str = "*",
        *,
        nth: int = 1,
        times: int | None = 1,
        after_effect: bool = False,
        error: Callable[[str], Exception] | None = None,
    ) -> None:
        """Raise (`StoreUnavailable`, or what `error` makes of a message): the request was lost, or only its answer."""
        rule = _Rule(verb, pattern, nth, times, error=error or StoreUnavailable, is_after_effect=after_effect)
        self._add(rule)

    def delay(
        self, seconds: float, verb: Verb = "*", pattern: str = "*", *, nth: int = 1, times: int | None = None
    ) -> None:
        """Let the clock pass before the request is served."""
        if self._clock is None:
            raise ValueError("a delay needs a clock: FaultyStore(inner, clock=FakeClock())")
        self._add(_Rule(verb, pattern, nth, times, delay_s=seconds))

    def flip(self, pattern: str = "*", *, bit: int = 0, nth: int = 1, times: int | None = 1) -> None:
        """Return the object with one bit turned over."""
        self._add(_Rule("get", pattern, nth, times, spoil=lambda data: _flipped(data, bit)))

    def truncate(self, pattern: str = "*", *, keep: int | None = None, nth: int = 1, times: int | None = 1) -> None:
        """Return only the first `keep` bytes of the object; by default half."""
        self._add(
            _Rule("get", pattern, nth, times, spoil=lambda data: data[: len(data) // 2 if keep is None else keep])
        )

    def heal(self) -> None:
        """Forget every script. The counts stay."""
        with self._lock:
            self._rules.clear()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        with self._request("get", key) as rules:
            data = self.inner.get(key, start=start, length=length)
            for rule in rules:
                data = rule.spoil(bytes(data)) if rule.spoil else data
            self._count(self.traffic.bytes_down, "get", len(data))
        return data

    def put(self, key: str, data: Data) -> None:
        with self._request("put", key):
            self._count(self.traffic.bytes_up, "put", size_of(data))
            self.inner.put(key, data)

    def create(self, key: str, data: Data) -> None:
        with self._request("create", key):
            self._count(self.traffic.bytes_up, "create", size_of(data))
            self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._request("list", prefix):
            return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        with self._request("delete", key):
            self.inner.delete(key)

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _count(self, counter: Counter[str], verb: str, amount: int) -> None:
        with self._lock:
            counter[verb] += amount

    @contextmanager
    def _request(self, verb: str, key: str) -> Iterator[Sequence[_Rule]]:
        """One request on its way: counted, held up, and lost before its effect or with its answer, as scripted."""
        if self.before is not None:
            self.before(verb, key)
        with self._lock:
            self.traffic.requests[verb] += 1
            rules = [rule for rule in self._rules if rule.meets(verb, key)]
        for rule in rules:
            if rule.delay_s and self._clock is not None:
                self._clock.sleep(rule.delay_s)
        _raise_first(rules, verb, key, after_effect=False)
        try:
            yield rules
        except StoreError:
            _raise_first(rules, verb, key, after_effect=True)
            raise
        _raise_first(rules, verb, key, after_effect=True)


def _raise_first(rules: Sequence[_Rule], verb: str, key: str, *, after_effect: bool) -> None:
    for rule in rules:
        if rule.error is not None and rule.is_after_effect == after_effect:
            when = "after" if after_effect else "before"
            raise rule.error(f"scripted fault {when} {verb} of `{key}`")


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return data
    spoiled = bytearray(data)
    spoiled[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(spoiled)
