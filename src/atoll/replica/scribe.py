"""The scribe: carries what replicas write in the spool to the store, so that it outlives the machine.

Logs go in sealed chunks (bounded in size and age), progress as heartbeats, outcomes and results once. It is told by
the shepherd what starts and ends, answers when an ended attempt is safely stored, and if the shepherd dies it ends
whatever the run has left behind.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from atoll.errors import StoreError
from atoll.registry import open_store
from atoll.replica import processes
from atoll.replica.shipment import Shipment
from atoll.replica.spool import Spool
from atoll.stores.base import Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

TICK_S = 0.25
_FINAL_PATIENCE_S = 60.0
_RETRY_S = 0.5


class Scribe:
    """Runs in a process of its own, forked from the shepherd before either touched the store."""

    def __init__(self, spool: Spool, plan: dict[str, Any], orders: int, answers: int) -> None:
        self._spool, self._plan = spool, plan
        self._orders, self._answers = orders, answers
        self._store: Store | None = None
        self._shipments: dict[tuple[int, int], Shipment] = {}
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
                self._shipments[which] = Shipment(self._spool.attempt(*which), self._plan, *which)
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

    def _ship(self, which: tuple[int, int], shipment: Shipment) -> None:
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
