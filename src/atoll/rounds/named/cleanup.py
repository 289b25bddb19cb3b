"""Deletes contributions that every rank has read, and sessions that are over."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from atoll.errors import StoreError
from atoll.rounds.frames import seal_record
from atoll.rounds.io import Gather, Steps
from atoll.rounds.named.session import Rendezvous, Session

if TYPE_CHECKING:
    from atoll.rounds.named.exchange import ReadContribution

_WIDTH = 8


class PendingDeletes:
    """The contributions that a rank has uploaded and that some rank may still need."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[str, int] = {}
        self._written: list[tuple[str, dict[int, int]]] = []
        self._past: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> int:
        """The number of a call. A failed call stays open, because the caller may repeat it."""
        with self._lock:
            if name not in self._open:
                self._open[name] = self._next
                self._next += 1
            return self._open[name]

    def end(self, name: str) -> None:
        """The call is over; this rank no longer needs the contributions to it."""
        with self._lock:
            del self._open[name]

    @property
    def oldest_call(self) -> int:
        """Every call of this rank below this number is over."""
        with self._lock:
            return min(self._open.values(), default=self._next)

    def add(self, key: str, found: Sequence[ReadContribution]) -> None:
        """An exchange is complete: keep the key of our contribution, and the progress of the others."""
        with self._lock:
            self._written.append((key, {read.rank: read.call for read in found}))
            for read in found:
                self._past[read.rank] = max(self._past.get(read.rank, 0), read.oldest)

    def due(self) -> list[str]:
        """The keys that no rank needs any more; each is returned once."""
        with self._lock:
            is_over = [all(self._past[rank] > call for rank, call in calls.items()) for _, calls in self._written]
            due = [key for (key, _), over in zip(self._written, is_over, strict=True) if over]
            self._written = [row for row, over in zip(self._written, is_over, strict=True) if not over]
            return due


def clear_older_sessions(rendezvous: Rendezvous, session: Session) -> Steps[None]:
    """Delete this rank's objects of earlier sessions: all ranks are in this session, so none needs them.

    Keeps the sessions of other open clients of this process.
    """
    try:
        seen = yield from rendezvous.attendance()
        older = [number for number in seen.seated if number < session.number]
        own = {number for number in older if rendezvous.rank in seen.seated[number]}
        alive = set()
        for number in own:
            if (yield from rendezvous.is_alive_here(number)) and rendezvous.rank not in seen.left.get(number, ()):
                alive.add(number)
        parts = [
            key
            for key in (yield from rendezvous.io.list(rendezvous.keys.parts_prefix()))
            if _is_own_and_old(rendezvous.keys.parse_part(key), rendezvous.rank, session.number, alive)
        ]
        seats = [
            make(number, rendezvous.rank)
            for number in own - alive
            for make in (rendezvous.keys.goodbye, rendezvous.keys.seat)
        ]
        yield Gather([rendezvous.io.delete(key) for key in [*parts, *seats]], _WIDTH)
    except StoreError:
        pass  # the next session tries again


def sweep_if_last(rendezvous: Rendezvous, session: Session) -> Steps[None]:
    """Leave a session; the last rank deletes all of its objects and creates the floor of the next session.

    Without the floor the next job would use the same session number, and a late delete could remove its seats.
    """
    io, keys = rendezvous.io, rendezvous.keys
    yield from io.create(keys.goodbye(session.number, rendezvous.rank), session.seats[rendezvous.rank].seal())
    seen = yield from rendezvous.attendance()
    if seen.left.get(session.number) != rendezvous.everyone:
        return
    yield from io.create(keys.floor(session.number + 1), seal_record({"kind": "floor", "session": session.number + 1}))
    parts = yield from io.list(keys.session_prefix(session.number, session.nonce))
    old = [key for key in (yield from io.list(keys.seats_prefix())) if keys.parse_seat(key)[0] <= session.number]
    yield Gather([io.delete(key) for key in [*parts, *old]], _WIDTH)


def _is_own_and_old(where: tuple[int, int], rank: int, session: int, alive: Collection[int]) -> bool:
    return where[1] == rank and where[0] < session and where[0] not in alive
