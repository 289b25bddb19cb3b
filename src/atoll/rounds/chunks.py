"""One chunk on the wire: of an update, or of the mean. What is read must be exactly what was asked for."""

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
    """The bytes of a chunk as its codec wrote them, checked, where they lie."""

    payload: Buffer
    check: str
    """XXH3-64 of the payload; empty if it was not looked at."""
    weight: float = 0.0
    norm: float = math.inf
    """L2 of the values, as their writer says."""


def update_header(offer: Offer, grid: Grid, chunk: int) -> dict[str, Any]:
    """The header of a chunk of this update; the checksum is added when it is sealed."""
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
        **_place(grid, chunk),
    }


def seal_chunk(header: dict[str, Any], payload: list[Buffer], *, check: str | None = None) -> list[memoryview]:
    return seal_frame(header, payload, check=check)


def open_update(data: Buffer, header: dict[str, Any], *, wanted: str | None = None) -> Encoded:
    """A chunk whose header is `header` as far as that goes, and whose checksum is `wanted` if that is known."""
    frame = open_frame(data, kind=header["kind"])
    check_update(frame.header, len(frame.payload), header)
    if wanted is not None and frame.header["xxh3"] != wanted:
        raise _corrupt(header, "is not the one that was announced", "digest")
    weight, norm = told(frame.header)
    return Encoded(frame.payload, frame.header["xxh3"], weight, norm)


def check_update(found: dict[str, Any], payload_bytes: int, header: dict[str, Any]) -> None:
    """Raise `CorruptUpdate` unless this is the header of a chunk as `header` describes it, as far as that goes."""
    odd = sorted(name for name in header if found.get(name) != header[name])
    if odd:
        raise _corrupt(header, f"differs in {', '.join(odd)}", "identity")
    if payload_bytes != codec(header["codec"]).encoded_bytes(header["count"]):
        raise _corrupt(header, f"has a payload of {payload_bytes} bytes", "length")


def told(found: dict[str, Any]) -> tuple[float, float]:
    """The weight and the L2 norm that a chunk's writer names; 0 and infinity if there are none."""
    return _number(found.get("weight"), 0.0), _number(found.get("norm"), math.inf)


def open_chunk(data: Buffer, header: dict[str, Any], *, wanted: str | None = None) -> F32:
    """The values of such a chunk."""
    found = open_update(data, header, wanted=wanted)
    return codec(header["codec"]).decode(found.payload, header["count"])


def inline_chunk(offer: Offer, grid: Grid, chunk: int) -> Encoded:
    """A chunk that came with its offer."""
    assert offer.inline is not None
    how = codec(offer.codec)
    start = how.encoded_bytes(grid.chunk) * chunk
    payload = offer.inline[start : start + how.encoded_bytes(grid.count(chunk))]
    if checksum(payload) != offer.chunks[chunk]:
        message = f"chunk {chunk} of rank {offer.rank} is not the one that was announced"
        raise CorruptUpdate(message, round_no=offer.round_no, rank=offer.rank, check="digest")
    return Encoded(payload, offer.chunks[chunk], offer.weight)


@dataclass(frozen=True)
class MeanChunk:
    """A chunk of the mean: its bytes, and the checksum of each part in it, or None for a part that was left out."""

    payload: Buffer
    check: str
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class MeanName:
    """What a chunk of the mean must say of itself."""

    run_id: str
    round_no: int
    fragment: int
    party: str
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
            "party": self.party,
            "layout": self.layout,
            "codec": self.codec,
            **_place(self.grid, self.chunk),
        }

    def seal(self, parts: Sequence[str | None], payload: list[Buffer], *, check: str | None = None) -> list[memoryview]:
        return seal_frame({**self.header(), "parts": list(parts)}, payload, check=check)

    def open(self, data: Buffer) -> MeanChunk:
        frame = open_frame(data, kind="mean")
        return MeanChunk(frame.payload, *self.check(frame.header, len(frame.payload)))

    def check(self, found: dict[str, Any], payload_bytes: int) -> tuple[str, tuple[str | None, ...]]:
        """The checksums of the payload and of its parts, as a header tells them if it is of this chunk."""
        header = self.header()
        odd = sorted(name for name in header if found.get(name) != header[name])
        parts = found.get("parts")
        if odd or not isinstance(parts, list):
            raise _corrupt(header, f"differs in {', '.join(odd or ['parts'])}", "identity")
        if payload_bytes != codec(self.codec).encoded_bytes(self.grid.count(self.chunk)):
            raise _corrupt(header, f"has a payload of {payload_bytes} bytes", "length")
        return text(found.get("xxh3")), tuple(None if part is None else text(part) for part in parts)


def _number(value: object, instead: float) -> float:
    try:
        return float(value) if isinstance(value, int | float) else instead
    except OverflowError:
        return instead


def _place(grid: Grid, chunk: int) -> dict[str, Any]:
    start, stop = grid.span(chunk)
    return {"chunk": chunk, "start": start, "count": stop - start}


def _corrupt(header: dict[str, Any], what: str, check: str) -> CorruptUpdate:
    whose = f"chunk {header['chunk']} of " + (f"rank {header['rank']}" if "rank" in header else "the mean")
    return CorruptUpdate(f"{whose} {what}", round_no=header["round"], rank=header.get("rank", -1), check=check)
