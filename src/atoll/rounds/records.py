"""The small things replicas tell each other through the store, each to and from its JSON.

`from_json` trusts nothing: a member that is missing or of the wrong type is a `CorruptUpdate`.

An offer announces one rank's update: what it is, what it weighs, and the checksum of every chunk.

It is written after the chunks it names, so whoever reads it can read them. A small update travels inside its offer.
The chunks that a rank expects to average itself may be held back: nobody else needs them, and their mean is published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from atoll.errors import CorruptUpdate
from atoll.errors import LeftBehind as LeftBehind
from atoll.rounds.frames import digest, open_frame, open_record, seal_frame, seal_record
from atoll.rounds.layout import Layout
from atoll.stores.base import Buffer

T = TypeVar("T")


@dataclass(frozen=True)
class Blob:
    """Bulk bytes in pieces: where they are and how to know that they are right."""

    round_no: int
    digest: str
    """XXH3-128 of all the bytes."""
    size_bytes: int
    pieces: tuple[tuple[int, str], ...]
    """(bytes, XXH3-64) of each piece, in order."""

    def to_json(self) -> dict[str, Any]:
        return {"round": self.round_no, "digest": self.digest, "bytes": self.size_bytes, "pieces": self.pieces}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Blob:
        listed = tuple((whole(p[0]), text(p[1])) for p in member(data, "pieces", list))
        blob = cls(whole(data.get("round")), text(data.get("digest")), whole(data.get("bytes")), listed)
        if sum(size for size, _ in listed) != blob.size_bytes:
            raise CorruptUpdate("the pieces of a blob do not add up", check="record")
        return blob


@dataclass(frozen=True)
class Agreement:
    """What all replicas of a run share from before step 1 to the end. The first writer's stands."""

    run_id: str
    world_size: int
    layouts: tuple[Layout, ...]
    """One for each fragment; round r exchanges fragment r mod their number, unless the caller says otherwise."""
    chunk: int
    """Elements in a chunk of the grid."""
    codec: str
    mean_codec: str
    settings: Mapping[str, Any]
    """What else must be equal everywhere, such as the outer optimizer; compared, otherwise not looked at."""
    initial: Blob

    def seal(self) -> bytes:
        return seal_record(
            {
                "kind": "agreement",
                "run": self.run_id,
                "world_size": self.world_size,
                "layouts": [layout.to_json() for layout in self.layouts],
                "chunk": self.chunk,
                "codec": self.codec,
                "mean_codec": self.mean_codec,
                "settings": dict(self.settings),
                "initial": self.initial.to_json(),
            }
        )

    @classmethod
    def open(cls, data: Buffer) -> Agreement:
        r = open_record(data, kind="agreement")
        return cls(
            text(r.get("run")),
            whole(r.get("world_size")),
            tuple(Layout.from_json(layout) for layout in member(r, "layouts", list)),
            whole(r.get("chunk")),
            text(r.get("codec")),
            text(r.get("mean_codec")),
            member(r, "settings", dict),
            Blob.from_json(member(r, "initial", dict)),
        )

    @property
    def digest(self) -> str:
        """What the first commit names as its predecessor."""
        return digest(self.seal())


@dataclass(frozen=True)
class Claim:
    """One process that took a rank. `token` tells our own claim from one that only looks like it."""

    rank: int
    incarnation: int
    attempt: int
    token: str

    def seal(self) -> bytes:
        return seal_record({"kind": "claim", **asdict(self)})

    @classmethod
    def open(cls, data: Buffer) -> Claim:
        r = open_record(data, kind="claim")
        return cls(whole(r.get("rank")), whole(r.get("incarnation")), whole(r.get("attempt")), text(r.get("token")))


@dataclass(frozen=True)
class Contribution:
    """One update a commit names: whose, which, and what it weighs."""

    rank: int
    incarnation: int
    attempt: int
    slot: int
    digest: str
    weight: float
    norm: float

    @classmethod
    def from_json(cls, r: Mapping[str, Any]) -> Contribution:
        numbers = [whole(r.get(name)) for name in ("rank", "incarnation", "attempt", "slot")]
        weight, norm = finite(r.get("weight")), finite(r.get("norm"))
        if weight <= 0:
            raise CorruptUpdate(f"weight {weight} is not above 0", rank=numbers[0], check="weight")
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], text(r.get("digest")), weight, norm)


@dataclass(frozen=True)
class Rejection:
    """An update that was there and was not averaged, and the check it failed."""

    rank: int
    check: str
    detail: str

    @classmethod
    def from_json(cls, r: Mapping[str, Any]) -> Rejection:
        return cls(whole(r.get("rank")), text(r.get("check")), text(r.get("detail")))


