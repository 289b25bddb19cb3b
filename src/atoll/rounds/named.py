"""Exchanges by name: every rank gives its part under a name, and gets everybody's parts, in rank order.

    client = NamedClient(store, "round-7", rank, world_size)
    parts = client.exchange("grads", part)      # blocks; one part from each rank

The same name again is the next generation, counted by each rank on its own. Nothing is agreed but the session: a part
is written once, under a key that names session, name, generation and rank, and everybody combines what stands there.

A rank's own parts are deleted by it once every rank is known to be past them: each part says which calls its rank had
behind it. So a session holds about two parts for each rank, however long it lasts.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from atoll._time import SYSTEM_CLOCK, Clock, backoff
from atoll.errors import CorruptUpdate, QuorumLost, StoreError
from atoll.rounds.drive import Driver
from atoll.rounds.named_keys import NamedKeys
from atoll.rounds.named_litter import Litter, clear_older_sessions, sweep_if_last
from atoll.rounds.named_part import Exchange, Part, PartsDiffer, ReadPart, open_part, seal_part
from atoll.rounds.named_session import POLL_CAP_S, Rendezvous, Session
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.requests import Counters, Requests
from atoll.stores.base import Buffer, Store

_PROCESS = uuid.uuid4().hex
_CONNECTIONS = 8
_LIST_FROM = 13
"""From this many missing ranks on, one LIST is cheaper than asking for each."""
_LOOK_AFTER_S = 1.0
"""How long to miss somebody before asking whether they are still there; doubled every time."""


class _SessionOver(Exception):
    """Ranks of this session will not come any more."""

    def __init__(self, exchange: Exchange, gone: dict[int, str]) -> None:
        self.exchange, self.gone = exchange, gone
        super().__init__(exchange.name)

    def as_error(self) -> QuorumLost:
        words = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.gone.items()))
        message = f"the exchange of `{self.exchange.name}` cannot be finished: {words}"
        hint = "ranks start together: make a new one on every rank, from a state that all of them have"
        return QuorumLost(message, round_no=self.exchange.generation, missing=tuple(sorted(self.gone)), hint=hint)


class NamedClient:
    """One rank's side. Threads may exchange at the same time, under different names."""

    def __init__(
        self,
        store: Store,
        space: str | None,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 1800.0,
        poll_first_s: float = 0.05,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        process: str | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._store, self._clock, self._rank = store, clock, rank
        self._io = Requests(clock, rng or random.Random(), retry_s=min(120.0, timeout_s / 2))
        self._keys = NamedKeys(space, world_size)
        # A forked child is another process, though it has its parent's memory.
        process = process or f"{_PROCESS}-{os.getpid()}"
        self._place = Rendezvous(self._io, self._keys, rank, process, poll_first_s)
        self._session: Session | None = None
        self._generations: dict[str, int] = {}
        self._litter = Litter(rank)
        self._meeting, self._lock = threading.Lock(), threading.Lock()
        self._idle: list[Driver] = []

    @property
    def counters(self) -> Counters:
        """Requests and bytes since the client was made."""
        return self._io.counters

    @property
    def session(self) -> str | None:
        """Names the session; the same on every rank, and None before the first exchange."""
        return None if self._session is None else self._session.nonce

    def exchange(self, name: str, part: Part) -> list[ReadPart]:
        """Give a part and get one from each rank, in rank order; ours is what stands for us in the store.

        After an error the same call can be made again: it goes on waiting for the same generation. Only `PartsDiffer`
        ends the generation, because every rank sees it.
        """
        deadline_at = self._clock.monotonic() + self.timeout_s
        after = -1
        with self._driver() as drive, self._litter.call() as call:
            while True:
                session = self._joined(drive, deadline_at, after)
                exchange = Exchange(session, name, self._generations.get(name, 0))
                try:
                    found = drive(self._gather(exchange, part, call, deadline_at))
                except PartsDiffer:
                    self._generations[name] = exchange.generation + 1
                    raise
                except _SessionOver as over:
                    if self._generations:  # a mean was given out here: the ranks no longer stand where they began
                        raise over.as_error() from None
                    after = session.number
                    continue
                if not self._generations and session.number:
                    drive(clear_older_sessions(self._place, session))
                self._generations[name] = exchange.generation + 1
                self._litter.add(self._key(exchange, self._rank), found)
                return found

    def close(self) -> None:
        """Say goodbye. Whoever says it last deletes what is left of the session; ends the threads."""
        session, self._session = self._session, None
        try:
            if session is not None:
                with self._driver() as drive:
                    drive(sweep_if_last(self._place, session))
        finally:
            for driver in self._idle:
                driver.close()
            self._idle.clear()

    def _joined(self, drive: Driver, deadline_at: float, after: int) -> Session:
        with self._meeting:
            if self._session is None or self._session.number <= after:
                self._session = drive(self._place.meet(uuid.uuid4().hex, deadline_at, after=after))
            return self._session

    def _gather(self, exchange: Exchange, part: Part, call: int, deadline_at: float) -> Steps[list[ReadPart]]:
        io, clock = self._io, self._clock
        began = clock.monotonic()
        found = {self._rank: (yield from self._publish(exchange, part, call))}
        pauses = backoff(self._place.poll_first_s, cap_s=max(POLL_CAP_S, self._place.poll_first_s), jitter=0.25, rng=io.rng)
        look_at = began + _LOOK_AFTER_S
        while True:
            missing = sorted(self._place.everyone - set(found))
            found |= {read.rank: read for read in (yield from self._look(exchange, missing)) if read is not None}
            _check_terms(exchange, found)
            missing = sorted(self._place.everyone - set(found))
            if not missing:
                return [found[rank] for rank in sorted(found)]
            now = clock.monotonic()
            if now >= deadline_at:
                raise self._timed_out(exchange, missing)
            if now >= look_at:
                look_at = now + (now - began)
                gone = yield from self._place.absences(exchange.session, missing)
                if gone:
                    yield from self._give_up(exchange, missing, dict(gone))
            yield from io.sleep(max(0.0, min(next(pauses), deadline_at - clock.monotonic())))

    def _publish(self, exchange: Exchange, part: Part, call: int) -> Steps[ReadPart]:
        """Write our part; the one that stands comes back. On the way, delete what nobody needs any more."""
        key = self._key(exchange, self._rank)
        sealed = seal_part(exchange, self._rank, part, call, self._litter.oldest_call)
        if (yield from self._io.create(key, sealed)):
            ours = open_part(exchange, self._rank, b"".join(sealed[:1]) + b"".join(sealed[1:]))
        else:  # an earlier try of this very call
            ours = yield from self._io.read(key, lambda data: open_part(exchange, self._rank, data))
        try:
            yield Gather([self._io.delete(old) for old in self._litter.due()], _CONNECTIONS)
        except StoreError:
            pass  # only tidying: the session's end deletes it
        return ours

    def _look(self, exchange: Exchange, missing: list[int]) -> Steps[list[ReadPart | None]]:
        if len(missing) >= _LIST_FROM:
            session = exchange.session
            prefix = self._keys.generation_prefix(session.number, session.nonce, exchange.name, exchange.generation)
            there = {self._keys.parse_part(key)[1] for key in (yield from self._io.list(prefix))}
            missing = [rank for rank in missing if rank in there]
        found: list[ReadPart | None] = yield Gather([self._probe(exchange, r) for r in missing], _CONNECTIONS)
        return found

    def _probe(self, exchange: Exchange, rank: int) -> Steps[ReadPart | None]:
        key = self._key(exchange, rank)
        data = yield from self._io.probe(key)
        if data is None:
            return None

        def opened(data: Buffer) -> ReadPart:
            return open_part(exchange, rank, data)

        try:
            return opened(data)
        except CorruptUpdate:
            return (yield from self._io.read(key, opened))

    def _give_up(self, exchange: Exchange, missing: list[int], gone: dict[int, str]) -> Steps[None]:
        """Look once more: those who left may have given their part before they did."""
        if not all((yield from self._look(exchange, [rank for rank in missing if rank in gone]))):
            raise _SessionOver(exchange, gone)

    def _key(self, exchange: Exchange, rank: int) -> str:
        session = exchange.session
        return self._keys.part(session.number, session.nonce, exchange.name, exchange.generation, rank)

    def _timed_out(self, exchange: Exchange, missing: list[int]) -> QuorumLost:
        ranks = ", ".join(map(str, missing))
        message = f"`{exchange.name}` has no part from rank {ranks} after {self.timeout_s:g} s"
        hint = "look at the logs of these ranks; every rank must exchange the same names"
        return QuorumLost(message, round_no=exchange.generation, missing=tuple(missing), hint=hint)

    @contextmanager
    def _driver(self) -> Iterator[Driver]:
        """A driver of our own: one must not be shared between threads."""
        with self._lock:
            driver = self._idle.pop() if self._idle else Driver(self._store, self._clock, connections=_CONNECTIONS)
        try:
            yield driver
        finally:
            with self._lock:
                self._idle.append(driver)


def _check_terms(exchange: Exchange, found: dict[int, ReadPart]) -> None:
    if len({read.terms for read in found.values()}) > 1:
        raise PartsDiffer(exchange.name, exchange.generation, {rank: read.words for rank, read in found.items()})
