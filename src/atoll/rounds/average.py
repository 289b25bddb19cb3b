"""Averaging what was committed: scatter-reduce on the fixed chunk grid, or each for itself where that is cheaper.

Chunk i of the mean is computed and published by the (i mod n)-th committed rank. Nobody depends on it: a chunk that
does not come in time is computed by whoever misses it, and comes out the same. Nothing unverified is added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.errors import CorruptUpdate, KeyNotFound, LeftBehind
from atoll.rounds.chunks import inline_chunk, mean_header, open_chunk, seal_chunk, update_header
from atoll.rounds.codec import F32, codec
from atoll.rounds.layout import Grid
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.publish import mend_offer
from atoll.rounds.records import Commit, Contribution
from atoll.rounds.reduce import Accumulator, Coefficients, is_finite
from atoll.rounds.seal import checksum
from atoll.rounds.vectors import Sink, Source
from atoll.stores.base import Buffer


@dataclass
class Averaging:
    """One replica's work on the mean of one commit."""

    member: Member
    commit: Commit
    sink: Sink
    own: Offer | None = None
    source: Source | None = None
    """Our own update, still in memory; spares reading it back, and heals chunks that went bad in the store."""
    deadline_s: float = 1800.0
    offers: dict[int, Offer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grid: Grid = self.member.grid(self.commit.fragment)
        self.began = self.member.io.clock.monotonic()
        self.coefficients = Coefficients.of(self.commit.weights)

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - (self.member.io.clock.monotonic() - self.began)


def average(work: Averaging) -> Steps[None]:
    """Fill the sink with the mean of the commit."""
    yield from _fetch_offers(work)
    width = work.member.tuning.width
    chunks = range(len(work.grid))
    if work.commit.mode == "whole":
        yield Gather([_reduce(work, i, is_published=False) for i in chunks], width)
        return
    # Asking for the others' chunks before one's own are done would only find them missing.
    yield Gather([_own(work, i) for i in chunks if work.commit.owner(i) == work.member.rank], width)
    yield Gather([_fetch(work, i) for i in chunks if work.commit.owner(i) != work.member.rank], width)


def _own(work: Averaging, chunk: int) -> Steps[None]:
    """Average a chunk and publish it; if a contribution is bad, its owner may still publish the chunk for us."""
    try:
        yield from _reduce(work, chunk, is_published=True)
    except CorruptUpdate as exc:
        yield from _fetch(work, chunk, exc)


def _fetch(work: Averaging, chunk: int, trouble: CorruptUpdate | None = None) -> Steps[None]:
    """Take a chunk of the mean from the store, or compute it when that takes too long."""
    member = work.member
    patience_s = member.tuning.patience_s
    pauses = member.pauses()
    waited_s = 0.0
    while True:
        values = yield from _published(work, chunk)
        if values is not None:
            work.sink.write(work.grid.span(chunk)[0], values)
            return
        if waited_s >= patience_s:
            if work.own is not None:
                yield from mend_offer(member, work.own)
            try:
                yield from _reduce(work, chunk, is_published=True)
                return
            except CorruptUpdate as exc:
                trouble = exc
            waited_s = 0.0
        if work.time_left_s <= 0:
            raise trouble or CorruptUpdate(
                f"chunk {chunk} of the mean did not come in {work.deadline_s:g} s",
                round_no=work.commit.round_no,
                rank=work.commit.owner(chunk),
                check="missing",
            )
        pause = min(next(pauses), max(0.0, work.time_left_s))
        yield from member.io.sleep(pause)
        waited_s += pause


def _published(work: Averaging, chunk: int) -> Steps[F32 | None]:
    """A chunk of the mean as published, or None while there is no good one."""
    header = _mean_header(work, chunk)
    key = work.member.keys.mean(work.commit.round_no, chunk)
    data = yield from work.member.io.probe(key)
    if data is None:
        return None
    try:
        return open_chunk(data, header)
    except CorruptUpdate:
        return None


def _reduce(work: Averaging, chunk: int, *, is_published: bool) -> Steps[None]:
    """Average one chunk from its contributions, window by window, in rank order."""
    member = work.member
    accumulator = Accumulator(work.grid.count(chunk), work.coefficients)
    window = max(1, member.tuning.connections)
    named = work.commit.contributions
    for first in range(0, len(named), window):
        children = [_contribution(work, c, chunk) for c in named[first : first + window]]
        values: list[F32] = yield Gather(children, window)
        began = member.io.clock.monotonic()
        for contribution in values:
            accumulator.add(contribution)
        member.io.spend("reduce", began)
    mean = accumulator.mean()
    how = codec(member.agreement.mean_codec)
    encoded = how.encode(mean)
    decoded = how.decode(_joined(encoded), mean.size)
    if not is_finite(decoded):
        yield from _blame(work, chunk)
    if is_published:
        sealed = seal_chunk(_mean_header(work, chunk), encoded)
        yield from member.io.put(member.keys.mean(work.commit.round_no, chunk), sealed)
    work.sink.write(work.grid.span(chunk)[0], decoded)


def _contribution(work: Averaging, named: Contribution, chunk: int) -> Steps[F32]:
    """One rank's values of a chunk, checked against what the commit names."""
    offer = work.offers.get(named.rank)
    if offer is None:
        offer = work.offers[named.rank] = yield from _fetch_offer(work, named)
    if offer is work.own and work.source is not None:
        payload = _joined(codec(offer.codec).encode(work.source.read(*work.grid.span(chunk))))
        if checksum(payload) == offer.chunks[chunk]:  # else the caller changed it since it was published
            return codec(offer.codec).decode(payload, work.grid.count(chunk))
    if offer.inline is not None:
        return inline_chunk(offer, work.grid, chunk)
    header = update_header(offer, work.grid, chunk)
    key = work.member.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)

    def opened(data: Buffer) -> F32:
        return open_chunk(data, header, wanted=offer.chunks[chunk])

    try:
        return (yield from work.member.io.read(key, opened, is_promised=True))
    except KeyNotFound as exc:
        raise _gone(work, exc) from exc


