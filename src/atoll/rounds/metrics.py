"""The metrics of a run, read from the store alone: round records, events, and the ranks that a round waits for.

`atoll status`, `top` and `trace` call this while the run is active and after it has ended. It needs no replica, no
backend, and only the Store port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll._threads import map_in_background
from atoll.errors import BadKey, KeyNotFound
from atoll.rounds.keys import RoundKeys
from atoll.rounds.timeline import RoundRecord
from atoll.stores.base import Store

T = TypeVar("T")
_PARALLEL_READS = 16
_LARGEST = 1e18
_MOST_RANKS = 100_000
_WAITERS_READ = 3
"""The number of waiting ranks whose events are read: all of them report nearly the same."""


@dataclass(frozen=True)
class Outlook:
    """How a wait ends if no missing rank arrives, as a waiting rank reported it."""

    until: float
    """By the clock of the waiting machine."""
    goes_on: bool
    """The round continues without the missing ranks; otherwise it fails."""
    least: int | None
    """The number of ranks that the round needs; None for all."""


@dataclass(frozen=True)
class Waiting:
    """A round that waits for ranks: for their offers, or after the commit for contributions that only they have."""

    round_no: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    outlook: Outlook | None = None
    """None while the wait is short."""
    is_committed: bool = False
    """The round is committed and only its mean is missing, so a smaller quorum does not help."""

    @property
    def needed(self) -> int:
        """How many of the missing ranks must arrive; 0 if that is not known."""
        if self.outlook is None or self.outlook.goes_on:
            return 0
        return len(self.missing) if self.outlook.least is None else max(0, self.outlook.least - len(self.arrived))

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing[:8])) + (", …" if len(self.missing) > 8 else "")
        return f"round {self.round_no} waits for rank{'' if len(self.missing) == 1 else 's'} {ranks}"


def round_records(store: Store, run_id: str, *, last: int | None = None, launch: int = 1) -> list[RoundRecord]:
    """All round records in the store, by rank and time; with `last`, only the newest ones of each rank."""
    keys = RoundKeys(run_id, launch)
    of_rank: dict[int, list[str]] = {}
    for key, (rank, *_) in _parsed(store, keys.metrics_prefix(), keys.parse_metrics):
        of_rank.setdefault(rank, []).append(key)  # sorted: older incarnations and segments first
    found = _each(lambda names: _newest(store, names, last), list(of_rank.values()))
    return [record for records in found for record in records]


def latest_records(store: Store, run_id: str, *, launch: int = 1) -> dict[int, RoundRecord]:
    """The newest round of each rank."""
    return {record.rank: record for record in round_records(store, run_id, last=1, launch=launch)}


def round_events(store: Store, run_id: str, *, launch: int = 1) -> list[dict[str, Any]]:
    """All events of the replicas, by time."""
    keys = list(store.list(RoundKeys(run_id, launch).events_prefix()))
    found = [line for lines in _each(lambda key: list(_lines(store, key)), keys) for line in lines]
    usable = [e for e in found if isinstance(e.get("time"), int | float) and isinstance(e.get("by", 0), int)]
    return sorted(usable, key=lambda event: float(event["time"]))


def rounds_held(store: Store, run_id: str, *, launch: int = 1) -> int:
    """How many rounds are committed; one LIST."""
    keys = RoundKeys(run_id, launch)
    return max((number + 1 for _, number in _parsed(store, keys.commits_prefix(), keys.parse_commit)), default=0)


def waiting_for(store: Store, run_id: str, replicas: int, *, launch: int = 1) -> Waiting | None:
    """The round that waits for ranks, or None.

    Takes three LISTs, and one LIST and one GET for each of a few ranks that may wait.
    """
    keys = RoundKeys(run_id, launch)
    commits = [number for _, number in _parsed(store, keys.commits_prefix(), keys.parse_commit)]
    round_no = commits[-1] + 1 if commits else 0
    arrived = {named[1] for _, named in _parsed(store, keys.offers_prefix(round_no), keys.parse_offer)}
    claims = _claims(store, keys) if arrived or commits else {}
    reports = _WaitReports(store, keys, {rank: incarnation for rank, (incarnation, _) in claims.items()})
    gone = {rank for rank, (_, has_left) in claims.items() if has_left}
    if not arrived:
        return _missing_after_commit(reports, commits[-1], set(range(replicas)) - gone) if commits else None
    missing = set(range(replicas)) - arrived - gone
    if not missing:
        return None
    there = tuple(sorted(arrived))
    return Waiting(round_no, there, tuple(sorted(missing)), _latest(reports.of(there[:_WAITERS_READ], round_no)))


def _missing_after_commit(reports: _WaitReports, round_no: int, ranks: set[int]) -> Waiting | None:
    """The wait for ranks whose contributions others need for the mean of a committed round."""
    first = sorted(ranks)[:_WAITERS_READ]
    events = _still_waiting(reports.of(first, round_no))
    # A rank that others wait for may wait itself, for the rank that all of them need.
    named = sorted({rank for event in events for rank in event["for"]} - set(first))
    events += _still_waiting(reports.of(named[:_WAITERS_READ], round_no))
    there = {event["by"] for event in events}
    missing = {rank for event in events for rank in event["for"]}
    missing = missing - there or missing
    if not missing:
        return None
    latest = _latest([event for event in events if missing & set(event["for"])])
    return Waiting(round_no, tuple(sorted(there)), tuple(sorted(missing)), latest, is_committed=True)


def _still_waiting(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last event of each rank, if it names ranks that the rank waits for after the commit."""
    named = [event for event in events if _is_ranks(event.get("for")) and _is_ranks([event.get("by")])]
    last = {event["by"]: event for event in sorted(named, key=lambda event: float(event["time"]))}
    return [event for event in last.values() if event["for"]]


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in value)


