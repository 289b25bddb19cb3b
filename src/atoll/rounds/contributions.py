"""What a mean is made of: its participants, the offers that the commit names, and each participant's chunks.

The mean of a chunk is stored under the id of its participants, which depends on their ranks, incarnations and weights
only. So a replica can average and publish a chunk before the commit, for the participants it expects; if the commit
names others, that mean is never read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from atoll.errors import CorruptUpdate, KeyNotFound, LeftBehind, StoreError
from atoll.rounds.chunks import Encoded, MeanName, inline_chunk, open_update, update_header
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.context import RoundContext
from atoll.rounds.events import LONG_WAIT_S
from atoll.rounds.frames import checksum, digest
from atoll.rounds.io import Gather, Steps
from atoll.rounds.layout import BufferSink, Sink, Source
from atoll.rounds.liveness import DeadWatch
from atoll.rounds.one_pass import sum_of_squares
from atoll.rounds.publish import put_chunk
from atoll.rounds.records import Commit, Contribution, Offer
from atoll.rounds.reduce import Coefficients
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer

log = logging.getLogger("atoll.rounds")


@dataclass(frozen=True)
class Participant:
    """One process that contributes to a round, and the weight of its update."""

    rank: int
    incarnation: int
    weight: float


@dataclass(frozen=True)
class Participants:
    """The participants of a round, in rank order."""

    in_order: tuple[Participant, ...]

    @classmethod
    def of_commit(cls, commit: Commit) -> Participants:
        return cls(tuple(Participant(c.rank, c.incarnation, c.weight) for c in commit.contributions))

    @classmethod
    def of_offers(cls, offers: Iterable[Offer]) -> Participants:
        return cls(tuple(Participant(o.rank, o.incarnation, o.weight) for o in sorted(offers, key=lambda o: o.rank)))

    def __iter__(self) -> Iterator[Participant]:
        return iter(self.in_order)

    def __len__(self) -> int:
        return len(self.in_order)

    @cached_property
    def id(self) -> str:
        """The first 16 hex digits of the XXH3-128 of one line for each participant: rank, incarnation and weight."""
        lines = (f"{one.rank} {one.incarnation} {float(one.weight).hex()}\n" for one in self)
        return digest("".join(lines).encode())[:16]

    @cached_property
    def coefficients(self) -> Coefficients:
        return Coefficients.of([one.weight for one in self])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self)

    def owner(self, chunk: int) -> int:
        """The rank that averages and publishes a chunk."""
        return self.ranks[chunk % len(self.ranks)]


@dataclass(frozen=True)
class PrefetchedMean:
    """A chunk that was averaged before the commit: valid if the commit names the expected participants."""

    participants_id: str
    mode: str
    """Published means (`scatter`) are rounded by their codec; means that each replica computes (`whole`) are not."""
    parts: tuple[str | None, ...]
    """The checksum of each participant's chunk."""
    values: F32 | None
    """None when they are in the sink already."""


