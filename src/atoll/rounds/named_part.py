"""One rank's part of an exchange on the wire: a frame whose header says exactly what it is part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import CorruptUpdate
from atoll.rounds.named_session import Session
from atoll.rounds.records import member, text, whole
from atoll.rounds.seal import checksum, open_frame, seal_frame
from atoll.stores.base import Buffer

_SHOWN = 1000
"""Tensors described one by one in a header, which is limited to 1 MiB; the digest covers all of them."""


@dataclass(frozen=True)
class Exchange:
    """Which exchange a part belongs to."""

    session: Session
    name: str
    generation: int


@dataclass(frozen=True)
class Part:
    """What one rank gives: raw bytes, and what must be equal on every rank for them to be combined."""

    operation: str
    tensors: Sequence[tuple[str, tuple[int, ...]]]
    """(dtype, shape) of each."""
    note: str
    """Anything else that must be equal, such as a digest of the state the values were made from."""
    payload: Buffer

    @property
    def terms(self) -> tuple[str, str]:
        """Equal on two ranks exactly when their parts can be combined."""
        layout = "".join(f"{dtype} {list(shape)}\n" for dtype, shape in self.tensors)
        return checksum(f"{self.operation}\n{layout}".encode()), self.note


@dataclass(frozen=True)
class ReadPart:
    """A part as it was read and checked, with how far its rank was when it wrote it."""

    rank: int
    terms: tuple[str, str]
    words: str
    payload: memoryview
    call: int
    """The number of this call among those of its rank."""
    oldest: int
    """Every call of that rank below this number was over."""


def seal_part(exchange: Exchange, rank: int, part: Part, call: int, oldest: int) -> list[memoryview]:
    header = {
        **_identity(exchange, rank),
        "terms": list(part.terms),
        "words": describe(part),
        "call": call,
        "oldest": oldest,
    }
    return seal_frame(header, [part.payload])


def read_back(rank: int, part: Part, call: int, oldest: int) -> ReadPart:
    """What `open_part` would give for a part of our own."""
    return ReadPart(rank, part.terms, describe(part), memoryview(part.payload).cast("B"), call, oldest)


def open_part(exchange: Exchange, rank: int, data: Buffer) -> ReadPart:
    """A part of exactly this exchange and rank, every byte of it checked."""
    frame = open_frame(data, kind="part")
    wanted = _identity(exchange, rank)
    odd = sorted(name for name, value in wanted.items() if frame.header.get(name) != value)
    if odd:
        message = f"what rank {rank} gave for `{exchange.name}` differs in {', '.join(odd)}"
        raise CorruptUpdate(message, round_no=exchange.generation, rank=rank, check="identity")
    said = member(frame.header, "terms", list)
    if len(said) != 2:
        raise CorruptUpdate("a part has no terms", rank=rank, check="record")
    return ReadPart(
        rank,
        (text(said[0]), text(said[1])),
        text(frame.header.get("words")),
        frame.payload,
        whole(frame.header.get("call")),
        whole(frame.header.get("oldest")),
    )


def describe(part: Part) -> str:
    """The terms in words."""
    shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in part.tensors[:_SHOWN])
    more = f" and {len(part.tensors) - _SHOWN} more" if len(part.tensors) > _SHOWN else ""
    of = f", made from {part.note[:16]}" if part.note else ""
    return f"{part.operation} of {shown or 'nothing'}{more}{of}"


def _identity(exchange: Exchange, rank: int) -> dict[str, Any]:
    return {
        "kind": "part",
        "session": exchange.session.nonce,
        "name": exchange.name,
        "generation": exchange.generation,
        "rank": rank,
    }
