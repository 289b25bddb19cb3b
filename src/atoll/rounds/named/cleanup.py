"""Tidying up after exchanges: parts that every rank is past, sessions that are over."""

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
    """The parts a rank has written, until every rank has said that it is past the call they belong to."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[str, int] = {}
        self._written: list[tuple[str, dict[int, int]]] = []
        self._past: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> int:
        """The number of a call. One that failed stays open: it may be made again, and needs the parts it missed."""
        with self._lock:
            if name not in self._open:
                self._open[name] = self._next
                self._next += 1
            return self._open[name]

    def end(self, name: str) -> None:
        """The call is over; what it asked for will not be asked for again."""
        with self._lock:
            del self._open[name]

    @property
    def oldest_call(self) -> int:
        """Every call of this rank below this number is over."""
        with self._lock:
            return min(self._open.values(), default=self._next)

    def add(self, key: str, found: Sequence[ReadContribution]) -> None:
        """An exchange is complete: remember our part, and how far the others were."""
        with self._lock:
            self._written.append((key, {read.rank: read.call for read in found}))
            for read in found:
                self._past[read.rank] = max(self._past.get(read.rank, 0), read.oldest)

    def due(self) -> list[str]:
        """Keys to delete now; each is named once."""
        with self._lock:
            is_over = [all(self._past[rank] > call for rank, call in calls.items()) for _, calls in self._written]
            due = [key for (key, _), over in zip(self._written, is_over, strict=True) if over]
            self._written = [row for row, over in zip(self._written, is_over, strict=True) if not over]
            return due


def clear_older_sessions(place: Rendezvous, session: Session) -> Steps[None]:
    """Delete what this rank left in earlier sessions: all ranks are here now, so nobody is there.

    Except for another client of this very process that is still in use.
    """
    try:
        seen = yield from place.attendance()
        older = [number for number in seen.seated if number < session.number]
        own = {number for number in older if place.rank in seen.seated[number]}
        alive = set()
        for number in own:
            if (yield from place.is_alive_here(number)) and place.rank not in seen.left.get(number, ()):
                alive.add(number)
        parts = [
            key
            for key in (yield from place.io.list(place.keys.parts_prefix()))
            if _is_own_and_old(place.keys.parse_part(key), place.rank, session.number, alive)
        ]
        seats = [make(number, place.rank) for number in own - alive for make in (place.keys.goodbye, place.keys.seat)]
        yield Gather([place.io.delete(key) for key in [*parts, *seats]], _WIDTH)
    except StoreError:
        pass  # only tidying; the next session tries again


def sweep_if_last(place: Rendezvous, session: Session) -> Steps[None]:
    """Say goodbye to a session; if everybody has, delete all of it but a mark that it was there.

    Without the mark the next job would use the same session number, and seats deleted late could be its own.
    """
    io, keys = place.io, place.keys
    yield from io.create(keys.goodbye(session.number, place.rank), session.seats[place.rank].seal())
    seen = yield from place.attendance()
    if seen.left.get(session.number) != place.everyone:
        return
    yield from io.create(keys.floor(session.number + 1), seal_record({"kind": "floor", "session": session.number + 1}))
    parts = yield from io.list(keys.session_prefix(session.number, session.nonce))
    old = [key for key in (yield from io.list(keys.seats_prefix())) if keys.parse_seat(key)[0] <= session.number]
    yield Gather([io.delete(key) for key in [*parts, *old]], _WIDTH)


def _is_own_and_old(where: tuple[int, int], rank: int, session: int, alive: Collection[int]) -> bool:
    return where[1] == rank and where[0] < session and where[0] not in alive
