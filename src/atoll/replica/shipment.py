"""A shipment: one attempt's files on their way from the spool to the store. Safe to begin again after a crash."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

from atoll.errors import KeyExists
from atoll.keys import RunKeys
from atoll.replica.spool import Attempt, read_record
from atoll.stores.base import Store

CHUNK_BYTES = 4 << 20
SEAL_S = 5.0
BEAT_CHANGED_S, BEAT_IDLE_S = 1.0, 10.0
INLINE_RESULT_BYTES = 64 << 10
_LAST_LINE_BYTES = 4096


class Shipment:
    """Remembers how far one attempt has been shipped."""

    def __init__(self, attempt: Attempt, plan: dict[str, Any], rank: int, number: int) -> None:
        self._attempt, self._rank, self._number = attempt, rank, number
        self._keys = RunKeys(plan["run_id"])
        self._echo = bool(plan.get("echo"))
        self._echoed = 0
        self._sealed: int | None = None
        """How much of the log is in the store; asked of the store first, in case an earlier scribe did part of it."""
        self._first_seen = 0.0
        self._seen = 0
        self._beat: dict[str, Any] = {}
        self._beat_at = -BEAT_IDLE_S

    def ship(self, store: Store, *, final: bool) -> None:
        """Move what is due; with `final`, everything there is."""
        self._echo_log()
        self._ship_log(store, final)
        self._ship_beat(store, final)
        if final:
            self._ship_outcome(store)

    def _echo_log(self) -> None:
        """In a container, the log also goes to the container's own output."""
        size = self._size() if self._echo else 0
        while self._echoed < size:
            data = self._read(self._echoed, min(CHUNK_BYTES, size - self._echoed))
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            self._echoed += len(data)

    def _ship_log(self, store: Store, final: bool) -> None:
        size, now = self._size(), time.time()
        if size == 0:
            return
        sealed = self._resume(store) if self._sealed is None else self._sealed
        if size > self._seen:
            self._first_seen = now if self._seen <= sealed else self._first_seen
            self._seen = size
        while size - sealed >= CHUNK_BYTES or (size > sealed and (final or now - self._first_seen >= SEAL_S)):
            self._sealed = None  # unknown while the write is under way: its answer may be lost
            data = self._read(sealed, min(CHUNK_BYTES, size - sealed))
            span_ms = int(self._first_seen * 1000), int(now * 1000)
            store.create(self._keys.log_chunk(self._rank, self._number, sealed, *span_ms), data)
            sealed += len(data)
            self._first_seen = now
        self._sealed = sealed

    def _resume(self, store: Store) -> int:
        keys = list(store.list(self._keys.log_prefix(self._rank, self._number)))
        if not keys:
            return 0
        return self._keys.parse_log_chunk(keys[-1]).offset + len(store.get(keys[-1]))

    def _ship_beat(self, store: Store, final: bool) -> None:
        age = time.monotonic() - self._beat_at if self._beat_at >= 0 else BEAT_IDLE_S
        if age < BEAT_CHANGED_S and not final:
            return
        progress = read_record(self._attempt.progress)
        beat = {
            "attempt": self._number,
            "round_no": progress.get("round_no"),
            "metrics": progress.get("metrics", {}),
            "last_line": self._last_line(),
        }
        if final or age >= BEAT_IDLE_S or beat != self._beat:
            store.put(self._keys.beat(self._rank), json.dumps({**beat, "beat_at": time.time()}).encode())
            self._beat, self._beat_at = beat, time.monotonic()

    def _ship_outcome(self, store: Store) -> None:
        outcome = read_record(self._attempt.outcome)
        if not outcome:
            return  # the shepherd died before it could judge: the backend's word stands
        progress = read_record(self._attempt.progress)
        outcome |= {"round_no": progress.get("round_no"), "metrics": progress.get("metrics", {})}
        outcome |= {"rank": self._rank, "attempt": self._number}  # not there if the shepherd died before it could judge
        if self._attempt.result.exists():
            outcome |= self._ship_result(store)
        try:
            store.create(self._keys.outcome(self._rank, self._number), json.dumps(outcome).encode())
        except KeyExists:
            pass

    def _ship_result(self, store: Store) -> dict[str, Any]:
        data = self._attempt.result.read_bytes()
        if len(data) <= INLINE_RESULT_BYTES:
            return {"result": json.loads(data)}
        store.put(self._keys.result(self._rank, self._number), data)
        return {"result_bytes": len(data), "result_sha256": hashlib.sha256(data).hexdigest()}

    def _size(self) -> int:
        try:
            return os.stat(self._attempt.log).st_size
        except FileNotFoundError:
            return 0

    def _read(self, start: int, length: int) -> bytes:
        with open(self._attempt.log, "rb") as file:
            file.seek(start)
            return file.read(length)

    def _last_line(self) -> str:
        size = self._size()
        tail = self._read(max(0, size - _LAST_LINE_BYTES), _LAST_LINE_BYTES) if size else b""
        lines = tail.decode("utf-8", "replace").split("\n")
        shown = next((line for line in reversed(lines) if line.strip()), "")
        return "".join(c for c in shown.rpartition("\r")[2] if c.isprintable())[:200]