@dataclass
class MeanTask:
    """The computation of the mean of one commit by one replica."""

    context: RoundContext
    commit: Commit
    sink: Sink
    own: Offer | None = None
    """The offer of this process, if the commit names it."""
    own_digest: str = ""
    """Digest of the update in `source`. An earlier incarnation of this rank may have published the same update."""
    source: Source | None = None
    """Our own update in memory: it need not be downloaded, and can replace a damaged chunk in the store."""
    offers: dict[int, Offer] = field(default_factory=dict)
    prefetched: dict[int, PrefetchedMean] = field(default_factory=dict)
    uploaded_at: dict[int, float] = field(default_factory=dict)
    """Rank → when we last saw a chunk of it that it uploaded late."""
    silent: set[int] = field(default_factory=set)
    """Owners that did not publish a chunk in time: we do not wait for their other chunks."""
    awaited: set[int] = field(default_factory=set)
    """Ranks that have contributions that no other rank has, and that we wait for."""
    reported: set[int] = field(default_factory=set)
    """Ranks that our last `waiting` event names."""
    reported_dead: set[int] = field(default_factory=set)
    """Those of them that are dead."""

    def __post_init__(self) -> None:
        self.grid: Grid = self.context.grid(self.commit.fragment)
        self.participants = Participants.of_commit(self.commit)
        self.began = self.context.io.clock.monotonic()
        self.watch = DeadWatch(self.context.liveness)
        named = self.commit.contribution(self.context.rank)
        if self.own is not None and (named is None or not is_named(self.own, named)):
            self.own = None

    @property
    def deadline_s(self) -> float:
        return self.context.quorum.deadline_s

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - (self.context.io.clock.monotonic() - self.began)

    def is_ours(self, offer: Offer) -> bool:
        """Whether the values behind an offer are in our memory."""
        return self.source is not None and offer.rank == self.context.rank and offer.digest == self.own_digest

    @property
    def ours(self) -> Offer | None:
        """The committed offer of our rank, from any of its incarnations, if its values are in our memory."""
        named, offer = self.commit.contribution(self.context.rank), self.offers.get(self.context.rank)
        if named is None or offer is None or not is_named(offer, named) or not self.is_ours(offer):
            return None
        return offer

    def is_local_only(self, chunk: int) -> bool:
        """Whether a participant may not have uploaded its part of this chunk."""
        offers = [self.offers.get(rank) for rank in self.participants.ranks]
        return any(offer is None or offer.is_local_only(chunk) for offer in offers)

    def name(self, chunk: int) -> MeanName:
        return mean_name(self.context, self.commit.round_no, self.commit.fragment, self.participants.id, chunk)

    def key(self, chunk: int) -> str:
        return self.context.keys.mean(self.commit.round_no, self.participants.id, chunk)

    def fetch_offers(self) -> Steps[None]:
        """Read the offers that the commit names and that we have not seen."""
        if self.own is not None:
            self.offers[self.own.rank] = self.own
        wanted = [c for c in self.commit.contributions if not is_named(self.offers.get(c.rank), c)]
        found: list[Offer | None] = yield Gather([self._try_offer(c) for c in wanted], self.context.small_width)
        self.offers |= {offer.rank: offer for offer in found if offer is not None}

    def _try_offer(self, named: Contribution) -> Steps[Offer | None]:
        """An offer, or None when it cannot be read: replicas that could read it may still publish the means."""
        try:
            return (yield from self._fetch_offer(named))
        except CorruptUpdate:
            self.offers.pop(named.rank, None)
            return None

    def offer_of(self, rank: int) -> Steps[Offer]:
        offer = self.offers.get(rank)
        if offer is None:
            named = self.commit.contribution(rank)
            assert named is not None
            offer = self.offers[rank] = yield from self._fetch_offer(named)
        return offer

    def _fetch_offer(self, named: Contribution) -> Steps[Offer]:
        context, round_no = self.context, self.commit.round_no
        layout = context.layout(self.commit.fragment)

        def opened(data: Buffer) -> Offer:
            offer = Offer.open(data, run_id=context.run_id, round_no=round_no, rank=named.rank, slot=named.slot)
            if not is_named(offer, named) or offer.layout != layout.hash or len(offer.chunks) != len(self.grid):
                message = f"the offer of rank {named.rank} is not the one that was committed"
                raise CorruptUpdate(message, round_no=round_no, rank=named.rank, check="digest")
            return offer

        try:
            key = context.keys.offer(round_no, named.rank, named.slot)
            return (yield from context.io.read(key, opened, is_promised=True))
        except KeyNotFound as exc:
            raise self.retired(exc) from exc

    def contribution_of(self, rank: int, chunk: int) -> Steps[Encoded]:
        """The bytes of one rank's chunk, checked against what the commit names."""
        offer = yield from self.offer_of(rank)
        if self.is_ours(offer) and (own := self.own_chunk(offer, chunk)) is not None:
            return own
        if offer.inline is not None:
            return inline_chunk(offer, self.grid, chunk)
        if offer.is_local_only(chunk) and not (yield from self.is_uploaded_late(offer, chunk, self.deadline_s)):
            message = f"rank {rank} did not upload chunk {chunk}, which it had skipped"
            raise CorruptUpdate(message, round_no=offer.round_no, rank=rank, check="missing")
        return (yield from self.read_contribution(offer, chunk))

    def read_contribution(self, offer: Offer, chunk: int) -> Steps[Encoded]:
        """A chunk of an update from the store."""
        header = update_header(offer, self.grid, chunk)
        key = self.context.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)

        def opened(data: Buffer) -> Encoded:
            return open_update(data, header, wanted=offer.chunks[chunk])

        try:
            return (yield from self.context.io.read(key, opened, is_promised=True))
        except KeyNotFound as exc:
            raise self.retired(exc) from exc

    def own_chunk(self, offer: Offer, chunk: int) -> Encoded | None:
        """A chunk of our own update from memory; None when the caller has changed it since the offer."""
        assert self.source is not None
        payload = joined(codec(offer.codec).encode(self.source.read(*self.grid.span(chunk))))
        check = checksum(payload)
        return Encoded(payload, check, offer.weight) if not offer.chunks or check == offer.chunks[chunk] else None

    def is_uploaded_late(self, offer: Offer, chunk: int, patience_s: float) -> Steps[bool]:
        """Wait for a chunk that its rank skipped; False when the rank has uploaded nothing for `patience_s`.

        A rank skips the chunks it expects to average itself. It uploads them when the commit names other owners.
        """
        context, clock = self.context, self.context.io.clock
        key = context.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)
        pauses = context.pauses()
        while (yield from context.io.probe(key)) is None:
            silent_s = clock.monotonic() - self.uploaded_at.get(offer.rank, self.began)
            if silent_s >= patience_s or self.time_left_s <= 0:
                return False
            goes_on = not context.quorum.is_strict
            if not goes_on:
                yield from self.check_alive(offer.rank)
            left_s = patience_s - silent_s if goes_on else self.time_left_s
            yield from self.report_wait(offer.rank, silent_s, left_s, goes_on)
            yield from context.io.sleep(next(pauses))
        self.uploaded_at[offer.rank] = clock.monotonic()
        self.awaited.discard(offer.rank)
        return True

    def check_alive(self, rank: int) -> Steps[None]:
        """Raise `QuorumLost` if this rank, whose contribution no other rank has, has been dead for long enough."""
        if rank == self.context.rank:
            return
        self.awaited.add(rank)
        yield from self.watch.look(list(self.awaited))
        left_s = self.watch.dead().get(rank)
        if left_s == 0:
            raise self.watch.error(self.commit.round_no, [rank], [rank])
        if left_s is not None and rank not in self.reported_dead:
            self.reported_dead.add(rank)
            self.reported.add(rank)
            yield from self._write_wait(sorted(self.reported), min(left_s, self.time_left_s), False)

    def upload_late(self, chunk: int) -> Steps[None]:
        """Upload a chunk of our update that we skipped, or that is damaged in the store."""
        assert self.ours is not None
        assert self.source is not None
        log.debug("round %d: rank %d uploads chunk %d late", self.commit.round_no, self.context.rank, chunk)
        values = self.source.read(*self.grid.span(chunk))
        encoded = codec(self.ours.codec).encode(values)
        yield from put_chunk(self.context, self.ours, chunk, encoded, None, math.sqrt(sum_of_squares(values)))

    def report_wait(self, rank: int, waited_s: float, left_s: float, goes_on: bool) -> Steps[None]:
        """Once a wait is long, write a `waiting` event for people who watch the run: one for each rank."""
        if waited_s >= LONG_WAIT_S and rank not in self.reported:
            self.reported.add(rank)
            yield from self._write_wait(sorted(self.reported), left_s, goes_on)

    def clear_wait(self) -> Steps[None]:
        """Write that the wait is over, if a wait was reported."""
        if self.reported:
            yield from self._write_wait([], 0.0, True)

    def _write_wait(self, ranks: list[int], left_s: float, goes_on: bool) -> Steps[None]:
        context = self.context
        until = round(context.io.clock.time() + max(0.0, left_s), 3)
        then = "go_on" if goes_on else "give_up"
        context.events.add("waiting", self.commit.round_no, **{"for": ranks}, until=until, then=then, least=None)
        with suppress(StoreError):  # the event is only information, so its failure must not end the round
            yield from context.events.flush(context.io)

    def retired(self, exc: KeyNotFound) -> LeftBehind:
        message = f"round {self.commit.round_no} was deleted while it was being read: {exc.key}"
        return LeftBehind(message, round_no=self.commit.round_no, latest=self.commit.round_no)


def mean_name(context: RoundContext, round_no: int, fragment: int, participants_id: str, chunk: int) -> MeanName:
    layout, grid, mean_codec = context.layout(fragment), context.grid(fragment), context.agreement.mean_codec
    return MeanName(context.run_id, round_no, fragment, participants_id, layout.hash, mean_codec, grid, chunk)


def is_named(offer: Offer | None, named: Contribution) -> bool:
    """Whether this is the offer that a commit names."""
    return offer is not None and (offer.digest, offer.incarnation) == (named.digest, named.incarnation)


def sink_slice(sink: Sink, start: int, stop: int) -> F32 | None:
    """The elements `[start, stop)` of the sink as one writable array; None if the sink has no such array."""
    return sink.buffer(start, stop) if isinstance(sink, BufferSink) else None


def joined(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)
