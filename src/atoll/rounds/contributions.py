"""What a mean is made of: the offers a commit names, and each rank's part of a chunk, checked or from memory.

The ranks whose updates are averaged together, known as soon as their weights are: often before the commit.

A mean names its party. So a replica may average and publish what everybody expects to be committed while that is still
being agreed; if something else is committed, it is another party, and what was published under this one is litter.

One replica's work on the mean of a commit: what is known of it, and what was done before the commit was there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
from atoll.rounds.layout import Room, Sink, Source
from atoll.rounds.one_pass import sum_of_squares
from atoll.rounds.publish import put_chunk
from atoll.rounds.records import Commit, Contribution, Offer
from atoll.rounds.reduce import Coefficients
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Participant:
    """One process that takes part, and what its update weighs."""

    rank: int
    incarnation: int
    weight: float


@dataclass(frozen=True)
class Participants:
    """In rank order."""

    seats: tuple[Participant, ...]

    @classmethod
    def of_commit(cls, commit: Commit) -> Participants:
        return cls(tuple(Participant(c.rank, c.incarnation, c.weight) for c in commit.contributions))

    @classmethod
    def of_offers(cls, offers: Iterable[Offer]) -> Participants:
        return cls(tuple(Participant(o.rank, o.incarnation, o.weight) for o in sorted(offers, key=lambda o: o.rank)))

    @cached_property
    def id(self) -> str:
        """The first 16 hex digits of the XXH3-128 of a line for each seat: rank, incarnation and weight."""
        lines = (f"{seat.rank} {seat.incarnation} {float(seat.weight).hex()}\n" for seat in self.seats)
        return digest("".join(lines).encode())[:16]

    @cached_property
    def coefficients(self) -> Coefficients:
        return Coefficients.of([seat.weight for seat in self.seats])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(seat.rank for seat in self.seats)

    def owner(self, chunk: int) -> int:
        """The rank that averages a chunk."""
        return self.seats[chunk % len(self.seats)].rank


@dataclass(frozen=True)
class PrefetchedMean:
    """A chunk that was averaged before the commit was known: right if the commit is what was expected."""

    party: str
    mode: str
    """Means that are exchanged are rounded by their codec; means that each makes for itself are not."""
    parts: tuple[str | None, ...]
    values: F32 | None
    """None when they are in the sink already."""


@dataclass
class MeanTask:
    """One replica's work on the mean of one commit."""

    member: RoundContext
    commit: Commit
    sink: Sink
    own: Offer | None = None
    """The offer of this very process."""
    own_digest: str = ""
    """Digest of our update, whoever of our incarnations published it."""
    source: Source | None = None
    """Our own update, still in memory; spares reading it back, and heals chunks that went bad in the store."""
    offers: dict[int, Offer] = field(default_factory=dict)
    foreseen: dict[int, PrefetchedMean] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    """Rank → when it was last seen to have written what it had held back."""
    silent: set[int] = field(default_factory=set)
    """Ranks that were waited for in vain: not again with each of their chunks."""
    told: set[int] = field(default_factory=set)
    """Ranks of which we said in the store that we wait for them."""

    def __post_init__(self) -> None:
        self.grid: Grid = self.member.grid(self.commit.fragment)
        self.party = Participants.of_commit(self.commit)
        self.began = self.member.io.clock.monotonic()
        self._has_room = self.sink if isinstance(self.sink, Room) else None

    def room(self, start: int, stop: int) -> F32 | None:
        """The place of these elements in the sink, if they may be written there directly."""
        return self._has_room.room(start, stop) if self._has_room is not None else None

    @property
    def deadline_s(self) -> float:
        return self.member.quorum.deadline_s

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - (self.member.io.clock.monotonic() - self.began)

    def is_ours(self, offer: Offer) -> bool:
        """Whether the values behind an offer are in our memory."""
        return self.source is not None and offer.rank == self.member.rank and offer.digest == self.own_digest

    @property
    def ours(self) -> Offer | None:
        """The committed offer of our rank, by whichever of our incarnations, if its values are in our memory."""
        named, offer = self.commit.contribution(self.member.rank), self.offers.get(self.member.rank)
        return (
            offer if named is not None and offer is not None and is_it(offer, named) and self.is_ours(offer) else None
        )

    def is_local_only(self, chunk: int) -> bool:
        """Whether somebody who takes part kept a part of this chunk, as far as we can tell."""
        offers = [self.offers.get(rank) for rank in self.party.ranks]
        return any(offer is None or offer.is_local_only(chunk) for offer in offers)

    def name(self, chunk: int) -> MeanName:
        return mean_name(self.member, self.commit.round_no, self.commit.fragment, self.party.id, chunk)

    def key(self, chunk: int) -> str:
        return self.member.keys.mean(self.commit.round_no, self.party.id, chunk)


