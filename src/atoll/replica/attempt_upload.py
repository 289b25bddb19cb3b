"""The upload of one attempt of one rank, from the spool to the store: its log, heartbeats, outcome and result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from typing import Any

from atoll.errors import KeyExists
from atoll.keys import RunKeys
from atoll.replica.spool import Spool, read_record, with_warning
from atoll.status import CALLED, LOADING
from atoll.stores.base import Store
from atoll.terminal_text import shown_line

_LOG_PART_BYTES, _LOG_PART_AGE_S = 4 << 20, 5.0
_BEAT_CHANGED_S, _BEAT_IDLE_S = 1.0, 10.0
_INLINE_RESULT_BYTES = 64 << 10
_LAST_LINE_BYTES = 4096
_PACE = ("rounds_total", "round_s", "round_at")

log = logging.getLogger("atoll.replica")


class AttemptUpload:
    """How much of one attempt is in the store."""

    def __init__(self, spool: Spool, plan: dict[str, Any], rank: int, number: int) -> None:
        self._attempt, self._rank, self._number = spool.attempt(rank, number), rank, number
        self._keys = RunKeys(plan["run_id"], plan.get("launch", 1))
        self._echo = bool(plan.get("echo"))
        self._echoed = 0
        self._uploaded: int | None = None
        """Bytes of the log in the store; None if only the store knows, because another uploader may have started."""
        self._first_seen = 0.0
        self._seen = 0
        self._has_start = number == plan.get("first_attempt", number)
        """Whether the store knows that this attempt began. The container registers its first one."""
        self._beat: dict[str, Any] = {}
        self._beat_s = float(plan.get("beat_s", _BEAT_IDLE_S))
        self._beat_at = -self._beat_s
        self.is_replaced = False
        """Whether a later attempt of the rank sends the heartbeats."""

    def upload(self, store: Store, *, final: bool, problem: str = "") -> None:
        """Upload what is due; with `final`, everything. `problem` goes into the heartbeat."""
        self._echo_log()
        self._upload_start(store)
        self._upload_log(store, final)
        self._upload_beat(store, final, problem)
        if final:
            self.upload_outcome(store)

    def _echo_log(self) -> None:
        """In a container, print the log to the container's own output too."""
        size = self._size() if self._echo else 0
        while self._echoed < size:
            data = self._read(self._echoed, min(_LOG_PART_BYTES, size - self._echoed))
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError as exc:  # the terminal was closed; the log and the outcome are uploaded all the same
                log.warning("the output is not shown any more: %s", exc)
                self._echo = False
                return
            self._echoed += len(data)

    def _upload_start(self, store: Store) -> None:
        """Record an attempt that the supervisor of a container started, so that no later container takes its number."""
        if self._has_start:
            return
        try:
            record = {"host": os.uname().nodename, "at": time.time()}
            store.create(self._keys.start(self._rank, self._number), json.dumps(record).encode())
        except KeyExists:
            pass
        self._has_start = True

    def _upload_log(self, store: Store, final: bool) -> None:
        size, now = self._size(), time.time()
        if size == 0:
            return
        done = self._stored_bytes(store) if self._uploaded is None else self._uploaded
        if size > self._seen:
            self._first_seen = now if self._seen <= done else self._first_seen
            self._seen = size
        while size - done >= _LOG_PART_BYTES or (size > done and (final or now - self._first_seen >= _LOG_PART_AGE_S)):
            self._uploaded = None  # unknown during the write: its answer may be lost
            data = self._read(done, min(_LOG_PART_BYTES, size - done))
            span_ms = int(self._first_seen * 1000), int(now * 1000)
            store.create(self._keys.log_chunk(self._rank, self._number, done, *span_ms), data)
            log.debug("rank %d: uploaded %d bytes of log", self._rank, len(data))
            done += len(data)
            self._first_seen = now
        self._uploaded = done

    def _stored_bytes(self, store: Store) -> int:
        keys = list(store.list(self._keys.log_prefix(self._rank, self._number)))
        if not keys:
            return 0
        return self._keys.parse_log_chunk(keys[-1]).offset + len(store.get(keys[-1]))

    def _upload_beat(self, store: Store, final: bool, problem: str) -> None:
        age = time.monotonic() - self._beat_at if self._beat_at >= 0 else self._beat_s
        if self.is_replaced or (age < min(_BEAT_CHANGED_S, self._beat_s) and not final):
            return
        progress = read_record(self._attempt.progress)
        beat = {
            "attempt": self._number,
            "round_no": progress.get("round_no"),
            "metrics": progress.get("metrics", {}),
            **self._last_line(),
            "phase": CALLED if self._attempt.called.exists() else LOADING,
            **{name: progress[name] for name in _PACE if name in progress},
            **({"problem": problem} if problem else {}),
        }
        if final or age >= self._beat_s or beat != self._beat:
            store.put(self._keys.beat(self._rank), json.dumps({**beat, "beat_at": time.time()}).encode())
            self._beat, self._beat_at = beat, time.monotonic()

    def upload_outcome(self, store: Store, warning: str = "") -> None:
        """Upload the outcome and the result, if the attempt has written one."""
        outcome = read_record(self._attempt.outcome)
        if not outcome:
            return  # supervisor and replica died before they wrote one: the backend's status is the answer
        outcome = with_warning(outcome, warning) if warning else outcome
        progress = read_record(self._attempt.progress)
        outcome |= {"round_no": progress.get("round_no"), "metrics": progress.get("metrics", {})}
        outcome |= {"rank": self._rank, "attempt": self._number}  # the replica's own record does not have them
        if self._attempt.result.exists():
            data = self._attempt.result.read_bytes()
            if len(data) <= _INLINE_RESULT_BYTES:
                outcome["result"] = json.loads(data)
            else:
                store.put(self._keys.result(self._rank, self._number), data)
                outcome |= {"result_bytes": len(data), "result_sha256": hashlib.sha256(data).hexdigest()}
        try:
            store.create(self._keys.outcome(self._rank, self._number), json.dumps(outcome).encode())
        except KeyExists:
            pass

    def _size(self) -> int:
        try:
            return os.stat(self._attempt.log).st_size
        except FileNotFoundError:
            return 0

    def _read(self, start: int, length: int) -> bytes:
        with open(self._attempt.log, "rb") as file:
            file.seek(start)
            return file.read(length)

    def _last_line(self) -> dict[str, Any]:
        """The last line with text as a terminal shows it, and whether it has no line end yet."""
        size = self._size()
        tail = self._read(max(0, size - _LAST_LINE_BYTES), _LAST_LINE_BYTES) if size else b""
        lines = [shown_line(line).strip() for line in tail.decode("utf-8", "replace").split("\n")]
        last = next(filter(None, reversed(lines)), "")
        return {"last_line": last.replace("\t", " ")[:200], **({"is_line_open": True} if lines[-1] else {})}
