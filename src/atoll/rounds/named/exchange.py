"""Exchanges by name, as steps to be driven: what `NamedClient` does, without the blocking.

The same name again is the next generation, counted by each rank on its own. Nothing is agreed but the session: a part
is written once, under a key that names session, name, generation and rank, and everybody combines what stands there.

A rank's own parts are deleted by it once every rank is known to be past them: each part says which calls its rank had
behind it. So a session holds about two parts for each rank, however long it lasts.

One rank's part of an exchange on the wire: a frame whose header says exactly what it is part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll._time import backoff
from atoll.errors import CorruptUpdate, PartsDiffer, QuorumLost, RanksMissing, StoreError
from atoll.rounds.frames import checksum, open_frame, seal_frame
from atoll.rounds.io import Gather, Steps
from atoll.rounds.named.cleanup import PendingDeletes, clear_older_sessions, sweep_if_last
from atoll.rounds.named.session import POLL_CAP_S, STARTED_AGAIN, Rendezvous, Session
from atoll.rounds.records import member, text, whole
from atoll.stores.base import Buffer

_SHOWN = 1000
"""Tensors described one by one in a header, which is limited to 1 MiB; the digest covers all of them."""


@dataclass(frozen=True)
class Exchange:
    """Which exchange a part belongs to."""

    session: Session
    name: str
    generation: int


@dataclass(frozen=True)
class NamedContribution:
    """What one rank gives: raw bytes, and what must be equal on every rank for them to be combined."""

    operation: str
    tensors: Sequence[tuple[str, tuple[int, ...]]]
    """(dtype, shape) of each."""
    note: str
    """Anything else that must be equal, such as a digest of the state the values were made from."""
    payload: Buffer

    @property
    def terms(self) -> tuple[str, str]:
        """Equal on two ranks exactly when their parts can be combined."""
        layout = "".join(f"{dtype} {list(shape)}\n" for dtype, shape in self.tensors)
        return checksum(f"{self.operation}\n{layout}".encode()), self.note


@dataclass(frozen=True)
class ReadContribution:
    """A part as it was read and checked, with how far its rank was when it wrote it."""

    rank: int
    terms: tuple[str, str]
    words: str
    payload: memoryview
    call: int
    """The number of this call among those of its rank."""
    oldest: int
    """Every call of that rank below this number was over."""


def seal_part(exchange: Exchange, rank: int, part: NamedContribution, call: int, oldest: int) -> list[memoryview]:
    header = {
        **_identity(exchange, rank),
        "terms": list(part.terms),
        "words": describe(part),
        "call": call,
        "oldest": oldest,
    }
    return seal_frame(header, [part.payload])


def read_back(rank: int, part: NamedContribution, call: int, oldest: int) -> ReadContribution:
    """What `open_part` would give for a part of our own."""
    return ReadContribution(rank, part.terms, describe(part), memoryview(part.payload).cast("B"), call, oldest)


def open_part(exchange: Exchange, rank: int, data: Buffer) -> ReadContribution:
    """A part of exactly this exchange and rank, every byte of it checked."""
    frame = open_frame(data, kind="part")
    wanted = _identity(exchange, rank)
    odd = sorted(name for name, value in wanted.items() if frame.header.get(name) != value)
    if odd:
        message = f"what rank {rank} gave for `{exchange.name}` differs in {', '.join(odd)}"
        raise CorruptUpdate(message, round_no=exchange.generation, rank=rank, check="identity")
    said = member(frame.header, "terms", list)
    if len(said) != 2:
        raise CorruptUpdate("a part has no terms", rank=rank, check="record")
    return ReadContribution(
        rank,
        (text(said[0]), text(said[1])),
        text(frame.header.get("words")),
        frame.payload,
        whole(frame.header.get("call")),
        whole(frame.header.get("oldest")),
    )


def describe(part: NamedContribution) -> str:
    """The terms in words."""
    shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in part.tensors[:_SHOWN])
    more = f" and {len(part.tensors) - _SHOWN} more" if len(part.tensors) > _SHOWN else ""
    of = f", made from {part.note[:16]}" if part.note else ""
    return f"{part.operation} of {shown or 'nothing'}{more}{of}"


def _identity(exchange: Exchange, rank: int) -> dict[str, Any]:
    return {
        "kind": "part",
        "session": exchange.session.nonce,
        "name": exchange.name,
        "generation": exchange.generation,
        "rank": rank,
    }


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

    @property
    def is_restart(self) -> bool:
        return set(self.gone.values()) == {STARTED_AGAIN}

    def as_error(self) -> QuorumLost:
        words = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.gone.items()))
        message = f"the exchange of `{self.exchange.name}` cannot be finished: {words}"
        hint = "ranks start together: make a new one on every rank, from a state that all of them have"
        gone, generation = tuple(sorted(self.gone)), self.exchange.generation
        return QuorumLost(message, round_no=generation, missing=gone, timed_out=False, hint=hint)


class NamedProtocol:
    """One rank's side of the exchanges of a session. Several exchanges may be under way, each under its own name."""

    def __init__(self, place: Rendezvous, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._io, self._keys, self._rank = place.io, place.keys, place.rank
        self._generations: dict[str, int] = {}
        self._litter = PendingDeletes()
        self.session: Session | None = None

    def exchange(self, name: str, part: NamedContribution) -> Steps[list[ReadContribution]]:
        """Give a part and get one from each rank, in rank order; ours is what stands for us in the store."""
        deadline_at = self._io.clock.monotonic() + self._timeout_s
        call = self._litter.begin(name)
        after = -1
        while True:
            session = yield from self._joined(deadline_at, after)
            exchange = Exchange(session, name, self._generations.get(name, 0))
            try:
                found = yield from self._gather(exchange, part, call, deadline_at)
            except PartsDiffer:
                self._end(exchange)
                raise
            except _SessionOver as over:
                # Once a mean was given out, the ranks no longer stand where one that begins anew stands.
                if self._generations or not over.is_restart:
                    raise over.as_error() from None
                after = session.number
                continue
            if not self._generations and session.number:
                yield from clear_older_sessions(self._place, session)
            self._litter.add(self._key(exchange, self._rank), found)
            self._end(exchange)
            return found

    def leave(self) -> Steps[None]:
        """Say goodbye. Whoever says it last deletes what is left of the session."""
        session, self.session = self.session, None
        if session is not None:
            yield from sweep_if_last(self._place, session)

    def _end(self, exchange: Exchange) -> None:
        self._generations[exchange.name] = exchange.generation + 1
        self._litter.end(exchange.name)

    def _joined(self, deadline_at: float, after: int) -> Steps[Session]:
        if self.session is None or self.session.number <= after:
            # Two threads may come here at once; both end with the same seat, because it has our token.
            self.session = yield from self._place.meet(deadline_at, after=after)
        return self.session

    def _gather(
        self, exchange: Exchange, part: NamedContribution, call: int, deadline_at: float
    ) -> Steps[list[ReadContribution]]:
        io, clock = self._io, self._io.clock
        began = clock.monotonic()
        found = {self._rank: (yield from self._publish(exchange, part, call))}
        pauses = backoff(
            self._place.poll_first_s, cap_s=max(POLL_CAP_S, self._place.poll_first_s), jitter=0.25, rng=io.rng
        )
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
                    yield from self._give_up(exchange, dict(gone))
            yield from io.sleep(max(0.0, min(next(pauses), deadline_at - clock.monotonic())))

    def _publish(self, exchange: Exchange, part: NamedContribution, call: int) -> Steps[ReadContribution]:
        """Write our part; the one that stands comes back. On the way, delete what nobody needs any more."""
        key = self._key(exchange, self._rank)
        oldest = self._litter.oldest_call
        ours = read_back(self._rank, part, call, oldest)
        if not (yield from self._io.create(key, seal_part(exchange, self._rank, part, call, oldest))):
            # An earlier try of this very call wrote it, or its answer was lost.
            ours = yield from self._io.read(key, lambda data: open_part(exchange, self._rank, data))
            if ours.terms != part.terms:
                words = f"{ours.words} at first, then {describe(part)}"
                raise PartsDiffer(exchange.name, exchange.generation, {self._rank: words})
        try:
            yield Gather([self._io.delete(old) for old in self._litter.due()], _CONNECTIONS)
        except StoreError:
            pass  # only tidying: the session's end deletes it
        return ours

    def _look(self, exchange: Exchange, missing: list[int]) -> Steps[list[ReadContribution | None]]:
        if len(missing) >= _LIST_FROM:
            session = exchange.session
            prefix = self._keys.generation_prefix(session.number, session.nonce, exchange.name, exchange.generation)
            there = {self._keys.parse_part(key)[1] for key in (yield from self._io.list(prefix))}
            missing = [rank for rank in missing if rank in there]
        found: list[ReadContribution | None] = yield Gather([self._probe(exchange, r) for r in missing], _CONNECTIONS)
        return found

    def _probe(self, exchange: Exchange, rank: int) -> Steps[ReadContribution | None]:
        key = self._key(exchange, rank)
        data = yield from self._io.probe(key)
        if data is None:
            return None

        def opened(data: Buffer) -> ReadContribution:
            return open_part(exchange, rank, data)

        try:
            return opened(data)
        except CorruptUpdate:
            return (yield from self._io.read(key, opened))

    def _give_up(self, exchange: Exchange, gone: dict[int, str]) -> Steps[None]:
        """Look once more: those who left may have given their part before they did."""
        for read in (yield from self._look(exchange, sorted(gone))):
            if read is not None:
                del gone[read.rank]
        if gone:
            raise _SessionOver(exchange, gone)

    def _key(self, exchange: Exchange, rank: int) -> str:
        session = exchange.session
        return self._keys.part(session.number, session.nonce, exchange.name, exchange.generation, rank)

    def _timed_out(self, exchange: Exchange, missing: list[int]) -> RanksMissing:
        ranks = ", ".join(map(str, missing))
        message = f"`{exchange.name}` has no part from rank {ranks} after {self._timeout_s:g} s"
        hint = "look at the logs of these ranks; every rank must exchange the same names"
        return RanksMissing(message, round_no=exchange.generation, missing=tuple(missing), hint=hint)


def _check_terms(exchange: Exchange, found: dict[int, ReadContribution]) -> None:
    if len({read.terms for read in found.values()}) > 1:
        raise PartsDiffer(exchange.name, exchange.generation, {rank: read.words for rank, read in found.items()})
