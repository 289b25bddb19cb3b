"""The rounds of a run as a picture: the Trace Event Format that Perfetto and chrome://tracing open. Pure.

One process for each rank, one track for each phase, the bytes of each round as counters, events as instants. Ranks are
aligned by their own clocks, so they are off by as much as those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.rounds.timeline import RoundRecord, Span, uncovered

TRACKS = {
    "compute": "compute",
    "exchange": "round",
    "exposed": "standing still",
    "encode": "encode",
    "put": "upload",
    "wait": "wait",
    "get": "download",
    "reduce": "reduce",
    "apply": "apply",
}
"""What is recorded → the name of its track, from top to bottom."""
_IN_A_ROUND = {"round_committed", "rank_late", "late", "update_rejected", "waiting"}
"""Events whose round is the one they happened in; others name an older or a later one, or none."""
_MICRO = 1_000_000

Event = dict[str, Any]


def chrome_trace(
    run_id: str, records: Sequence[RoundRecord], events: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The whole trace as one JSON object; times are microseconds after the first thing that happened."""
    starts = [r.time + min([0.0, *(at for p in r.phases.values() for at, _ in p.spans)]) for r in records]
    origin = min([*starts, *(float(event["time"]) for event in events)], default=0.0)
    by_rank: dict[int, list[RoundRecord]] = {}
    for record in records:
        by_rank.setdefault(record.rank, []).append(record)
    for event in events:
        by_rank.setdefault(int(event.get("by", 0)), [])
    tracks = _track_numbers(records)
    drawn = [event for rank in sorted(by_rank) for event in _rank_events(rank, by_rank[rank], tracks, origin)]
    drawn += [_instant(event, origin) for event in events]
    drawn.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*_names(sorted(by_rank), tracks), *drawn],
        "displayTimeUnit": "ms",
        "otherData": {"run": run_id, "started": origin, "written by": "atoll trace"},
    }


def last_rounds(records: Sequence[RoundRecord], count: int) -> list[RoundRecord]:
    """Those of the last `count` rounds of the run; who was not there any more is not in it."""
    newest = max((record.round_no for record in records), default=0)
    return [record for record in records if record.round_no > newest - count]


def events_of(records: Sequence[RoundRecord], events: Iterable[Event]) -> list[Event]:
    """What happened in these rounds; of what happened between rounds, that since the first of them began."""
    rounds = {record.round_no for record in records}
    since = min((record.time - record.total_s for record in records), default=0.0)
    return [e for e in events if (e.get("round") in rounds if e.get("event") in _IN_A_ROUND else e["time"] >= since)]


def _track_numbers(records: Iterable[RoundRecord]) -> dict[str, int]:
    others = sorted({name for record in records for name in record.phases} - set(TRACKS))
    return {name: number for number, name in enumerate([*TRACKS, *others], start=1)}


def _names(ranks: Sequence[int], tracks: Mapping[str, int]) -> list[Event]:
    made: list[Event] = []
    for rank in ranks:
        made.append(_meta("process_name", rank, 0, {"name": f"rank {rank}"}))
        made.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
        for phase, number in tracks.items():
            made.append(_meta("thread_name", rank, number, {"name": TRACKS.get(phase, phase)}))
            made.append(_meta("thread_sort_index", rank, number, {"sort_index": number}))
    return made


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _rank_events(rank: int, records: Sequence[RoundRecord], tracks: Mapping[str, int], origin: float) -> list[Event]:
    pieces: dict[str, list[tuple[Span, Event]]] = {name: [] for name in tracks}
    computed = [span for record in records for span in _absolute(record, "compute")]
    for record in records:
        label, whole = f"round {record.round_no}", (record.time, record.time + record.exchange_s)
        pieces["exchange"].append((whole, {"name": label, "cat": "round", "args": _details(record)}))
        for span in uncovered([whole], computed):
            pieces["exposed"].append((span, {"name": label, "cat": "exposed", "args": {}}))
        for phase in record.phases:
            args = {"round": record.round_no, "busy_s": record.phases[phase].busy_s}
            pieces[phase] += [(span, {"name": phase, "cat": phase, "args": args}) for span in _absolute(record, phase)]
    made = [
        {"ph": "X", **what, "pid": rank, "tid": tracks[name], "ts": at, "dur": lasted}
        for name, drawn in pieces.items()
        for at, lasted, what in _apart(drawn, origin)
    ]
    return made + [counter for record in records for counter in _counters(rank, record, origin)]


def _absolute(record: RoundRecord, phase: str) -> list[Span]:
    found = record.phases.get(phase)
    return [] if found is None else [(record.time + at, record.time + at + lasted) for at, lasted in found.spans]


def _apart(drawn: list[tuple[Span, Event]], origin: float) -> list[tuple[int, int, Event]]:
    """(start, length, what) in order; what a track shows never overlaps, so the later one gives way."""
    made: list[tuple[int, int, Event]] = []
    free = 0
    for (began, ended), what in sorted(drawn, key=lambda item: item[0]):
        first, last = max(free, round((began - origin) * _MICRO)), round((ended - origin) * _MICRO)
        if last > first:
            made.append((first, last - first, what))
            free = last
    return made


def _details(record: RoundRecord) -> dict[str, Any]:
    return {
        "fragment": record.fragment,
        "exposed_s": record.exposed_s,
        "hidden": round(record.hidden_share, 4),
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "requests": record.requests,
        "misses": record.misses,
        "retries": record.retries,
        "included": record.is_included,
        "over": record.is_over,
    }


def _counters(rank: int, record: RoundRecord, origin: float) -> list[Event]:
    first = max(0, round((record.time - origin) * _MICRO))
    last = first + max(1, round(record.exchange_s * _MICRO))
    moved = {"up": record.bytes_up, "down": record.bytes_down}
    common = {"ph": "C", "name": "bytes of the round", "pid": rank, "tid": 0}
    return [{**common, "ts": first, "args": moved}, {**common, "ts": last, "args": {"up": 0, "down": 0}}]


def _instant(event: Mapping[str, Any], origin: float) -> Event:
    rank, name = int(event.get("by", 0)), str(event.get("event", "event"))
    is_shared = name == "round_committed"
    is_between = event.get("round") == -1  # a replica that leaves does so between rounds
    unsaid = ("event", "time", "round") if is_between else ("event", "time")
    details = {key: value for key, value in event.items() if key not in unsaid}
    return {
        "ph": "i",
        "s": "g" if is_shared else "p",
        "name": f"{name} {event['round']}" if is_shared and "round" in event else name,
        "cat": "event",
        "pid": rank,
        "tid": 0,
        "ts": max(0, round((float(event["time"]) - origin) * _MICRO)),
        "args": details,
    }