def _fetch_offers(work: Averaging) -> Steps[None]:
    """Read the offers the commit names; our own is in memory."""
    mine = work.commit.contribution(work.member.rank)
    if work.own is not None and mine is not None and mine.digest == work.own.digest:
        work.offers[work.own.rank] = work.own
    else:
        work.own = None
    wanted = [c for c in work.commit.contributions if not _is_it(work.offers.get(c.rank), c)]
    found: list[Offer | None] = yield Gather([_try_offer(work, c) for c in wanted], work.member.tuning.connections)
    work.offers |= {offer.rank: offer for offer in found if offer is not None}


def _try_offer(work: Averaging, named: Contribution) -> Steps[Offer | None]:
    """An offer, or None when it cannot be read: the means may still come from those who could."""
    try:
        return (yield from _fetch_offer(work, named))
    except CorruptUpdate:
        work.offers.pop(named.rank, None)
        return None


def _fetch_offer(work: Averaging, named: Contribution) -> Steps[Offer]:
    member, round_no = work.member, work.commit.round_no
    expected = member.expected(work.commit.fragment)

    def opened(data: Buffer) -> Offer:
        offer = Offer.open(data, run_id=member.run_id, round_no=round_no, rank=named.rank, slot=named.slot)
        if not _is_it(offer, named) or offer.layout != expected.layout.hash or len(offer.chunks) != len(expected.grid):
            message = f"the offer of rank {named.rank} is not the one that was committed"
            raise CorruptUpdate(message, round_no=round_no, rank=named.rank, check="digest")
        return offer

    try:
        key = member.keys.offer(round_no, named.rank, named.slot)
        return (yield from member.io.read(key, opened, is_promised=True))
    except KeyNotFound as exc:
        raise _gone(work, exc) from exc


def _is_it(offer: Offer | None, named: Contribution) -> bool:
    return offer is not None and (offer.digest, offer.incarnation) == (named.digest, named.incarnation)


def _blame(work: Averaging, chunk: int) -> Steps[None]:
    """Find out whose values are not finite, and say so."""
    for named in work.commit.contributions:
        if not is_finite((yield from _contribution(work, named, chunk))):
            message = f"the update of rank {named.rank} has values that are not finite, in chunk {chunk}"
            raise CorruptUpdate(message, round_no=work.commit.round_no, rank=named.rank, check="finite")
    raise CorruptUpdate(f"the mean overflows in chunk {chunk}", round_no=work.commit.round_no, check="finite")


def _joined(parts: list[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _gone(work: Averaging, exc: KeyNotFound) -> LeftBehind:
    message = f"round {work.commit.round_no} was retired while it was being read: {exc.key}"
    return LeftBehind(message, round_no=work.commit.round_no, latest=work.commit.round_no)


def _mean_header(work: Averaging, chunk: int) -> dict[str, Any]:
    member, commit = work.member, work.commit
    layout = member.layout(commit.fragment).hash
    return mean_header(commit, layout, member.agreement.mean_codec, work.grid, chunk)
