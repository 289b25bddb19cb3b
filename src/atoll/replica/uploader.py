"""The scribe: carries what replicas write in the spool to the store, so that it outlives the machine.

Logs go in sealed chunks (bounded in size and age), progress as heartbeats, outcomes and results once. It is told by
the shepherd what starts and ends, answers when an ended attempt is safely stored, and if the shepherd dies it ends
whatever the run has left behind.

A shipment: one attempt's files on their way from the spool to the store. Safe to begin again after a crash.

The shepherd's end of the line to the scribe: lines out, acknowledgements in. Never blocks the shepherd.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from atoll.errors import KeyExists, StoreError
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.replica import processes
from atoll.replica.spool import Attempt, Spool, read_record
from atoll.stores.base import Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 4 << 20
SEAL_S = 5.0
BEAT_CHANGED_S, BEAT_IDLE_S = 1.0, 10.0
INLINE_RESULT_BYTES = 64 << 10
_LAST_LINE_BYTES = 4096


class AttemptUpload:
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


_MOST_STARTS = 5


class ScribeLink:
    """Starts the scribe, tells it what happened, and gives up on it after a while so that no run hangs on a store."""

    def __init__(self, spool: Spool, plan: dict[str, Any]) -> None:
        self._spool, self._plan = spool, plan
        self.pid: int | None = None
        self._starts = 0
        self._to_scribe = self._from_scribe = -1
        self._partial = b""
        self._waiting: dict[int, float] = {}
        """Ranks whose end the scribe has not acknowledged, and until when we wait."""

    def start(self, in_child: Callable[[], None]) -> bool:
        """Fork the scribe. False when it has died too often: what waits for it is then given up."""
        self.close()
        self.pid = None
        if self._starts >= _MOST_STARTS:
            self._waiting = dict.fromkeys(self._waiting, 0.0)
            return False
        self._starts += 1
        there_read, here_write = os.pipe()
        here_read, there_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_scribe(self._spool, self._plan, there_read, there_write, (here_read, here_write), in_child)
        os.close(there_read)
        os.close(there_write)
        os.set_blocking(here_read, False)
        os.set_blocking(here_write, False)
        self.pid, self._to_scribe, self._from_scribe = pid, here_write, here_read
        return True

    def tell(self, word: str, rank: int, attempt: int, *, patience_s: float | None = None) -> None:
        """Tell the scribe. With `patience_s`, an answer is expected in that time."""
        if patience_s is not None:
            # Without a scribe there is nothing to wait for: it has died too often.
            self._waiting[rank] = 0.0 if self.pid is None else time.monotonic() + patience_s
        if self._to_scribe >= 0:
            try:
                os.write(self._to_scribe, f"{word} {rank} {attempt}\n".encode())
            except (BrokenPipeError, BlockingIOError):
                pass  # its end is noticed by SIGCHLD, and the next one is told everything again

    def heard(self) -> Iterator[tuple[int, str]]:
        """Ranks that are stored, each with what was in the way, if anything."""
        for line in self._lines():
            _, rank, trouble = (*line.split(" ", 2), "")[:3]
            if self._waiting.pop(int(rank), None) is not None:
                yield int(rank), trouble
        now = time.monotonic()
        for late in [rank for rank, until in self._waiting.items() if now >= until]:
            del self._waiting[late]
            yield late, "its outcome and the end of its log are not in the store: the store did not answer"

    @property
    def patience_at(self) -> float:
        return min(self._waiting.values(), default=float("inf"))

    def descriptors(self) -> list[int]:
        return [self._from_scribe] if self._from_scribe >= 0 else []

    def finish(self) -> None:
        """Tell the scribe that all is done, and see it leave."""
        if self.pid is None:
            return
        self.tell("done", 0, 0)
        pid, self.pid = self.pid, None
        deadline = time.monotonic() + 5.0
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self.close()

    def close(self) -> None:
        for descriptor in (self._to_scribe, self._from_scribe):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_scribe = self._from_scribe = -1
        self._partial = b""

    def _lines(self) -> list[str]:
        data = self._partial
        try:
            while self._from_scribe >= 0 and (more := os.read(self._from_scribe, 65536)):
                data += more
        except BlockingIOError:
            pass
        *lines, self._partial = data.split(b"\n")
        return [line.decode() for line in lines]


def _become_scribe(
    spool: Spool,
    plan: dict[str, Any],
    orders: int,
    answers: int,
    not_ours: tuple[int, int],
    in_child: Callable[[], None],
) -> None:
    """In the child: be the scribe, and never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it leaves when the shepherd does, not before
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in not_ours:
            os.close(descriptor)
        in_child()

        code = Uploader(spool, plan, orders, answers).run()
    except BaseException:  # noqa: BLE001  recorded in the diary; the shepherd starts another one
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