@dataclass(frozen=True)
class Commit:
    """The agreement of one round: exactly these updates, averaged exactly this way."""

    run_id: str
    round_no: int
    fragment: int
    previous: str
    """Digest of the commit before this one, or of the run's agreement: commits are a chain."""
    base: str
    """Digest of the state the updates were made from; empty when replicas do not tell."""
    mode: str
    """`scatter`: means are published chunk by chunk; `whole`: everyone averages the updates themselves."""
    contributions: tuple[Contribution, ...]
    """In rank order."""
    rejected: tuple[Rejection, ...] = ()
    members: tuple[int, ...] = ()
    """Ranks that the next round should look for."""
    by: int = 0

    def __post_init__(self) -> None:
        ranks = [c.rank for c in self.contributions]
        if not ranks or ranks != sorted(set(ranks)) or self.mode not in ("scatter", "whole"):
            raise CorruptUpdate("a commit names each rank once, in order", round_no=self.round_no, check="record")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(c.rank for c in self.contributions)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(c.weight for c in self.contributions)

    def contribution(self, rank: int) -> Contribution | None:
        return next((c for c in self.contributions if c.rank == rank), None)

    def owner(self, chunk: int) -> int:
        """The rank that averages a chunk."""
        return self.contributions[chunk % len(self.contributions)].rank

    @cached_property
    def digest(self) -> str:
        """What the next commit names as its predecessor."""
        return digest(self.seal())

    def seal(self) -> bytes:
        return self._sealed

    @cached_property
    def _sealed(self) -> bytes:
        return seal_record(
            {
                "kind": "commit",
                "run": self.run_id,
                "round": self.round_no,
                "fragment": self.fragment,
                "previous": self.previous,
                "base": self.base,
                "mode": self.mode,
                "contributions": [dict(vars(c)) for c in self.contributions],
                "rejected": [dict(vars(r)) for r in self.rejected],
                "members": self.members,
                "by": self.by,
            }
        )

    @classmethod
    def open(cls, data: Buffer) -> Commit:
        r = open_record(data, kind="commit")
        return cls(
            run_id=text(r.get("run")),
            round_no=whole(r.get("round")),
            fragment=whole(r.get("fragment")),
            previous=text(r.get("previous")),
            base=text(r.get("base")),
            mode=text(r.get("mode")),
            contributions=tuple(Contribution.from_json(c) for c in member(r, "contributions", list)),
            rejected=tuple(Rejection.from_json(c) for c in member(r, "rejected", list)),
            members=tuple(whole(rank) for rank in member(r, "members", list)),
            by=whole(r.get("by")),
        )


@dataclass(frozen=True)
class Snapshot:
    """The state before round `round_no`: every commit below it applied, none from it on."""

    run_id: str
    round_no: int
    previous: str
    """Digest of the last commit that is in it, or of the agreement."""
    sections: tuple[tuple[str, int], ...]
    """(name, bytes) of each buffer in the blob, in order."""
    blob: Blob
    meta: Mapping[str, Any] = field(default_factory=dict)

    def seal(self) -> bytes:
        return seal_record(
            {
                "kind": "snapshot",
                "run": self.run_id,
                "round": self.round_no,
                "previous": self.previous,
                "sections": self.sections,
                "blob": self.blob.to_json(),
                "meta": dict(self.meta),
            }
        )

    @classmethod
    def open(cls, data: Buffer) -> Snapshot:
        r = open_record(data, kind="snapshot")
        return cls(
            text(r.get("run")),
            whole(r.get("round")),
            text(r.get("previous")),
            tuple((text(s[0]), whole(s[1])) for s in member(r, "sections", list)),
            Blob.from_json(member(r, "blob", dict)),
            member(r, "meta", dict),
        )


@dataclass(frozen=True)
class Ack:
    """This rank will never again ask for a round below `round_no`. `count` changes with every writing."""

    rank: int
    incarnation: int
    round_no: int
    count: int

    def seal(self) -> bytes:
        return seal_record({"kind": "ack", **asdict(self)})

    @classmethod
    def open(cls, data: Buffer) -> Ack:
        r = open_record(data, kind="ack")
        return cls(*(whole(r.get(name)) for name in ("rank", "incarnation", "round_no", "count")))


def member(data: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A member of this type, or `CorruptUpdate`."""
    value = data.get(name)
    if not isinstance(value, kind):
        raise CorruptUpdate(f"`{name}` is {value!r}, not a {kind.__name__}", check="record")
    return value


def whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptUpdate(f"{value!r} is not a whole number from 0", check="record")
    return value


def finite(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CorruptUpdate(f"{value!r} is not a finite number", check="record")
    return float(value)


def text(value: object) -> str:
    if not isinstance(value, str):
        raise CorruptUpdate(f"{value!r} is not a text", check="record")
    return value


def texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(text(value) for value in values)


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

    def is_local_only(self, chunk: int) -> bool:
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
