"""Publishing an update: encode it chunk by chunk, upload the chunks, then announce them with one offer.

At most one offer of a rank counts in a round: slots are created in order, and a process takes a later slot only when
the earlier ones belong to replaced incarnations.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.kernels import fused
from atoll.kernels.fused import Hash
from atoll.rounds import one_pass
from atoll.rounds.chunks import update_header
from atoll.rounds.codecs.base import F32, as_bytes, codec
from atoll.rounds.context import RoundContext
from atoll.rounds.frames import PREAMBLE_BYTES, canonical, checksum, seal_frame, seal_front
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import fenced
from atoll.rounds.layout import Source
from atoll.rounds.one_pass import LEAST_COMPILED, reliable_squares, sum_of_squares
from atoll.rounds.records import Offer, Rejection
from atoll.stores.base import Buffer
from atoll.stores.fast import HashedWhileWritten

log = logging.getLogger("atoll.rounds")

_LARGE = 1 << 20
"""From this many bytes on, reading memory only once saves more than a header of a whole KiB costs."""


class ChunkSummary(NamedTuple):
    """The checksum and the norm of an encoded chunk."""

    check: str
    """XXH3-64 of the encoded bytes."""
    norm: float
    """L2 of the values."""


def draft_offer(context: RoundContext, round_no: int, fragment: int, weight: float, base: str) -> Offer:
    """The offer of an update before it is encoded: without norm and chunks."""
    claim = context.claim
    return Offer(
        context.run_id, round_no, fragment, claim.rank, claim.incarnation, claim.attempt, claim.token,
        context.layout(fragment).hash, context.agreement.codec, base, float(weight), 0.0, (),
    )  # fmt: skip


def is_inline(context: RoundContext, fragment: int) -> bool:
    """Whether updates of this fragment are small enough to be part of their offer."""
    encoded = codec(context.agreement.codec).encoded_bytes(context.layout(fragment).size)
    return encoded <= context.tuning.inline_bytes


def upload(
    context: RoundContext,
    draft: Offer,
    source: Source,
    *,
    is_dry: bool = False,
    encoded: dict[int, ChunkSummary] | None = None,
) -> Steps[Offer]:
    """Encode the update and upload every chunk that must be uploaded; returns the offer to announce.

    `is_dry` uploads nothing: for an update that was published before. `encoded` is filled with the summary of each
    chunk, before the upload of that chunk ends.
    """
    grid, encoded = context.grid(draft.fragment), {} if encoded is None else encoded
    if unfit := _unfit(context, draft.fragment, source, draft.weight):
        return _withdrawn(draft, unfit)
    is_small = is_inline(context, draft.fragment)
    uploads = [not (is_small or is_dry or draft.is_local_only(i)) for i in range(len(grid))]
    children = [
        _encode_chunk(context, draft, source, i, encoded, is_kept=is_small, is_uploaded=is_uploaded)
        for i, is_uploaded in enumerate(uploads)
    ]
    kept: list[list[Buffer]] = yield Gather(children, context.connections)
    if len(encoded) < len(grid):
        return _withdrawn(draft, Rejection(draft.rank, "finite", "the update has values that are not finite"))
    log.debug("round %d: rank %d uploaded %d of %d chunks", draft.round_no, draft.rank, sum(uploads), len(grid))
    norm = math.sqrt(sum(one.norm**2 for one in encoded.values()))
    inline = memoryview(b"".join(part for parts in kept for part in parts)) if is_small else None
    return replace(draft, norm=norm, chunks=tuple(encoded[i].check for i in range(len(grid))), inline=inline)


def _encode_chunk(
    context: RoundContext,
    draft: Offer,
    source: Source,
    chunk: int,
    encoded: dict[int, ChunkSummary],
    *,
    is_kept: bool,
    is_uploaded: bool,
) -> Steps[list[Buffer]]:
    """Encode a chunk and upload it if asked to; returns the bytes if they are to be kept.

    A chunk with a value that is not finite, or too large for the codec, is not added to `encoded`.
    """
    began = context.io.clock.monotonic()
    how = codec(draft.codec)
    values = np.ascontiguousarray(source.read(*context.grid(draft.fragment).span(chunk)), dtype=np.float32)
    if how.payload_is_values and is_uploaded and values.nbytes >= _LARGE:
        writer = FrameWriter(update_header(draft, context.grid(draft.fragment), chunk), values, context.io.clock)
        with suppress(NotFinite):
            yield from context.io.put(_key(context, draft, chunk), writer)
            context.io.spend("encode", began, began + writer.seconds)
            encoded[chunk] = ChunkSummary(writer.check, writer.norm)
        return []
    square, check = (
        one_pass.squares_and_check(values) if how.payload_is_values else (one_pass.sum_of_squares(values), "")
    )
    # No value exceeds the norm, so the values themselves are tested only when the norm is too large.
    if not square < how.largest**2 and not is_within(values, how.largest):
        return []
    parts = how.encode(values)
    summary = encoded[chunk] = ChunkSummary(check or checksum(*parts), math.sqrt(square))
    context.io.spend("encode", began)
    if is_uploaded:
        yield from put_chunk(context, draft, chunk, parts, summary.check, summary.norm)
    return parts if is_kept else []


def put_chunk(
    context: RoundContext, offer: Offer, chunk: int, parts: list[Buffer], check: str | None, norm: float
) -> Steps[None]:
    """Upload one chunk of our update; `check` is its checksum if that is known, `norm` the L2 of its values."""
    header = update_header(offer, context.grid(offer.fragment), chunk) | {"norm": norm}
    sealed = seal_frame(header, parts, check=check)
    yield from context.io.put(_key(context, offer, chunk), sealed)


def _key(context: RoundContext, offer: Offer, chunk: int) -> str:
    return context.keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)


def is_within(values: F32, largest: float) -> bool:
    """Every value is finite and at most `largest` in magnitude."""
    if values.size == 0:
        return True
    return bool(values.max() <= largest and values.min() >= -largest)  # both are False for NaN


def _unfit(context: RoundContext, fragment: int, source: Source, weight: float) -> Rejection | None:
    if source.size != (size := context.layout(fragment).size):
        return Rejection(context.rank, "layout", f"the update has {source.size} values, the layout {size}")
    if not (np.isfinite(weight) and weight > 0):
        return Rejection(context.rank, "weight", f"weight {weight} is not finite and above 0")
    return None


def _withdrawn(draft: Offer, why: Rejection) -> Offer:
    weight = draft.weight if np.isfinite(draft.weight) else 0.0
    return replace(draft, withdrawn=why, weight=weight, expected=())


def announce(context: RoundContext, offer: Offer) -> Steps[Offer]:
    """Create the offer in the first free slot. An offer that this process created before is returned instead."""
    if offer.withdrawn is not None:
        why = offer.withdrawn
        context.events.add("update_rejected", offer.round_no, rank=offer.rank, check=why.check, detail=why.detail)
    context.history.announced = offer.round_no
    for slot in count():
        if (yield from context.io.create(context.keys.offer(offer.round_no, offer.rank, slot), offer.seal())):
            log.debug("round %d: rank %d announced its offer in slot %d", offer.round_no, offer.rank, slot)
            return replace(offer, slot=slot)
        try:
            stored = yield from _read_offer(context, offer, slot)
        except CorruptUpdate:
            continue  # no replica can read it, so the next slot counts
        if stored.token == offer.token:
            return stored
        if stored.incarnation > offer.incarnation:
            raise fenced(context.claim, offer.round_no)
    raise AssertionError("unreachable")


def has_announced(context: RoundContext, offer: Offer) -> Steps[bool]:
    """Whether the store has an offer of this process for the round."""
    for slot in count():
        try:
            stored = yield from _read_offer(context, offer, slot)
        except KeyNotFound:
            return False
        except CorruptUpdate:
            continue
        if stored.token == offer.token:
            return True
    raise AssertionError("unreachable")


def repair_offer(context: RoundContext, offer: Offer) -> Steps[None]:
    """Write our offer again if it is missing or damaged in the store."""
    try:
        yield from _read_offer(context, offer, offer.slot)
    except (CorruptUpdate, KeyNotFound):
        log.debug("round %d: rank %d writes its offer again", offer.round_no, offer.rank)
        yield from context.io.put(context.keys.offer(offer.round_no, offer.rank, offer.slot), offer.seal())


def _read_offer(context: RoundContext, offer: Offer, slot: int) -> Steps[Offer]:
    """The stored offer of the same round and rank in this slot."""

    def opened(data: Buffer) -> Offer:
        return Offer.open(data, run_id=context.run_id, round_no=offer.round_no, rank=offer.rank, slot=slot)

    return (yield from context.io.read(context.keys.offer(offer.round_no, offer.rank, slot), opened))


_FRONT_STEP = 1 << 10
_TILE = 1 << 19
_LONGEST = -sys.float_info.max
"""No float has a longer text."""


class NotFinite(Exception):
    """A value is infinite or NaN, so nothing is written."""


class FrameWriter(HashedWhileWritten):
    """A frame of float32 values that is hashed and normed while the store writes it, so that memory is read once.

    The header contains the hash and the norm, so it is written last, into space that was reserved for it.
    """

    norm = math.nan
    """L2 of the values; known after `front`."""
    seconds = 0.0
    """Time spent on hashing, including the copy when one pass does both."""

    def __init__(self, header: Mapping[str, Any], values: F32, clock: Clock = SYSTEM_CLOCK) -> None:
        self._header, self._values, self._clock = header, values, clock
        self.payload = as_bytes(np.ascontiguousarray(values, "<f4"))
        text = canonical({**header, "norm": _LONGEST, "xxh3": "0" * 16})
        self.front_bytes = -(-(PREAMBLE_BYTES + len(text)) // _FRONT_STEP) * _FRONT_STEP
        self._kernels = fused.current() if values.size >= LEAST_COMPILED else None
        self._begin()

    @property
    def check(self) -> str:
        """XXH3-64 of the payload so far."""
        return self._hash.hexdigest()

    def hash_and_norm(self, start: int, stop: int, out: memoryview | None = None) -> None:
        if start == 0:
            self._begin()
        began = self._clock.monotonic()
        values = self._values[start // 4 : stop // 4]
        copy = None if out is None else np.frombuffer(out, np.uint8)
        if self._kernels is not None:
            self._squares += self._kernels.hash_and_norm(values, self._hash, copy)
        else:
            self._hash.update(self.payload[start:stop])
            self._squares += sum_of_squares(values)
            if copy is not None:
                np.copyto(copy, np.frombuffer(self.payload[start:stop], np.uint8))
        self._hashed_bytes = stop
        self.seconds += self._clock.monotonic() - began

    def write_hashed(self, fd: int, start: int, stop: int, step: int) -> None:
        if self._kernels is None:
            super().write_hashed(fd, start, stop, step)
            return
        if start == 0:
            self._begin()
        values = self._values[start // 4 : stop // 4]
        squares, seconds = self._kernels.write_hashed(values, self._hash, fd, self.front_bytes + start, step)
        self._squares += squares
        self.seconds += seconds
        self._hashed_bytes = stop

    def front(self) -> Buffer:
        if self._hashed_bytes < len(self.payload):
            for start in range(0, len(self.payload), _TILE):
                self.hash_and_norm(start, min(start + _TILE, len(self.payload)))
        self.norm = math.sqrt(reliable_squares(self._squares, self._values))
        # If the squares overflowed, the norm is that of the current values, which must be the ones that were hashed.
        is_unchanged = math.isfinite(self._squares) or checksum(self.payload) == self.check
        if not (math.isfinite(self.norm) and is_unchanged):
            raise NotFinite
        header = {**self._header, "norm": self.norm, "xxh3": self.check}
        return seal_front(header, len(self.payload), alignment=self.front_bytes)

    def _begin(self) -> None:
        self._hash = Hash(self._kernels)
        self._squares, self._hashed_bytes, self.seconds = 0.0, 0, 0.0
