"""Ranks that machines claim by themselves, from the records in the store. The executor `join` and `atoll join` read it.

    launch/join/00000.json   the ranks that wait for machines, and what a machine needs to run one (`JoinPart`)
    start/00002.001.json     a machine has claimed attempt 1 of rank 2; or `barred`: a cancel has
    beat/00002.json          the heartbeat of the machine
    outcome/00002.001.json   how the attempt ended
    launch/stop/00002.json   a cancel asks the machine to stop

A machine creates the claim before it starts anything, so two machines never run the same attempt. A rank is free if
its machine has left, or if no heartbeat arrived for `silent_s`: then another machine claims the next attempt, and the
machine before ends itself when it sees that.

The clocks of two machines are compared only at the first look at a heartbeat. After that it counts how long the
heartbeat has not changed, by the clock of the reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from atoll import journal
from atoll._threads import map_in_background
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import KeyExists, KeyNotFound, StoreError
from atoll.keys import RunKeys
from atoll.status import Reason, ReplicaState
from atoll.stores.base import Store

_AT_ONCE = 16
_BEATS = 4
"""Heartbeats in the time after which a machine counts as silent."""
_LONGEST_BEAT_S = 10.0


@dataclass(frozen=True)
class JoinPart:
    """The ranks of a launch that wait for machines, and what each machine needs."""

    first_rank: int
    replicas: int
    world_size: int
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    rank_env: str
    timeout_s: float
    grace_s: float
    max_restarts: int
    silent_s: float

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.replicas)

    @property
    def beat_s(self) -> float:
        """The time between two heartbeats."""
        return min(_LONGEST_BEAT_S, self.silent_s / _BEATS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_part(store: Store, keys: RunKeys, first_rank: int) -> JoinPart | None:
    """The part that begins with this rank; None if there is none. A damaged record is an error: its ranks may run."""
    key = keys.join_part(first_rank)
    try:
        record = json.loads(bytes(store.get(key)))
        part = JoinPart(**{field.name: record[field.name] for field in fields(JoinPart)})
    except KeyNotFound:
        return None
    except KeyError as exc:
        what = f"the record of the ranks that wait for machines lacks {exc}"
        raise StoreError(what, uri=store.uri, key=key, reason="damaged") from exc
    except (ValueError, TypeError) as exc:
        what = f"the record of the ranks that wait for machines is damaged: {exc}"
        raise StoreError(what, uri=store.uri, key=key, reason="damaged") from exc
    if wrong := [field.name for field in fields(JoinPart) if not _fits(field.type, getattr(part, field.name))]:
        what = f"the record of the ranks that wait for machines has a wrong `{wrong[0]}`"
        raise StoreError(what, uri=store.uri, key=key, reason="damaged")
    return part


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value of JSON is what a field of `JoinPart` says. A whole number is a float, too."""
    if kind in ("int", "float"):
        return type(value) is int or (kind == "float" and type(value) is float and math.isfinite(value))
    return isinstance(value, str if kind == "str" else Mapping)


def read_parts(store: Store, keys: RunKeys) -> list[JoinPart]:
    """Every part of a launch that waits for machines, in the order of ranks."""
    firsts = [keys.parse_join_part(key) for key in store.list(keys.join_parts_prefix())]
    return [part for first in firsts if (part := read_part(store, keys, first)) is not None]


class Condition(StrEnum):
    """What a rank needs."""

    WAITING = "waiting"
    """No machine has claimed it yet."""
    LEFT = "left"
    """Its machine has left, and another one may claim it."""
    SILENT = "silent"
    """Its machine sends no heartbeats any more, and another one may claim it."""
    RESTARTING = "restarting"
    """Its code has failed, and its machine is about to start it again."""
    RUNNING = "running"
    OVER = "over"

    @property
    def is_free(self) -> bool:
        return self in (Condition.WAITING, Condition.LEFT, Condition.SILENT)


@dataclass(frozen=True)
class RankRow:
    """What the store says about one rank. All times are of the machine that has it."""

    rank: int
    attempt: int | None = None
    """The newest attempt that was claimed; None if there is none."""
    start: Mapping[str, Any] | None = None
    """The claim of that attempt."""
    outcome: Mapping[str, Any] | None = None
    """How that attempt ended."""
    failures: int = 0
    """Attempts that the user's code has ended, that one included."""
    first_at: float | None = None
    """When a machine claimed the first attempt."""
    heard_at: float | None = None
    """The time of the last heartbeat, else of the claim."""
    is_silent: bool = False
    is_stopping: bool = False

    @property
    def next_attempt(self) -> int:
        return 0 if self.attempt is None else self.attempt + 1

    @property
    def host(self) -> str | None:
        host = (self.start or {}).get("host")
        return host if isinstance(host, str) else None

    @property
    def is_barred(self) -> bool:
        """A cancel has claimed the newest attempt."""
        return (self.start or {}).get("barred") is True

    def condition(self, max_restarts: int) -> Condition:
        if self.attempt is None:
            return Condition.WAITING
        if self.is_barred:
            return Condition.OVER
        if self.outcome is None:
            return Condition.SILENT if self.is_silent else Condition.RUNNING
        if not _has_failed(self.outcome) and not _has_left(self.outcome):
            return Condition.OVER
        if _has_left(self.outcome):
            return Condition.LEFT
        if self.failures > max_restarts or _is_final(self.outcome):
            return Condition.OVER
        return Condition.LEFT if self.is_silent else Condition.RESTARTING


