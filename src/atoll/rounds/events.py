"""What a replica saw, as JSON lines in the store: bounded segments, each rewritten as it grows and then left alone."""

from __future__ import annotations

import json
from typing import Any

from atoll._time import Clock
from atoll.errors import StoreError
from atoll.rounds.io import Steps, StoreIO
from atoll.rounds.keys import RoundKeys

SEGMENT_BYTES = 64 << 10
KEPT_SEGMENTS = 4
LONG_WAIT_S = 5.0
"""Who waits longer than this says so in the store."""


class EventLog:
    """Collects events and writes them when asked. Losing the last few in a crash is harmless."""

    def __init__(self, keys: RoundKeys, rank: int, incarnation: int, clock: Clock) -> None:
        self._keys, self._rank, self._incarnation, self._clock = keys, rank, incarnation, clock
        self._lines: list[bytes] = []
        self._segment, self._pending = 0, False

    def add(self, event: str, round_no: int, **details: Any) -> None:
        """Note that something happened. `time` is this machine's clock: for people, never for decisions."""
        line = {"event": event, "round": round_no, "by": self._rank, "time": round(self._clock.time(), 3), **details}
        self._lines.append(json.dumps(line, sort_keys=True).encode() + b"\n")
        self._pending = True

    def flush(self, io: StoreIO) -> Steps[None]:
        """Write what is new, and let the oldest segments go."""
        if not self._pending:
            return
        lines, self._pending = list(self._lines), False  # more may be added while these are written
        try:
            yield from io.put(self._keys.events(self._rank, self._incarnation, self._segment), b"".join(lines))
        except StoreError:
            self._pending = True
            raise
        if sum(map(len, lines)) < SEGMENT_BYTES:
            return
        self._lines, self._segment = self._lines[len(lines) :], self._segment + 1
        if self._segment >= KEPT_SEGMENTS:
            oldest = self._segment - KEPT_SEGMENTS
            yield from io.delete(self._keys.events(self._rank, self._incarnation, oldest))