def mean_name(member: RoundContext, round_no: int, fragment: int, party: str, chunk: int) -> MeanName:
    agreement, layout = member.agreement, member.layout(fragment)
    grid = member.grid(fragment)
    return MeanName(member.run_id, round_no, fragment, party, layout.hash, agreement.mean_codec, grid, chunk)


def is_it(offer: Offer | None, named: Contribution) -> bool:
    """Whether this is the offer that a commit names."""
    return offer is not None and (offer.digest, offer.incarnation) == (named.digest, named.incarnation)


def fetch_offers(work: MeanTask) -> Steps[None]:
    """Read the offers the commit names; our own is in memory."""
    mine = work.commit.contribution(work.member.rank)
    if work.own is None or mine is None or mine.digest != work.own.digest or mine.incarnation != work.own.incarnation:
        work.own = None
    else:
        work.offers[work.own.rank] = work.own
    wanted = [c for c in work.commit.contributions if not is_it(work.offers.get(c.rank), c)]
    width = 1 if work.member.is_local_store else work.member.connections
    found: list[Offer | None] = yield Gather([_try_offer(work, c) for c in wanted], width)
    work.offers |= {offer.rank: offer for offer in found if offer is not None}


def _try_offer(work: MeanTask, named: Contribution) -> Steps[Offer | None]:
    """An offer, or None when it cannot be read: the means may still come from those who could."""
    try:
        return (yield from _fetch_offer(work, named))
    except CorruptUpdate:
        work.offers.pop(named.rank, None)
        return None


def offer_of(work: MeanTask, rank: int) -> Steps[Offer]:
    offer = work.offers.get(rank)
    if offer is None:
        named = work.commit.contribution(rank)
        assert named is not None
        offer = work.offers[rank] = yield from _fetch_offer(work, named)
    return offer


def _fetch_offer(work: MeanTask, named: Contribution) -> Steps[Offer]:
    member, round_no = work.member, work.commit.round_no
    expected = member.expected(work.commit.fragment)

    def opened(data: Buffer) -> Offer:
        offer = Offer.open(data, run_id=member.run_id, round_no=round_no, rank=named.rank, slot=named.slot)
        if not is_it(offer, named) or offer.layout != expected.layout.hash or len(offer.chunks) != len(expected.grid):
            message = f"the offer of rank {named.rank} is not the one that was committed"
            raise CorruptUpdate(message, round_no=round_no, rank=named.rank, check="digest")
        return offer

    try:
        key = member.keys.offer(round_no, named.rank, named.slot)
        return (yield from member.io.read(key, opened, is_promised=True))
    except KeyNotFound as exc:
        raise gone(work, exc) from exc


def contribution_of(work: MeanTask, seat: Participant, chunk: int) -> Steps[Encoded]:
    """One rank's bytes of a chunk, checked against what the commit names."""
    offer = yield from offer_of(work, seat.rank)
    if work.is_ours(offer) and (own := own_chunk(work.member, offer, work.source, chunk)) is not None:
        return own
    if offer.inline is not None:
        return inline_chunk(offer, work.grid, chunk)
    if offer.is_local_only(chunk):
        yield from _await_release(work, offer, chunk)
    return (yield from read_part(work, offer, chunk))