@dataclass(frozen=True)
class _WaitReports:
    """The `waiting` events of the newest incarnation of each rank."""

    store: Store
    keys: RoundKeys
    newest: dict[int, int]
    """Rank → its newest incarnation."""

    def of(self, ranks: Sequence[int], round_no: int) -> list[dict[str, Any]]:
        """The events of these ranks in this round."""
        names = [name for name in _each(self._last_segment, ranks) if name is not None]
        events = [event for lines in _each(lambda name: list(_lines(self.store, name)), names) for event in lines]
        return [e for e in events if e.get("event") == "waiting" and e.get("round") == round_no and _is_outlook(e)]

    def _last_segment(self, rank: int) -> str | None:
        named = list(_parsed(self.store, self.keys.events_of(rank), self.keys.parse_events))
        name, (_, incarnation, _) = named[-1] if named else ("", (rank, -1, 0))
        return name if incarnation >= self.newest.get(rank, 0) else None


def _latest(events: Sequence[dict[str, Any]]) -> Outlook | None:
    if not events:
        return None
    newest = sorted(events, key=lambda event: float(event["time"]))[-1]
    return Outlook(float(newest["until"]), newest["then"] == "go_on", newest["least"])


def _is_outlook(event: dict[str, Any]) -> bool:
    is_timed = all(type(event.get(name)) in (int, float) for name in ("time", "until"))
    return is_timed and event.get("then") in ("go_on", "give_up") and type(event.get("least", 0)) in (int, type(None))


def _claims(store: Store, keys: RoundKeys) -> dict[int, tuple[int, bool]]:
    """Rank → its newest incarnation, and whether that has left."""
    newest: dict[int, tuple[int, bool]] = {}
    for _, (rank, incarnation, has_left) in _parsed(store, keys.claims_prefix(), keys.parse_claim):
        newest[rank] = incarnation, has_left  # a departure sorts right after its claim
    return newest


def _parsed(store: Store, prefix: str, parse: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Each key with its parsed parts; foreign keys are skipped."""
    for key in store.list(prefix):
        with suppress(BadKey):
            yield key, parse(key)


def _newest(store: Store, names: Sequence[str], last: int | None) -> list[RoundRecord]:
    found: dict[tuple[int, int], RoundRecord] = {}
    for name in reversed(names):
        for record in reversed([record for line in _lines(store, name) for record in _record(line)]):
            found.setdefault((record.incarnation, record.round_no), record)
        if last is not None and len(found) >= last:
            break
    newest = sorted(found.values(), key=lambda record: (record.incarnation, record.time))
    return newest if last is None else newest[-last:]


def _record(line: dict[str, Any]) -> Iterator[RoundRecord]:
    try:
        yield RoundRecord.from_json(line)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return  # perhaps of another version; displays skip it


def _lines(store: Store, key: str) -> Iterator[dict[str, Any]]:
    try:
        data = bytes(store.get(key))
    except (KeyNotFound, BadKey):
        return  # deleted in the meantime
    for line in data.splitlines():
        try:
            found = json.loads(line, parse_constant=_refused, parse_float=_finite, parse_int=_whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _refused(text: str) -> float:
    raise ValueError(f"not a number: {text}")


def _finite(text: str) -> float:
    return _within(float(text))


def _whole(text: str) -> int:
    return int(_within(int(text)))


def _within(number: float) -> float:
    """Refuse numbers so large that later arithmetic could overflow."""
    return number if abs(number) < _LARGEST else float(_refused(str(number)[:20]))


def _each(read: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Read many items in parallel, because most stores have a high latency."""
    if len(items) < 2:
        return [read(item) for item in items]
    return map_in_background(read, items, most=_PARALLEL_READS)
