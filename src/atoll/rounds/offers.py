"""An offer announces one rank's update: what it is, what it weighs, and the checksum of every chunk.

It is written after the chunks it names, so whoever reads it can read them. A small update travels inside its offer.
The chunks that a rank expects to average itself may be held back: nobody else needs them, and their mean is published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from atoll.errors import CorruptUpdate
from atoll.rounds.records import Rejection, finite, member, text, texts, whole
from atoll.rounds.seal import digest, open_frame, seal_frame
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Offer:
    """One rank's update of one round."""

    run_id: str
    round_no: int
    fragment: int
    rank: int
    incarnation: int
    attempt: int
    token: str
    layout: str
    codec: str
    base: str
    weight: float
    norm: float
    chunks: tuple[str, ...]
    """XXH3-64 of the encoded bytes of each chunk."""
    withdrawn: Rejection | None = None
    """Set when the replica itself found its update unfit; there are no chunks then."""
    slot: int = 0
    inline: memoryview | None = None
    """The encoded chunks, one after the other, when they travel with the offer."""
    expected: tuple[int, ...] = ()
    """The ranks that were expected to take part, if the chunks that are our own among them were held back."""

    def is_held(self, chunk: int) -> bool:
        """Whether a chunk was not in the store when this was written."""
        return bool(self.expected) and self.expected[chunk % len(self.expected)] == self.rank

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of layout, codec and chunk checksums, each followed by a line feed: what a commit names."""
        return digest("".join(f"{part}\n" for part in (self.layout, self.codec, *self.chunks)).encode())

    def seal(self) -> list[memoryview]:
        header: dict[str, Any] = {
            "kind": "offer",
            "run": self.run_id,
            "round": self.round_no,
            "fragment": self.fragment,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "attempt": self.attempt,
            "token": self.token,
            "layout": self.layout,
            "codec": self.codec,
            "base": self.base,
            "weight": self.weight,
            "norm": self.norm,
            "chunks": list(self.chunks),
            "inline": self.inline is not None,
            "expected": list(self.expected),
            "withdrawn": None if self.withdrawn is None else [self.withdrawn.check, self.withdrawn.detail],
        }
        return seal_frame(header, [] if self.inline is None else [self.inline])

    @classmethod
    def open(cls, data: Buffer, *, run_id: str, round_no: int, rank: int, slot: int) -> Offer:
        """Read an offer that must be the one of this run, round and rank."""
        frame = open_frame(data, kind="offer")
        h = frame.header
        if (h.get("run"), h.get("round"), h.get("rank")) != (run_id, round_no, rank):
            raise CorruptUpdate("an offer is of another run, round or rank", rank=rank, check="identity")
        said = h.get("withdrawn")
        offer = cls(
            run_id,
            round_no,
            whole(h.get("fragment")),
            rank,
            whole(h.get("incarnation")),
            whole(h.get("attempt")),
            text(h.get("token")),
            text(h.get("layout")),
            text(h.get("codec")),
            text(h.get("base")),
            finite(h.get("weight")),
            finite(h.get("norm")),
            texts(member(h, "chunks", list)),
            None if said is None else Rejection(rank, *texts(said)),
            slot,
            expected=tuple(whole(rank) for rank in member(h, "expected", list)),
        )
        return replace(offer, inline=frame.payload) if h.get("inline") is True else offer