TICK_S = 0.25
_FINAL_PATIENCE_S = 60.0
_RETRY_S = 0.5


class Uploader:
    """Runs in a process of its own, forked from the shepherd before either touched the store."""

    def __init__(self, spool: Spool, plan: dict[str, Any], orders: int, answers: int) -> None:
        self._spool, self._plan = spool, plan
        self._orders, self._answers = orders, answers
        self._store: Store | None = None
        self._shipments: dict[tuple[int, int], AttemptUpload] = {}
        self._ended: dict[tuple[int, int], float] = {}
        """Attempts to store for good, and until when we try."""
        self._partial = b""
        self._trouble = ""

    def run(self) -> int:
        """Work until the shepherd says that all is done, or is gone."""
        while True:
            ready, _, _ = select.select([self._orders], [], [], _RETRY_S if self._trouble else TICK_S)
            data = os.read(self._orders, 65536) if ready else None
            if data == b"":
                return self._orphaned()
            if data and self._obey(data):
                return 0
            self._tick()

    def _obey(self, data: bytes) -> bool:
        """True when all is done."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            word, rank, attempt = line.decode().split(" ")
            if word == "done":
                return True
            which = (int(rank), int(attempt))
            if which not in self._shipments:
                self._shipments[which] = AttemptUpload(self._spool.attempt(*which), self._plan, *which)
            if word == "ended":
                self._ended[which] = time.monotonic() + _FINAL_PATIENCE_S
        return False

    def _tick(self) -> None:
        due = list(self._shipments.items())
        if len(due) > 4 and not self._plan["store"].startswith("file:"):
            list(self._pool.map(lambda item: self._ship(*item), due))  # a distant store: many at once
        else:
            for which, shipment in due:
                self._ship(which, shipment)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(16, "scribe")

    def _ship(self, which: tuple[int, int], shipment: AttemptUpload) -> None:
        is_final = which in self._ended
        try:
            shipment.ship(self._opened(), final=is_final)
            self._trouble = ""
        except (StoreError, OSError) as exc:
            self._complain(exc)
            if is_final and (time.monotonic() > self._ended[which] or not getattr(exc, "retryable", False)):
                text = " ".join(str(exc).split())
                self._answer(which, f"its outcome is not in the store: {text}"[:400])
            return
        if is_final:
            self._answer(which, "")

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self._plan["store"])
        return self._store

    def _answer(self, which: tuple[int, int], trouble: str) -> None:
        self._shipments.pop(which, None)
        self._ended.pop(which, None)
        try:
            os.write(self._answers, f"stored {which[0]} {trouble}".rstrip().encode() + b"\n")
        except BrokenPipeError:
            pass

    def _complain(self, exc: Exception) -> None:
        if str(exc) != self._trouble:
            self._trouble = str(exc)
            with suppress(OSError):  # a full disk, perhaps: no reason to stop trying
                print(f"scribe: {self._trouble}", file=sys.stderr, flush=True)

    def _orphaned(self) -> int:
        """The shepherd died. The leash has killed the replicas; end what slipped it, and save their last words."""
        print("scribe: the shepherd died", file=sys.stderr, flush=True)
        processes.kill_all(self._plan["label"])
        for which in list(self._shipments):
            self._ended.setdefault(which, time.monotonic() + _FINAL_PATIENCE_S)
        deadline = time.monotonic() + _FINAL_PATIENCE_S
        while self._ended and time.monotonic() < deadline:
            self._tick()
            if self._ended:
                time.sleep(_RETRY_S)
        return 0
