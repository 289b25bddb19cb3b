"""Publishing: encode an update chunk by chunk, write the chunks, then announce them with one offer.

At most one offer of a rank counts in a round: slots are created in order, and a later slot is taken only when the
earlier ones belong to incarnations that are over.

A chunk of `fp32` that is about to be written: hashed and squared as it goes, so that memory is read once.

Its header names the hash and the norm, so it is made last, in room that was left for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import xxhash

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.kernels import fused
from atoll.kernels.fused import Hash
from atoll.rounds import one_pass
from atoll.rounds.chunks import seal_chunk, update_header
from atoll.rounds.codecs.base import F32, as_bytes, codec
from atoll.rounds.context import RoundContext
from atoll.rounds.frames import PREAMBLE_BYTES, canonical, checksum, seal_front
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import fenced
from atoll.rounds.layout import Source
from atoll.rounds.one_pass import LEAST_COMPILED, sound, sum_of_squares
from atoll.rounds.records import Offer, Rejection
from atoll.stores.base import Buffer
from atoll.stores.fast import HashedWhileWritten

_STEP = 1 << 10
_TILE = 1 << 19
_LONGEST = -sys.float_info.max
"""No float has more digits."""


class NotFinite(Exception):
    """A value is infinite or no number, so nothing is written."""


class FrameWriter(HashedWhileWritten):
    """A frame of these values, with this header and what is found of them."""

    norm = math.nan
    """L2 of the values, when there is a front."""
    seconds = 0.0
    """How long it was looked at; where it is copied in the same pass, that too."""

    def __init__(self, header: Mapping[str, Any], values: F32, clock: Clock = SYSTEM_CLOCK) -> None:
        self._header, self._values, self._clock = header, values, clock
        self.payload = as_bytes(np.ascontiguousarray(values, "<f4"))
        text = canonical({**header, "norm": _LONGEST, "xxh3": "0" * 16})
        self.front_bytes = -(-(PREAMBLE_BYTES + len(text)) // _STEP) * _STEP
        self._passes = fused.current() if values.size >= LEAST_COMPILED else None
        self._begin()

    @property
    def check(self) -> str:
        """XXH3-64 of what has been seen."""
        return self._state.hexdigest()

    def hash_and_norm(self, start: int, stop: int, out: memoryview | None = None) -> None:
        if start == 0:
            self._begin()
        began = self._clock.monotonic()
        values = self._values[start // 4 : stop // 4]
        copy = None if out is None else np.frombuffer(out, np.uint8)
        if isinstance(self._state, Hash):
            assert self._passes is not None
            self._squares += self._passes.look(values, self._state, copy)
        else:
            self._state.update(self.payload[start:stop])
            self._squares += sum_of_squares(values)
            if copy is not None:
                np.copyto(copy, np.frombuffer(self.payload[start:stop], np.uint8))
        self._seen = stop
        self.seconds += self._clock.monotonic() - began

    def write_hashed(self, fd: int, start: int, stop: int, step: int) -> None:
        if not isinstance(self._state, Hash):
            super().write_hashed(fd, start, stop, step)
            return
        assert self._passes is not None
        if start == 0:
            self._begin()
        values = self._values[start // 4 : stop // 4]
        squares, seconds = self._passes.pour(values, self._state, fd, self.front_bytes + start, step)
        self._squares += squares
        self.seconds += seconds
        self._seen = stop

    def front(self) -> Buffer:
        if self._seen < len(self.payload):
            self._look_at_all()
        self.norm = math.sqrt(sound(self._squares, self._values))
        if not (math.isfinite(self.norm) and self._are_sound()):
            raise NotFinite
        header = {**self._header, "norm": self.norm, "xxh3": self.check}
        return seal_front(header, len(self.payload), alignment=self.front_bytes)

    def _begin(self) -> None:
        self._state: xxhash.xxh3_64 | Hash = xxhash.xxh3_64() if self._passes is None else Hash(self._passes)
        self._squares, self._seen, self.seconds = 0.0, 0, 0.0

    def _are_sound(self) -> bool:
        """Whether the values that were seen are finite. If squares did not fit, that is known of those of now."""
        return math.isfinite(self._squares) or checksum(self.payload) == self.check

    def _look_at_all(self) -> None:
        for start in range(0, len(self.payload), _TILE):
            self.hash_and_norm(start, min(start + _TILE, len(self.payload)))


_LARGE = 1 << 20
"""Bytes from which on reading memory once is worth a header of a whole KiB."""


class Seen(NamedTuple):
    """What was found of a chunk when it was encoded."""

    check: str
    """XXH3-64 of the encoded bytes."""
    norm: float
    """L2 of the values."""


def draft_offer(member: RoundContext, round_no: int, fragment: int, weight: float, base: str) -> Offer:
    """What is known of an update before it is looked at."""
    claim = member.claim
    return Offer(
        member.run_id, round_no, fragment, claim.rank, claim.incarnation, claim.attempt, claim.token,
        member.layout(fragment).hash, member.agreement.codec, base, float(weight), 0.0, (),
    )  # fmt: skip


def is_inline(member: RoundContext, fragment: int) -> bool:
    """Whether updates of this fragment are small enough to travel inside their offer."""
    encoded = codec(member.agreement.codec).encoded_bytes(member.layout(fragment).size)
    return encoded <= member.tuning.inline_bytes


def upload(
    member: RoundContext, draft: Offer, source: Source, *, is_dry: bool = False, seen: dict[int, Seen] | None = None
) -> Steps[Offer]:
    """Encode the update and write every chunk that is not held back; the offer to announce it with.

    `is_dry` writes nothing: for an update that was published before, by a process that is over. `seen` is filled with
    what was found of each chunk, before it is written.
    """
    grid, seen = member.grid(draft.fragment), {} if seen is None else seen
    if unfit := _unfit(member, draft.fragment, source, draft.weight):
        return _withdrawn(draft, unfit)
    is_small = is_inline(member, draft.fragment)
    children = [
        _write_chunk(
            member,
            draft,
            source,
            i,
            seen,
            is_kept=is_small,
            is_written=not (is_small or is_dry or draft.is_local_only(i)),
        )
        for i in range(len(grid))
    ]
    written: list[list[Buffer]] = yield Gather(children, member.connections)
    if len(seen) < len(grid):
        return _withdrawn(draft, Rejection(draft.rank, "finite", "the update has values that are not finite"))
    norm = math.sqrt(sum(one.norm**2 for one in seen.values()))
    inline = memoryview(b"".join(part for parts in written for part in parts)) if is_small else None
    return replace(draft, norm=norm, chunks=tuple(seen[i].check for i in range(len(grid))), inline=inline)


def _write_chunk(
    member: RoundContext,
    draft: Offer,
    source: Source,
    chunk: int,
    seen: dict[int, Seen],
    *,
    is_kept: bool,
    is_written: bool,
) -> Steps[list[Buffer]]:
    """The encoded bytes if they are to be kept; `seen` stays without a chunk that has a value that is not finite."""
    began = member.io.clock.monotonic()
    grid, how = member.grid(draft.fragment), codec(draft.codec)
    values = np.ascontiguousarray(source.read(*grid.span(chunk)), dtype=np.float32)
    if how.payload_is_values and is_written and values.nbytes >= _LARGE:
        yield from _write_as_seen(member, draft, chunk, values, seen)
        return []
    square, check = (
        one_pass.squares_and_check(values) if how.payload_is_values else (one_pass.sum_of_squares(values), "")
    )
    # No value is larger than the norm, so most of the time the norm says that all of them are within bounds.
    if not square < how.largest**2 and not is_within(values, how.largest):
        return []
    parts = how.encode(values)
    found = seen[chunk] = Seen(check or checksum(*parts), math.sqrt(square))
    member.io.spend("encode", began)
    if is_written:
        yield from put_chunk(member, draft, chunk, parts, found.check, found.norm)
    return parts if is_kept else []


def _write_as_seen(member: RoundContext, draft: Offer, chunk: int, values: F32, seen: dict[int, Seen]) -> Steps[None]:
    """Write a chunk whose payload is its values, and look at them on the way."""
    began = member.io.clock.monotonic()
    outgoing = FrameWriter(update_header(draft, member.grid(draft.fragment), chunk), values, member.io.clock)
    with suppress(NotFinite):
        yield from member.io.put(_key(member, draft, chunk), outgoing)
        member.io.spend("encode", began, began + outgoing.seconds)
        seen[chunk] = Seen(outgoing.check, outgoing.norm)


def put_chunk(
    member: RoundContext, offer: Offer, chunk: int, parts: list[Buffer], check: str | None, norm: float
) -> Steps[None]:
    """Write one chunk of our update; `check` is its checksum if that is known, `norm` the L2 of its values."""
    header = update_header(offer, member.grid(offer.fragment), chunk) | {"norm": norm}
    sealed = seal_chunk(header, parts, check=check)
    yield from member.io.put(_key(member, offer, chunk), sealed)


def _key(member: RoundContext, offer: Offer, chunk: int) -> str:
    return member.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)


def is_within(values: F32, largest: float) -> bool:
    """Every value is finite and at most `largest` in magnitude."""
    if values.size == 0:
        return True
    return bool(values.max() <= largest and values.min() >= -largest)  # both are False for NaN


def _unfit(member: RoundContext, fragment: int, source: Source, weight: float) -> Rejection | None:
    if source.size != (size := member.layout(fragment).size):
        return Rejection(member.rank, "layout", f"the update has {source.size} values, the layout {size}")
    if not (np.isfinite(weight) and weight > 0):
        return Rejection(member.rank, "weight", f"weight {weight} is not finite and above 0")
    return None


def _withdrawn(draft: Offer, why: Rejection) -> Offer:
    weight = draft.weight if np.isfinite(draft.weight) else 0.0
    return replace(draft, withdrawn=why, weight=weight, expected=())


def repair_offer(member: RoundContext, offer: Offer) -> Steps[None]:
    """Write our offer again if it can no longer be read as it was written."""
    key = member.keys.offer(offer.round_no, offer.rank, offer.slot)
    try:
        yield from member.io.read(key, lambda data: _opened(member, offer, data, offer.slot))
    except (CorruptUpdate, KeyNotFound):
        yield from member.io.put(key, offer.seal())


def announce(member: RoundContext, offer: Offer) -> Steps[Offer]:
    """Create the offer in the first slot that no dead incarnation holds; the one this process made before stands."""
    if offer.withdrawn is not None:
        why = offer.withdrawn
        member.events.add("update_rejected", offer.round_no, rank=offer.rank, check=why.check, detail=why.detail)
    member.memory.announced = offer.round_no
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


def has_announced(member: RoundContext, offer: Offer) -> Steps[bool]:
    """Whether an offer of this very process stands in this round."""
    for slot in count():
        key = member.keys.offer(offer.round_no, offer.rank, slot)
        try:
            stands = yield from member.io.read(key, lambda data, s=slot: _opened(member, offer, data, s))  # type: ignore[misc]
        except KeyNotFound:
            return False
        except CorruptUpdate:
            continue
        if stands.token == offer.token:
            return True
    raise AssertionError("unreachable")


def _opened(member: RoundContext, offer: Offer, data: Buffer, slot: int) -> Offer:
    return Offer.open(data, run_id=member.run_id, round_no=offer.round_no, rank=offer.rank, slot=slot)
