"""Publishing: encode an update chunk by chunk, write the chunks, then announce them with one offer.

At most one offer of a rank counts in a round: slots are created in order, and a later slot is taken only when the
earlier ones belong to incarnations that are over.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.rounds.chunks import seal_chunk, update_header
from atoll.rounds.claims import fenced
from atoll.rounds.codec import F32, codec
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.records import Rejection
from atoll.rounds.seal import checksum
from atoll.rounds.vectors import Source
from atoll.stores.base import Buffer


def publish(
    member: Member, round_no: int, fragment: int, source: Source, weight: float, base: str = ""
) -> Steps[Offer]:
    """Write the update and its offer; the offer that stands for this rank comes back."""
    grid = member.grid(fragment)
    claim = member.claim
    draft = Offer(
        member.run_id, round_no, fragment, claim.rank, claim.incarnation, claim.attempt, claim.token,
        member.layout(fragment).hash, member.agreement.codec, base, float(weight), 0.0, (),
    )  # fmt: skip
    if unfit := _unfit(member, fragment, source, weight):
        return (yield from _announce(member, _withdrawn(draft, unfit)))
    encoded = codec(draft.codec).encoded_bytes
    is_small = sum(encoded(grid.count(i)) for i in range(len(grid))) <= member.tuning.inline_bytes
    children = [_write_chunk(member, draft, source, i, is_inline=is_small) for i in range(len(grid))]
    written: list[tuple[str, float, list[Buffer]] | None] = yield Gather(children, member.tuning.width)
    done = [chunk for chunk in written if chunk is not None]
    if len(done) < len(written):
        unfit = Rejection(claim.rank, "finite", "the update has values that are not finite")
        return (yield from _announce(member, _withdrawn(draft, unfit)))
    norm = float(np.sqrt(sum(square for _, square, _ in done)))
    inline = memoryview(b"".join(part for _, _, parts in done for part in parts)) if is_small else None
    offer = replace(draft, norm=norm, chunks=tuple(check for check, _, _ in done), inline=inline)
    return (yield from _announce(member, offer))


def _write_chunk(
    member: Member, draft: Offer, source: Source, chunk: int, *, is_inline: bool
) -> Steps[tuple[str, float, list[Buffer]] | None]:
    """(checksum, sum of squares, encoded bytes if they are to be kept), or None when a value is not finite."""
    began = member.io.clock.monotonic()
    grid, how = member.grid(draft.fragment), codec(draft.codec)
    values = source.read(*grid.span(chunk))
    if not is_within(values, how.largest):
        return None
    parts = how.encode(values)
    square = float(np.add.reduce(np.square(values, dtype=np.float64)))
    check = checksum(*parts)
    member.io.spend("encode", began)
    if is_inline:
        return check, square, parts
    sealed = seal_chunk(update_header(draft, grid, chunk), parts)
    yield from member.io.put(member.keys.update(draft.round_no, draft.rank, draft.incarnation, chunk), sealed)
    return check, square, []


def is_within(values: F32, largest: float) -> bool:
    """Every value is finite and at most `largest` in magnitude."""
    if values.size == 0:
        return True
    return bool(values.max() <= largest and values.min() >= -largest)  # both are False for NaN


def _unfit(member: Member, fragment: int, source: Source, weight: float) -> Rejection | None:
    if source.size != (size := member.layout(fragment).size):
        return Rejection(member.rank, "layout", f"the update has {source.size} values, the layout {size}")
    if not (np.isfinite(weight) and weight > 0):
        return Rejection(member.rank, "weight", f"weight {weight} is not finite and above 0")
    return None


def _withdrawn(draft: Offer, why: Rejection) -> Offer:
    return replace(draft, withdrawn=why, weight=draft.weight if np.isfinite(draft.weight) else 0.0)


def mend_offer(member: Member, offer: Offer) -> Steps[None]:
    """Write our offer again if it can no longer be read as it was written."""
    key = member.keys.offer(offer.round_no, offer.rank, offer.slot)
    try:
        yield from member.io.read(key, lambda data: _opened(member, offer, data, offer.slot))
    except (CorruptUpdate, KeyNotFound):
        yield from member.io.put(key, offer.seal())


def _announce(member: Member, offer: Offer) -> Steps[Offer]:
    """Create the offer in the first slot that no dead incarnation holds; the one this process made before stands."""
    if offer.withdrawn is not None:
        why = offer.withdrawn
        member.events.add("update_rejected", offer.round_no, rank=offer.rank, check=why.check, detail=why.detail)
    for slot in count():
        key = member.keys.offer(offer.round_no, offer.rank, slot)
        if (yield from member.io.create(key, offer.seal())):
            return replace(offer, slot=slot)
        try:
            stands = yield from member.io.read(key, lambda data, s=slot: _opened(member, offer, data, s))  # type: ignore[misc]
        except CorruptUpdate:
            continue  # void for every reader, so the next slot counts
        if stands.token == offer.token:
            return stands
        if stands.incarnation > offer.incarnation:
            raise fenced(member.claim, offer.round_no)
    raise AssertionError("unreachable")


def _opened(member: Member, offer: Offer, data: Buffer, slot: int) -> Offer:
    return Offer.open(data, run_id=member.run_id, round_no=offer.round_no, rank=offer.rank, slot=slot)