def read_part(work: MeanTask, offer: Offer, chunk: int) -> Steps[Encoded]:
    """A chunk of an update as it is in the store."""
    header = update_header(offer, work.grid, chunk)
    key = work.member.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)

    def opened(data: Buffer) -> Encoded:
        return open_update(data, header, wanted=offer.chunks[chunk])

    try:
        return (yield from work.member.io.read(key, opened, is_promised=True))
    except KeyNotFound as exc:
        raise gone(work, exc) from exc


def own_chunk(member: RoundContext, offer: Offer, source: Source | None, chunk: int) -> Encoded | None:
    """A chunk of our own update from memory; None when the caller has changed it since it was announced."""
    assert source is not None
    payload = joined(codec(offer.codec).encode(source.read(*member.grid(offer.fragment).span(chunk))))
    check = checksum(payload)
    return Encoded(payload, check, offer.weight) if not offer.chunks or check == offer.chunks[chunk] else None


def _await_release(work: MeanTask, offer: Offer, chunk: int) -> Steps[None]:
    """Wait for a chunk that its rank held back, expecting another party; it writes it when it sees the commit."""
    if not (yield from is_released(work, offer, chunk, work.deadline_s)):
        message = f"rank {offer.rank} did not write what it had held back"
        raise CorruptUpdate(message, round_no=offer.round_no, rank=offer.rank, check="missing")


def is_released(work: MeanTask, offer: Offer, chunk: int, patience_s: float) -> Steps[bool]:
    """Whether a chunk that was held back is written, before its rank has been silent for so long."""
    member, clock = work.member, work.member.io.clock
    key = member.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)
    pauses = member.pauses()
    while (yield from member.io.probe(key)) is None:
        silent_s = clock.monotonic() - work.heard_at.get(offer.rank, work.began)
        if silent_s >= patience_s or work.time_left_s <= 0:
            return False
        goes_on = not member.quorum.is_strict
        left_s = patience_s - silent_s if goes_on else work.time_left_s
        yield from report_wait(work, offer.rank, silent_s, left_s, goes_on)
        yield from member.io.sleep(next(pauses))
    work.heard_at[offer.rank] = clock.monotonic()
    return True


def report_wait(work: MeanTask, rank: int, waited_s: float, left_s: float, goes_on: bool) -> Steps[None]:
    """Once a wait is long, say in the store whom it is for and how it will end: for each rank once."""
    if waited_s < LONG_WAIT_S or rank in work.told:
        return
    work.told.add(rank)
    yield from _tell_wait(work, sorted(work.told), left_s, goes_on)


def clear_wait(work: MeanTask) -> Steps[None]:
    """Take back what was said of waiting: everything has come."""
    if work.told:
        yield from _tell_wait(work, [], 0.0, True)


def _tell_wait(work: MeanTask, ranks: list[int], left_s: float, goes_on: bool) -> Steps[None]:
    """For people who look from outside: a store that fails is no reason to stop."""
    member = work.member
    until = round(member.io.clock.time() + max(0.0, left_s), 3)
    then = "go_on" if goes_on else "give_up"
    member.events.add("waiting", work.commit.round_no, **{"for": ranks}, until=until, then=then, least=None)
    with suppress(StoreError):
        yield from member.events.flush(member.io)


def release(work: MeanTask, chunk: int) -> Steps[None]:
    assert work.ours is not None
    assert work.source is not None
    values = work.source.read(*work.grid.span(chunk))
    encoded = codec(work.ours.codec).encode(values)
    yield from put_chunk(work.member, work.ours, chunk, encoded, None, math.sqrt(sum_of_squares(values)))


def joined(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def gone(work: MeanTask, exc: KeyNotFound) -> LeftBehind:
    message = f"round {work.commit.round_no} was retired while it was being read: {exc.key}"
    return LeftBehind(message, round_no=work.commit.round_no, latest=work.commit.round_no)
