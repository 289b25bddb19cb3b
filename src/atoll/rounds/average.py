"""Averaging what was committed: scatter-reduce on the fixed chunk grid, or each for itself where that is cheaper.

Chunk i of the mean is computed and published by the (i mod n)-th rank of the party, and whatever was published first
stands. A chunk that does not come in time is computed by whoever misses it, from what is in the store: all of it, or
all but what its owner kept to itself and took along when it died. Nothing unverified is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import CorruptUpdate, KeyNotFound, LeftBehind, StoreUnavailable
from atoll.rounds import one_pass
from atoll.rounds.chunks import Encoded
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.context import RoundContext
from atoll.rounds.contributions import (
    MeanTask,
    Participant,
    PrefetchedMean,
    clear_wait,
    contribution_of,
    fetch_offers,
    gone,
    is_released,
    joined,
    offer_of,
    own_chunk,
    read_part,
    release,
    report_wait,
)
from atoll.rounds.frames import FrameReader, checksum
from atoll.rounds.io import Discard, Gather, Steps
from atoll.rounds.publish import repair_offer
from atoll.rounds.records import Offer
from atoll.rounds.reduce import Accumulator, Coefficients, is_finite
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Reduced:
    """The mean of a chunk: its values, how they are published, and what they were made of."""

    values: F32
    encoded: list[Buffer]
    check: str
    """XXH3-64 of the encoded bytes; empty for a mean that is not published."""
    is_finite: bool
    parts: tuple[str | None, ...]


def average(work: MeanTask) -> Steps[None]:
    """Fill the sink with the mean of the commit."""
    yield from fetch_offers(work)
    chunks = range(len(work.grid))
    width = work.member.side_by_side(len(work.party.seats))
    if work.commit.mode == "whole":
        yield Gather([_own(work, i) for i in chunks], width)
        return
    yield Gather([release(work, i) for i in chunks if _must_release(work, i)], work.member.connections)
    # Asking for the others' chunks before one's own are done would only find them missing. Who no longer has the values
    # was here before, and may find its means published, and their parts gone.
    own = [i for i in chunks if work.party.owner(i) == work.member.rank and work.ours is not None]
    yield Gather([_own(work, i) for i in own], width)
    yield Gather([_fetch(work, i) for i in chunks if i not in own], work.member.connections)
    yield from clear_wait(work)
    if work.own is not None:
        yield from _discard(work, work.own)


def _own(work: MeanTask, chunk: int) -> Steps[None]:
    """Average a chunk; if a contribution is bad, its owner may still publish the mean of it for us."""
    foreseen = work.foreseen.pop(chunk, None)
    if foreseen is not None and _is_still_valid(work, foreseen, chunk):
        if foreseen.values is not None:
            work.sink.write(work.grid.span(chunk)[0], foreseen.values)
        return
    if work.commit.mode == "whole":
        reduced = yield from _reduce(work, chunk)
        work.sink.write(work.grid.span(chunk)[0], reduced.values)
        return
    try:
        if (yield from _publish(work, chunk)):
            return
    except CorruptUpdate as exc:
        yield from _fetch(work, chunk, exc)
        return
    yield from _fetch(work, chunk)


def _is_still_valid(work: MeanTask, foreseen: PrefetchedMean, chunk: int) -> bool:
    is_it = (foreseen.party, foreseen.mode) == (work.party.id, work.commit.mode)
    return is_it and _fits(work, foreseen.parts, chunk)


def _fits(work: MeanTask, parts: tuple[str | None, ...], chunk: int) -> bool:
    """Every part is of the update its offer announced; what was left out and what we cannot tell does no harm."""
    if len(parts) != len(work.party.seats):
        return False
    told = ((part, work.offers.get(seat.rank)) for part, seat in zip(parts, work.party.seats, strict=True))
    return all(part is None or offer is None or part == offer.chunks[chunk] for part, offer in told)


def _fetch(work: MeanTask, chunk: int, trouble: CorruptUpdate | None = None) -> Steps[None]:
    """Take a chunk of the mean from the store, or compute it when that takes too long."""
    member, owner = work.member, work.party.owner(chunk)
    pauses = member.pauses()
    waited_s = total_s = 0.0
    while True:
        if (yield from _take(work, chunk)):
            work.silent.discard(owner)
            return
        if waited_s >= member.tuning.patience_s or (waited_s == 0.0 and owner in work.silent):
            work.silent.add(owner)
            yield from _mend(work, chunk)
            try:
                if (yield from _publish(work, chunk)):
                    return
            except CorruptUpdate as exc:
                trouble = exc
            waited_s = 0.0
        if work.time_left_s <= 0:
            raise trouble or CorruptUpdate(
                f"chunk {chunk} of the mean did not come in {work.deadline_s:g} s",
                round_no=work.commit.round_no,
                rank=owner,
                check="missing",
            )
        goes_on = not (member.quorum.is_strict and work.is_local_only(chunk))
        left_s = member.tuning.patience_s - waited_s if goes_on else work.time_left_s
        yield from report_wait(work, owner, total_s, left_s, goes_on)
        pause = min(next(pauses), max(0.0, work.time_left_s))
        yield from member.io.sleep(pause)
        waited_s, total_s = waited_s + pause, total_s + pause


def _mend(work: MeanTask, chunk: int) -> Steps[None]:
    """See that what others need of us for a chunk can be read, and write it again if not."""
    if work.own is None:
        return
    yield from repair_offer(work.member, work.own)
    if work.ours is None or work.ours.inline is not None or work.ours.is_local_only(chunk):
        return
    try:
        yield from read_part(work, work.ours, chunk)
    except (CorruptUpdate, LeftBehind):
        # Where the mean takes the place of the update, one that came damaged may lie there instead.
        if own_chunk(work.member, work.ours, work.source, chunk) is not None:
            yield from release(work, chunk)


def _publish(work: MeanTask, chunk: int) -> Steps[bool]:
    """Average a chunk and create it; False when another one stands, which then is the one to take."""
    reduced = yield from _reduce(work, chunk)
    sealed = work.name(chunk).seal(reduced.parts, reduced.encoded, check=reduced.check)
    if not (yield from work.member.io.create(work.key(chunk), sealed)):
        if (yield from _must_stand(work, chunk, is_whole=None not in reduced.parts)):
            return False
        yield from work.member.io.put(work.key(chunk), sealed)  # what stands cannot be read: the same bytes again
    elif None in reduced.parts:
        yield from _check_not_retired(work, reduced.parts, chunk)
    work.sink.write(work.grid.span(chunk)[0], reduced.values)
    return True


def _must_stand(work: MeanTask, chunk: int, *, is_whole: bool) -> Steps[bool]:
    """Whether the mean that another published may not be replaced: it is good, or somebody may have taken it.

    Where a part may be left out there are two means, and whoever could read the first one has that one.
    """
    try:
        found = yield from work.member.io.read(work.key(chunk), work.name(chunk).open, is_promised=True)
    except KeyNotFound as exc:
        raise gone(work, exc) from exc
    except CorruptUpdate:
        return not is_whole or (work.is_local_only(chunk) and not work.member.quorum.is_strict)
    return _fits(work, found.parts, chunk)


def _check_not_retired(work: MeanTask, parts: Sequence[str | None], chunk: int) -> Steps[None]:
    """Raise `LeftBehind` if there had been a mean before ours: it was deleted after the parts that went into it."""
    for rank, part in zip(work.party.ranks, parts, strict=True):
        offer = work.offers.get(rank)
        if part is None or offer is None or (work.is_ours(offer) and offer.is_local_only(chunk)):
            continue
        try:
            yield from read_part(work, offer, chunk)
        except LeftBehind:
            yield from work.member.io.delete(work.key(chunk))
            raise
        return


def _take(work: MeanTask, chunk: int) -> Steps[bool]:
    """Take a chunk of the mean from the store to its place, checked on the way; False while there is no good one."""
    io = work.member.io
    body = yield from io.open(work.key(chunk))
    if body is None:
        return False
    began = io.clock.monotonic()
    try:
        incoming = yield from io.receive(lambda: FrameReader(body, io.clock, kind="mean"))
        check, parts = work.name(chunk).check(incoming.header, incoming.payload_bytes)
        is_good = _fits(work, parts, chunk)
        if is_good:
            is_good = yield from io.receive(lambda: _place(work, chunk, incoming, check))
        received = began + incoming.seconds
        io.spend("get", began, received)
        io.spend("reduce", received)
        return is_good
    except (CorruptUpdate, StoreUnavailable):
        return False
    finally:
        body.close()


def _place(work: MeanTask, chunk: int, incoming: FrameReader, check: str) -> bool:
    """Put a mean in its place as it arrives; whether it has this checksum. If not, the place is of no use yet."""
    how = codec(work.member.agreement.mean_codec)
    start, stop = work.grid.span(chunk)
    room = work.room(start, stop)
    if how.payload_is_values and room is not None and not _is_only_copy(work, chunk):
        one_pass.place(incoming, room)
        return incoming.check == check
    payload = incoming.whole()
    if incoming.check != check:
        return False
    if room is None:
        work.sink.write(start, how.decode(payload, stop - start))
    else:
        how.decode_into(payload, room)
    return True


def _is_only_copy(work: MeanTask, chunk: int) -> bool:
    """Whether our part of a chunk is nowhere but in our memory, where the mean may have to take its place."""
    return work.ours is not None and work.ours.is_local_only(chunk) and work.party.owner(chunk) == work.member.rank


def _reduce(work: MeanTask, chunk: int) -> Steps[Reduced]:
    """Average one chunk from its contributions, window by window, in rank order."""
    member = work.member
    missing = yield from _left_out(work, chunk)
    seats = [seat for seat in work.party.seats if seat.rank not in missing]
    accumulator = Accumulator(work.grid.count(chunk), Coefficients.of([seat.weight for seat in seats]))
    window = max(1, member.connections - 1)
    parts: dict[int, str] = {}
    for first in range(0, len(seats), window):
        few = seats[first : first + window]
        children = [contribution_of(work, seat, chunk) for seat in few]
        found: list[Encoded] = yield Gather(children, 1 if member.is_local_store else window)
        began = member.io.clock.monotonic()
        accumulator.add_all(codec(member.agreement.codec), [one.payload for one in found])
        parts |= {seat.rank: one.check for seat, one in zip(few, found, strict=True)}
        member.io.spend("reduce", began)
    reduced = finish(member, accumulator, tuple(parts.get(rank) for rank in work.party.ranks), work.commit.mode)
    if not reduced.is_finite:
        yield from _blame(work, seats, chunk)
    return reduced


def finish(member: RoundContext, accumulator: Accumulator, parts: tuple[str | None, ...], mode: str) -> Reduced:
    """The mean that every replica applies: rounded by its codec if it is published, unrounded otherwise."""
    began = member.io.clock.monotonic()
    values = accumulator.mean()
    encoded: list[Buffer] = []
    if mode == "scatter":
        how = codec(member.agreement.mean_codec)
        encoded = how.encode(values)
        values = how.decode(joined(encoded), values.size)
    done = Reduced(values, encoded, checksum(*encoded) if encoded else "", is_finite(values), parts)
    member.io.spend("reduce", began)
    return done


def _left_out(work: MeanTask, chunk: int) -> Steps[set[int]]:
    """Ranks whose part of a chunk cannot be had: they kept it, and are not there to use it or to write it.

    Where every replica is needed for every round, only the owner itself may give its own part up: when it was started
    again and its update did not come out the same. Elsewhere anybody may, once the others had their time.
    """
    owner, is_strict = work.party.owner(chunk), work.member.quorum.is_strict
    found: set[int] = set()
    for rank in work.party.ranks:
        offer = yield from offer_of(work, rank)
        if not offer.is_local_only(chunk) or work.is_ours(offer):
            continue
        if rank != owner:
            if not is_strict and not (yield from is_released(work, offer, chunk, work.member.tuning.patience_s)):
                found.add(rank)
        elif is_strict and owner != work.member.rank:
            message = f"rank {owner} keeps its part of chunk {chunk}, which only that rank can average"
            raise CorruptUpdate(message, round_no=work.commit.round_no, rank=owner, check="missing")
        else:
            found.add(rank)
    if len(found) == len(work.party.seats):
        message = f"all who had a part of chunk {chunk} kept it and are gone"
        raise CorruptUpdate(message, round_no=work.commit.round_no, rank=owner, check="missing")
    return found


def _must_release(work: MeanTask, chunk: int) -> bool:
    """Whether we held back a chunk that turns out to be another's to average."""
    return work.ours is not None and work.ours.is_local_only(chunk) and work.party.owner(chunk) != work.member.rank


def _discard(work: MeanTask, own: Offer) -> Steps[None]:
    """Every mean is there, so nobody reads our chunks again."""
    written = [i for i in range(len(work.grid)) if not own.is_local_only(i)]
    for chunk in written if own.inline is None else []:
        yield Discard(work.member.keys.update(own.round_no, own.rank, own.incarnation, chunk))


def _blame(work: MeanTask, seats: Sequence[Participant], chunk: int) -> Steps[None]:
    """Find out whose values are not finite, and say so."""
    count = work.grid.count(chunk)
    for seat in seats:
        found = yield from contribution_of(work, seat, chunk)
        if not is_finite(codec(work.member.agreement.codec).decode(found.payload, count)):
            message = f"the update of rank {seat.rank} has values that are not finite, in chunk {chunk}"
            raise CorruptUpdate(message, round_no=work.commit.round_no, rank=seat.rank, check="finite")
    raise CorruptUpdate(f"the mean overflows in chunk {chunk}", round_no=work.commit.round_no, check="finite")
