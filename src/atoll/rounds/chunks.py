"""One chunk as a frame: of an update, or of the mean.

Writers build the header here, and readers compare the whole header with the one they expect, so a chunk of another
round, rank or layout is never used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import CorruptUpdate
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.frames import checksum, open_frame, seal_frame
from atoll.rounds.records import Offer, text
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Encoded:
    """The checked payload of one chunk, as its codec encoded it."""

    payload: Buffer
    check: str
    """XXH3-64 of the payload; empty if it was not hashed."""
    weight: float = 0.0
    norm: float = math.inf
    """L2 norm of the values, as reported by the writer."""


def update_header(offer: Offer, grid: Grid, chunk: int) -> dict[str, Any]:
    """The header of one chunk of an update, without the checksum."""
    return {
        "kind": "update",
        "run": offer.run_id,
        "round": offer.round_no,
        "fragment": offer.fragment,
        "rank": offer.rank,
        "incarnation": offer.incarnation,
        "attempt": offer.attempt,
        "layout": offer.layout,
        "codec": offer.codec,
        "weight": offer.weight,
        **_position(grid, chunk),
    }


def open_update(data: Buffer, header: dict[str, Any], *, wanted: str | None = None) -> Encoded:
    """Check a chunk: its header has every member of `header`, and its checksum is `wanted` if given."""
    frame = open_frame(data, kind=header["kind"])
    check_update(frame.header, len(frame.payload), header)
    if wanted is not None and frame.header["xxh3"] != wanted:
        raise _corrupt(header, "does not have the checksum in the offer", "digest")
    weight, norm = reported(frame.header)
    return Encoded(frame.payload, frame.header["xxh3"], weight, norm)


def check_update(found: dict[str, Any], payload_bytes: int, header: dict[str, Any]) -> None:
    """Raise `CorruptUpdate` unless `found` has every member of `header`, and the payload has the codec's size."""
    odd = sorted(name for name in header if found.get(name) != header[name])
    if odd:
        raise _corrupt(header, f"differs in {', '.join(odd)}", "identity")
    if payload_bytes != codec(header["codec"]).encoded_bytes(header["count"]):
        raise _corrupt(header, f"has a payload of {payload_bytes} bytes", "length")


def reported(found: dict[str, Any]) -> tuple[float, float]:
    """The weight and the L2 norm in the header of a chunk; 0 and infinity if there are none."""
    return _number(found.get("weight"), 0.0), _number(found.get("norm"), math.inf)


def open_chunk(data: Buffer, header: dict[str, Any], *, wanted: str | None = None) -> F32:
    """Check a chunk as `open_update` does; its decoded values."""
    found = open_update(data, header, wanted=wanted)
    return codec(header["codec"]).decode(found.payload, header["count"])


def inline_chunk(offer: Offer, grid: Grid, chunk: int) -> Encoded:
    """A chunk that the offer contains."""
    assert offer.inline is not None
    how = codec(offer.codec)
    start = how.encoded_bytes(grid.chunk) * chunk
    payload = offer.inline[start : start + how.encoded_bytes(grid.count(chunk))]
    if checksum(payload) != offer.chunks[chunk]:
        message = f"chunk {chunk} of rank {offer.rank} does not have the checksum in the offer"
        raise CorruptUpdate(message, round_no=offer.round_no, rank=offer.rank, check="digest")
    return Encoded(payload, offer.chunks[chunk], offer.weight)


@dataclass(frozen=True)
class MeanChunk:
    """A chunk of the mean, and for each participant the checksum of its contribution, or None if it was left out."""

    payload: Buffer
    check: str
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class MeanName:
    """The identity of one chunk of the mean: every member of its header but the checksums."""

    run_id: str
    round_no: int
    fragment: int
    participants: str
    """The id of the participants, in the key of the chunk."""
    layout: str
    codec: str
    grid: Grid
    chunk: int

    def header(self) -> dict[str, Any]:
        return {
            "kind": "mean",
            "run": self.run_id,
            "round": self.round_no,
            "fragment": self.fragment,
            "party": self.participants,
            "layout": self.layout,
            "codec": self.codec,
            **_position(self.grid, self.chunk),
        }

    def seal(self, parts: Sequence[str | None], payload: list[Buffer], *, check: str | None = None) -> list[memoryview]:
        return seal_frame({**self.header(), "parts": list(parts)}, payload, check=check)

    def open(self, data: Buffer) -> MeanChunk:
        frame = open_frame(data, kind="mean")
        return MeanChunk(frame.payload, *self.check(frame.header, len(frame.payload)))

    def check(self, found: dict[str, Any], payload_bytes: int) -> tuple[str, tuple[str | None, ...]]:
        """Check a header; the checksum of the payload, and those of the contributions."""
        header = self.header()
        odd = sorted(name for name in header if found.get(name) != header[name])
        parts = found.get("parts")
        if odd or not isinstance(parts, list):
            raise _corrupt(header, f"differs in {', '.join(odd or ['parts'])}", "identity")
        if payload_bytes != codec(self.codec).encoded_bytes(self.grid.count(self.chunk)):
            raise _corrupt(header, f"has a payload of {payload_bytes} bytes", "length")
        return text(found.get("xxh3")), tuple(None if part is None else text(part) for part in parts)


def _number(value: object, default: float) -> float:
    try:
        return float(value) if isinstance(value, int | float) else default
    except OverflowError:
        return default


def _position(grid: Grid, chunk: int) -> dict[str, Any]:
    start, stop = grid.span(chunk)
    return {"chunk": chunk, "start": start, "count": stop - start}


def _corrupt(header: dict[str, Any], what: str, check: str) -> CorruptUpdate:
    name = f"chunk {header['chunk']} of " + (f"rank {header['rank']}" if "rank" in header else "the mean")
    return CorruptUpdate(f"{name} {what}", round_no=header["round"], rank=header.get("rank", -1), check=check)