def _has_left(outcome: Mapping[str, Any]) -> bool:
    return outcome.get("state") == ReplicaState.FAILED and outcome.get("reason") == Reason.PREEMPTED


def _has_failed(outcome: Mapping[str, Any]) -> bool:
    return outcome.get("state") == ReplicaState.FAILED and outcome.get("reason") != Reason.PREEMPTED


def _is_final(outcome: Mapping[str, Any]) -> bool:
    """A restart would not help."""
    return outcome.get("is_final") is True or outcome.get("reason") == Reason.TIMEOUT


class _Sign(NamedTuple):
    """The newest sign of life of a machine that this process has seen."""

    mark: tuple[int, float]
    """The attempt, and the time of the heartbeat by the clock of the machine."""
    seen_at: float
    """When this process saw it first, in monotonic time."""
    age_s: float
    """How old it was then. One from the future says as little as an old one: a clock is wrong."""


class JoinedRanks:
    """Reads and claims the ranks of one part. Keep it to notice heartbeats that do not change."""

    def __init__(self, store: Store, keys: RunKeys, part: JoinPart, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._keys, self.part, self._clock = store, keys, part, clock
        self._known: dict[str, dict[str, Any]] = {}
        """Claims and outcomes, which never change."""
        self._signs: dict[int, _Sign] = {}

    def read(self, ranks: Sequence[int] | None = None) -> list[RankRow]:
        """These ranks, by default all of the part: three LISTs, a GET for each running rank and each new record."""
        wanted = list(self.part.ranks if ranks is None else ranks)
        starts = dict(map(self._keys.parse_start, self._store.list(self._keys.starts_prefix())))
        ended = set(map(self._keys.parse_outcome, self._store.list(self._keys.outcomes_prefix())))
        stops = journal.read_stops(self._store, self._keys.run_id, launch=self._keys.launch)

        def row(rank: int) -> RankRow:
            attempt = starts.get(rank)
            if attempt is None:
                return RankRow(rank, is_stopping=rank in stops)
            return self._row(rank, attempt, {a for r, a in ended if r == rank}, rank in stops)

        if len(wanted) <= 4 or self._store.uri.startswith(("file:", "memory:")):
            return [row(rank) for rank in wanted]
        return map_in_background(row, wanted, most=_AT_ONCE)

    def claim(self, rank: int, attempt: int, record: Mapping[str, Any]) -> bool:
        """Claim an attempt. False if another machine or a cancel has it."""
        try:
            self._store.create(self._keys.start(rank, attempt), json.dumps({**record}).encode())
        except KeyExists:
            return False
        return True

    def bar(self, rank: int, attempt: int) -> bool:
        """Keep every machine from running this attempt. False if one has claimed it."""
        return self.claim(rank, attempt, {"at": self._clock.time(), "barred": True})

    def _row(self, rank: int, attempt: int, ended: set[int], is_stopping: bool) -> RankRow:
        keys = self._keys
        start = self._constant(keys.start(rank, attempt))
        outcomes = {each: self._constant(keys.outcome(rank, each)) for each in sorted(ended)}
        heard_at, is_silent = None, False
        if start.get("barred") is not True:
            beat = _record(self._store, keys.beat(rank)) or {}
            is_own = beat.get("attempt") == attempt
            heard_at = _time(beat.get("beat_at") if is_own else start.get("at"))
            is_silent = self._is_silent(rank, attempt, heard_at or 0.0)
        first = self._constant(keys.start(rank, 0))
        return RankRow(
            rank,
            attempt,
            start,
            outcomes.get(attempt),
            sum(map(_has_failed, outcomes.values())),
            None if first.get("barred") is True else _time(first.get("at")),
            heard_at,
            is_silent,
            is_stopping,
        )

    def _is_silent(self, rank: int, attempt: int, heard_at: float) -> bool:
        mark, now, before = (attempt, heard_at), self._clock.monotonic(), self._signs.get(rank)
        if before is None:
            self._signs[rank] = _Sign(mark, now, abs(self._clock.time() - heard_at))
        elif before.mark != mark:
            self._signs[rank] = _Sign(mark, now, 0.0)
        sign = self._signs[rank]
        return sign.age_s + now - sign.seen_at > self.part.silent_s

    def is_confirmed_silent(self, rank: int) -> bool:
        """Whether no heartbeat of this rank arrives within the next beats. The clocks of two machines may differ."""
        self.read([rank])
        mark, until = self._signs[rank].mark, self._clock.monotonic() + self._watch_s
        while self._clock.monotonic() < until:
            self._clock.sleep(self.part.beat_s / 4)
            self.read([rank])
            if self._signs[rank].mark != mark:
                return False
        return True

    def was_watched(self, rank: int) -> bool:
        """Whether this process has read an unchanged heartbeat of the rank for so long that the next ones are missing.

        It has to read the rank again and again."""
        sign = self._signs.get(rank)
        return sign is not None and self._clock.monotonic() - sign.seen_at > self._watch_s

    @property
    def _watch_s(self) -> float:
        return 2.5 * self.part.beat_s

    def _constant(self, key: str) -> dict[str, Any]:
        if key not in self._known and (found := _record(self._store, key)) is not None:
            self._known[key] = found
        return self._known.get(key, {})


def _time(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _record(store: Store, key: str) -> dict[str, Any] | None:
    """The JSON object; None if it is absent or no JSON object."""
    try:
        found = json.loads(bytes(store.get(key)))
    except (KeyNotFound, ValueError):
        return None
    return found if isinstance(found, dict) else None
