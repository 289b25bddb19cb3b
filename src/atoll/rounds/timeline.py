"""How long each phase of each round took on one replica, and what it moved: recorded in memory, left in the store.

Phases run side by side, in threads, and with streaming a round goes on while the next inner steps are computed; so
intervals are kept, not sums. What computing happens between two exchanges belongs to the later one. A round is closed
when its outer step was told, at the latest when the round after the next begins or the next one has to wait; closed
ones are written in batches, each batch an object of its own, and old ones are deleted.

Intervals of time: their union, how long they last, what others leave uncovered, and fewer of them. Pure.

What one replica's round cost: seconds by phase, bytes, requests; as one line of JSON in the store. Pure.
"""

from __future__ import annotations

import heapq
import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from atoll._time import Clock
from atoll.errors import StoreError

if TYPE_CHECKING:
    from atoll.rounds.io import Counters, Steps, StoreIO
    from atoll.rounds.keys import RoundKeys

Span = tuple[float, float]
"""When something began and ended, in seconds."""

_COMPACT_FROM = 2048


def union(spans: Iterable[Span]) -> list[Span]:
    """The same stretches of time as sorted intervals that do not touch."""
    joined: list[Span] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        elif ended > began:
            joined.append((began, ended))
    return joined


def length(spans: Iterable[Span]) -> float:
    """How long at least one of them lasted."""
    return sum(ended - began for began, ended in union(spans))


def uncovered(spans: Iterable[Span], cover: Iterable[Span]) -> list[Span]:
    """The parts of `spans` in which nothing of `cover` went on."""
    left: list[Span] = []
    covers = union(cover)
    for began, ended in union(spans):
        for c_began, c_ended in covers:
            if c_ended <= began or c_began >= ended:
                continue
            if c_began > began:
                left.append((began, c_began))
            began = c_ended
            if began >= ended:
                break
        if began < ended:
            left.append((began, ended))
    return left


def limited(spans: Sequence[Span], most: int) -> list[Span]:
    """At most `most` intervals: the shortest gaps between those of the union are closed."""
    joined = union(spans)
    if len(joined) <= most:
        return joined
    gaps = range(1, len(joined))
    kept = sorted(heapq.nlargest(most - 1, gaps, key=lambda i: joined[i][0] - joined[i - 1][1]))
    firsts = [0, *kept]
    lasts = [*(i - 1 for i in kept), len(joined) - 1]
    return [(joined[first][0], joined[last][1]) for first, last in zip(firsts, lasts, strict=True)]


class Track:
    """What one phase of a round did: how long, how often and when. Memory is bounded, however many are added."""

    def __init__(self) -> None:
        self.busy_s, self.count = 0.0, 0
        self._spans: list[Span] = []

    def add(self, began: float, ended: float) -> None:
        self.busy_s += max(0.0, ended - began)
        self.count += 1
        self._spans.append((began, ended))
        if len(self._spans) >= _COMPACT_FROM:
            self._spans = limited(self._spans, _COMPACT_FROM // 2)

    @property
    def spans(self) -> list[Span]:
        """The union, in order."""
        return union(self._spans)


PHASES = ("compute", "encode", "put", "wait", "get", "reduce", "apply")
"""Those we know, in the order they come; a record may have others."""
_MICRO = 1_000_000


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a round."""

    busy_s: float
    """Summed over everything that went on side by side."""
    wall_s: float
    """How long at least one of them went on."""
    count: int = 1
    spans: tuple[tuple[float, float], ...] = ()
    """(when after the exchange began, how long): a bounded number, so short gaps may be closed."""

    def to_json(self) -> dict[str, Any]:
        spans = [[round(at * _MICRO), round(lasted * _MICRO)] for at, lasted in self.spans]
        return {"busy_s": _short(self.busy_s), "wall_s": _short(self.wall_s), "count": self.count, "spans_us": spans}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PhaseTime:
        spans = tuple((at / _MICRO, max(0, lasted) / _MICRO) for at, lasted in data["spans_us"])
        return cls(_number(data["busy_s"]), _number(data["wall_s"]), int(_number(data["count"])), spans)


@dataclass(frozen=True)
class RoundRecord:
    """One round of one process."""

    rank: int
    incarnation: int
    round_no: int
    fragment: int
    time: float
    """When the exchange began, by the replica's own clock: for people and pictures, never for decisions."""
    exchange_s: float
    exposed_s: float
    """The part of the exchange during which nothing was computed."""
    is_over: bool
    """False for an exchange that never came to its end."""
    is_included: bool
    """Whether this replica's update is part of the mean."""
    phases: dict[str, PhaseTime] = field(default_factory=dict)
    bytes_up: int = 0
    """Bytes and requests from the beginning of this exchange to that of the next one."""
    bytes_down: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    retries: int = 0

    @property
    def hidden_share(self) -> float:
        """The part of the exchange that went on behind computing."""
        return 1.0 - self.exposed_s / self.exchange_s if self.exchange_s > 0 else 0.0

    @property
    def total_s(self) -> float:
        """What the round took of the replica's time: computing, standing still for the exchange, and the outer step."""
        return self.wall_s("compute") + self.exposed_s + self.wall_s("apply")

    def wall_s(self, phase: str) -> float:
        found = self.phases.get(phase)
        return 0.0 if found is None else found.wall_s

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round_no,
            "fragment": self.fragment,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "time": _short(self.time),
            "exchange_s": _short(self.exchange_s),
            "exposed_s": _short(self.exposed_s),
            "over": self.is_over,
            "included": self.is_included,
            "phases": {name: phase.to_json() for name, phase in self.phases.items()},
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "requests": self.requests,
            "misses": self.misses,
            "retries": self.retries,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundRecord:
        """`KeyError`, `TypeError` or `ValueError` when it is no such record."""
        return cls(
            rank=int(_number(data["rank"])),
            incarnation=int(_number(data["incarnation"])),
            round_no=int(_number(data["round"])),
            fragment=int(_number(data["fragment"])),
            time=_number(data["time"]),
            exchange_s=_number(data["exchange_s"]),
            exposed_s=_number(data["exposed_s"]),
            is_over=bool(data["over"]),
            is_included=bool(data["included"]),
            phases={str(name): PhaseTime.from_json(phase) for name, phase in data["phases"].items()},
            bytes_up=int(_number(data["bytes_up"])),
            bytes_down=int(_number(data["bytes_down"])),
            requests={str(verb): int(_number(count)) for verb, count in data["requests"].items()},
            misses=int(_number(data["misses"])),
            retries=int(_number(data["retries"])),
        )


def _number(value: object) -> float:
    """JSON from anywhere: a text that looks like a number is none."""
    if not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r}")
    return value


