"""What a file must be for Perfetto and chrome://tracing to show it: the Trace Event Format, as far as we use it."""

from __future__ import annotations

import json
from typing import Any

_NEEDED = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that are drawn, after every rule was looked at."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in _NEEDED, event
        assert {"name", "ph", "ts", "pid", "tid"} | _NEEDED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str)
        assert event["name"]
        for number in ("ts", "pid", "tid"):
            assert isinstance(event[number], int)
            assert event[number] >= 0, event
    drawn = [event for event in events if event["ph"] != "M"]
    assert events[len(events) - len(drawn) :] == drawn, "names come first"
    assert [e["ts"] for e in drawn] == sorted(e["ts"] for e in drawn)
    _check_tracks(events, [event for event in drawn if event["ph"] == "X"])
    for event in drawn:
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    return drawn


def _check_tracks(events: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    ends: dict[tuple[int, int], int] = {}
    for span in spans:
        track = (span["pid"], span["tid"])
        assert span["dur"] >= 0
        assert track in named
        assert span["pid"] in processes
        assert span["ts"] >= ends.get(track, 0), f"overlaps the one before: {span}"
        ends[track] = span["ts"] + span["dur"]
