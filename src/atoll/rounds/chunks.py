"""One chunk on the wire: of an update, or of the mean. What is read must be exactly what was asked for."""

from __future__ import annotations

from typing import Any

from atoll.errors import CorruptUpdate
from atoll.rounds.codec import F32, codec
from atoll.rounds.layout import Grid
from atoll.rounds.offers import Offer
from atoll.rounds.records import Commit
from atoll.rounds.seal import checksum, open_frame, seal_frame
from atoll.stores.base import Buffer


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
        **_place(grid, chunk),
    }


def mean_header(commit: Commit, layout: str, codec_name: str, grid: Grid, chunk: int) -> dict[str, Any]:
    """The header of a chunk of the mean of a commit."""
    return {
        "kind": "mean",
        "run": commit.run_id,
        "round": commit.round_no,
        "fragment": commit.fragment,
        "commit": commit.digest,
        "layout": layout,
        "codec": codec_name,
        **_place(grid, chunk),
    }


def seal_chunk(header: dict[str, Any], payload: list[Buffer]) -> list[memoryview]:
    return seal_frame(header, payload)


def open_chunk(data: Buffer, header: dict[str, Any], *, wanted: str | None = None) -> F32:
    """The values of a chunk whose header is exactly `header`, and whose checksum is `wanted` if that is known."""
    frame = open_frame(data, kind=header["kind"])
    found = dict(frame.header)
    check = found.pop("xxh3")
    if found != header:
        odd = sorted(name for name in {*found, *header} if found.get(name) != header.get(name))
        raise _corrupt(header, f"differs in {', '.join(odd)}", "identity")
    if wanted is not None and check != wanted:
        raise _corrupt(header, "is not the one that was announced", "digest")
    return codec(header["codec"]).decode(frame.payload, header["count"])


def inline_chunk(offer: Offer, grid: Grid, chunk: int) -> F32:
    """The values of a chunk that came with its offer."""
    assert offer.inline is not None
    how = codec(offer.codec)
    start = how.encoded_bytes(grid.chunk) * chunk
    payload = offer.inline[start : start + how.encoded_bytes(grid.count(chunk))]
    if checksum(payload) != offer.chunks[chunk]:
        message = f"chunk {chunk} of rank {offer.rank} is not the one that was announced"
        raise CorruptUpdate(message, round_no=offer.round_no, rank=offer.rank, check="digest")
    return how.decode(payload, grid.count(chunk))


def _place(grid: Grid, chunk: int) -> dict[str, Any]:
    start, stop = grid.span(chunk)
    return {"chunk": chunk, "start": start, "count": stop - start}


def _corrupt(header: dict[str, Any], what: str, check: str) -> CorruptUpdate:
    whose = f"chunk {header['chunk']} of " + (f"rank {header['rank']}" if "rank" in header else "the mean")
    return CorruptUpdate(f"{whose} {what}", round_no=header["round"], rank=header.get("rank", -1), check=check)