def _short(seconds: float) -> float:
    return round(seconds, 6)


COMPUTE, APPLY = "compute", "apply"
MOST_SPANS = 32
"""Intervals kept of each phase of a round; shorter gaps than those between them are closed."""
WRITE_EVERY_S = 5.0
LONG_S = 1.0
"""Exchanges that take longer than this have time to write while they wait."""
KEPT_SEGMENTS = 512
_MOST_PENDING = 1000


class _Counting(Protocol):
    """Where bytes and requests are counted."""

    def counted(self) -> Counters:
        """A copy of the counters so far."""
        ...


@dataclass
class _Draft:
    """A round that may still be added to."""

    round_no: int
    fragment: int
    began: float
    time: float
    before: Counters
    compute: Track
    phases: dict[str, Track] = field(default_factory=dict)
    ended: float | None = None
    is_over: bool = False
    is_included: bool = False

    def track(self, phase: str) -> Track:
        found = self.phases.get(phase)
        if found is None:
            found = self.phases[phase] = Track()
        return found


class Timeline:
    """The rounds of one process. Every method may be called from any thread."""

    def __init__(self, clock: Clock, counting: _Counting) -> None:
        self._clock, self._counting = clock, counting
        self._lock = threading.Lock()
        self._drafts: list[_Draft] = []
        self._pending: deque[RoundRecord] = deque(maxlen=_MOST_PENDING)
        self._compute = Track()
        """What was computed since the last exchange began."""
        self._is_told = False
        """Whether anybody says what is computed."""
        self._idle_since = clock.monotonic()
        self._sums = [0.0, 0.0]
        self._keys: RoundKeys | None = None
        self._rank = self._incarnation = self._segment = 0
        self._written_at = -WRITE_EVERY_S

    def open(self, keys: RoundKeys, rank: int, incarnation: int) -> None:
        """From now on it is known whose rounds these are."""
        self._keys, self._rank, self._incarnation = keys, rank, incarnation
        self._idle_since = self._clock.monotonic()

    # ---- what is told

    def add(self, phase: str, began: float, ended: float, round_no: int | None = None) -> None:
        """A phase went on then, by the clock's `monotonic`: of that round unless it is closed, or of the latest one."""
        with self._lock:
            if phase == COMPUTE:
                self._is_told = True
                self._compute.add(began, ended)
            else:
                meant = [draft for draft in self._drafts if round_no is None or draft.round_no == round_no]
                if meant:
                    meant[-1].track(phase).add(began, ended)

    def begin(self, round_no: int, fragment: int) -> None:
        """An exchange begins; what was computed until now was for it."""
        counted, now = self._counting.counted(), self._clock.monotonic()
        with self._lock:
            if not self._is_told:
                self._compute.add(self._idle_since, now)
            self._close(counted, is_final=False)
            self._drafts.append(_Draft(round_no, fragment, now, self._clock.time(), counted, self._compute))
            self._compute = Track()

    def end(self, *, is_included: bool, is_over: bool = True) -> None:
        """The exchange has come to its end, or failed; its mean has not been applied yet."""
        with self._lock:
            if self._drafts:  # else all was closed while it failed
                draft = self._drafts[-1]
                draft.ended, draft.is_included, draft.is_over = self._clock.monotonic(), is_included, is_over
                self._idle_since = draft.ended

    # ---- what it comes to

    @property
    def exchange_s(self) -> float:
        """Seconds of all exchanges so far."""
        return self._so_far()[0]

    @property
    def exposed_s(self) -> float:
        """Seconds of exchanges during which nothing was computed."""
        return self._so_far()[1]

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges that went on behind computing."""
        exchange_s, exposed_s = self._so_far()
        return 1.0 - exposed_s / exchange_s if exchange_s > 0 else 0.0

    def flush(self, io: StoreIO) -> Steps[None]:
        """Write what is closed, unless that was done a moment ago. A store that fails is no reason to stop training."""
        if self._clock.monotonic() - self._written_at >= WRITE_EVERY_S:
            yield from self._write(io)

    def use_pause(self, io: StoreIO) -> Steps[None]:
        """Before a pause: if the exchange takes long, whoever looks now should find every round before it."""
        now = self._clock.monotonic()
        if now - self._written_at < WRITE_EVERY_S:
            return
        counted = self._counting.counted()
        with self._lock:
            if not self._drafts or self._drafts[-1].ended is not None or now - self._drafts[-1].began < LONG_S:
                return
            self._close(counted, is_final=False)
        yield from self._write(io)

    def finish(self, io: StoreIO) -> Steps[None]:
        """Close and write all there is: no round follows."""
        counted = self._counting.counted()
        with self._lock:
            self._close(counted, is_final=True)
        yield from self._write(io)

    def _write(self, io: StoreIO) -> Steps[None]:
        with self._lock:
            keys, batch = self._keys, list(self._pending)
            if keys is None or not batch:
                return
            self._pending.clear()
            segment, self._segment = self._segment, self._segment + 1
            self._written_at = self._clock.monotonic()
        try:
            yield from io.put(keys.metrics(self._rank, self._incarnation, segment), _lines(batch))
            if segment >= KEPT_SEGMENTS:
                yield from io.delete(keys.metrics(self._rank, self._incarnation, segment - KEPT_SEGMENTS))
        except StoreError:
            with self._lock:
                self._pending.extendleft(reversed(batch))  # it may be there all the same: readers take a round once

    def _close(self, counted: Counters, *, is_final: bool) -> None:
        """Turn drafts into records, oldest first, once nothing more is to come."""
        while self._drafts:
            draft, is_latest = self._drafts[0], len(self._drafts) == 1
            if is_latest and not (is_final or APPLY in draft.phases):
                return
            after = counted if is_latest else self._drafts[1].before
            self._pending.append(self._record(draft, after))
            for i, spent in enumerate(self._spent(draft)):
                self._sums[i] += spent
            self._drafts.pop(0)

    def _record(self, draft: _Draft, after: Counters) -> RoundRecord:
        exchange_s, exposed_s = self._spent(draft)
        used = after.since(draft.before)
        phases = {COMPUTE: draft.compute, **draft.phases}
        return RoundRecord(
            rank=self._rank,
            incarnation=self._incarnation,
            round_no=draft.round_no,
            fragment=draft.fragment,
            time=draft.time,
            exchange_s=exchange_s,
            exposed_s=exposed_s,
            is_over=draft.is_over,
            is_included=draft.is_included,
            phases={name: _phase_time(track, draft.began) for name, track in phases.items() if track.count},
            bytes_up=used.bytes_up,
            bytes_down=used.bytes_down,
            requests=dict(sorted(used.requests.items())),
            misses=used.misses,
            retries=used.retries,
        )

    def _spent(self, draft: _Draft) -> tuple[float, float]:
        """Seconds of the exchange, and those of them during which nothing was computed."""
        exchange: Span = (draft.began, self._clock.monotonic() if draft.ended is None else draft.ended)
        computed = [span for later in self._drafts for span in later.compute.spans] + self._compute.spans
        return exchange[1] - exchange[0], length(uncovered([exchange], computed))

    def _so_far(self) -> tuple[float, float]:
        with self._lock:
            spent = [self._spent(draft) for draft in self._drafts if draft.ended is not None]
            return self._sums[0] + sum(s[0] for s in spent), self._sums[1] + sum(s[1] for s in spent)


def _phase_time(track: Track, origin: float) -> PhaseTime:
    spans = track.spans
    shown = tuple((began - origin, ended - began) for began, ended in limited(spans, MOST_SPANS))
    return PhaseTime(track.busy_s, length(spans), track.count, shown)


def _lines(records: Sequence[RoundRecord]) -> bytes:
    return b"".join(json.dumps(r.to_json(), separators=(",", ":")).encode() + b"\n" for r in records)
