"""The small records that replicas exchange through the store, each with `seal` and `open`.

`open` trusts nothing: a member that is missing or of the wrong type is a `CorruptUpdate`. A rank writes its offer
after the chunks that it names, so a reader of the offer can read them; a small update is part of its offer. A rank may
skip the upload of chunks that it expects to average itself: it publishes their mean instead.
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
    """Bulk bytes, stored in pieces: their digest, and the size and checksum of each piece."""

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
            raise CorruptUpdate("the sizes of the pieces do not add up to that of the blob", check="record")
        return blob


@dataclass(frozen=True)
class Agreement:
    """The settings that all replicas of a run share. The first replica creates it; the others compare theirs."""

    run_id: str
    world_size: int
    layouts: tuple[Layout, ...]
    """One for each fragment. By default round r exchanges fragment r modulo the number of fragments."""
    chunk: int
    """Elements in a chunk of the grid."""
    codec: str
    mean_codec: str
    settings: Mapping[str, Any]
    """Other settings that must be equal on all replicas, such as the outer optimizer."""
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
        """The `previous` of the first commit."""
        return digest(self.seal())


@dataclass(frozen=True)
class Claim:
    """One process that took a rank. The random `token` identifies the process."""

    rank: int
    incarnation: int
    attempt: int
    token: str
    launch: int = 1

    @property
    def generation(self) -> tuple[int, int]:
        """Orders the processes of a rank: attempts are counted from 0 in each launch."""
        return self.launch, self.attempt

    def seal(self) -> bytes:
        record = {"kind": "claim", **asdict(self)}
        if self.launch == 1:
            del record["launch"]
        return seal_record(record)

    @classmethod
    def open(cls, data: Buffer) -> Claim:
        r = open_record(data, kind="claim")
        numbers = [whole(r.get(name)) for name in ("rank", "incarnation", "attempt")]
        return cls(numbers[0], numbers[1], numbers[2], text(r.get("token")), whole(r.get("launch", 1)))


@dataclass(frozen=True)
class Contribution:
    """One update that a commit includes."""

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
    """An update that was offered but not averaged, and the check that it failed."""

    rank: int
    check: str
    detail: str

    @classmethod
    def from_json(cls, r: Mapping[str, Any]) -> Rejection:
        return cls(whole(r.get("rank")), text(r.get("check")), text(r.get("detail")))


@dataclass(frozen=True)
class Commit:
    """The decision of one round: which updates are averaged, and how."""

    run_id: str
    round_no: int
    fragment: int
    previous: str
    """Digest of the commit before this one, or of the run's agreement: commits form a chain."""
    base: str
    """Digest of the state that the updates start from; empty if replicas do not report it."""
    mode: str
    """`scatter`: owners publish the mean chunk by chunk; `whole`: every replica averages the updates itself."""
    contributions: tuple[Contribution, ...]
    """In rank order."""
    rejected: tuple[Rejection, ...] = ()
    members: tuple[int, ...] = ()
    """Ranks that are expected in the next round."""
    by: int = 0

    def __post_init__(self) -> None:
        ranks = [c.rank for c in self.contributions]
        if not ranks or ranks != sorted(set(ranks)) or self.mode not in ("scatter", "whole"):
            raise CorruptUpdate(
                "a commit must name each rank once, in rank order, and a known mode",
                round_no=self.round_no,
                check="record",
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(c.rank for c in self.contributions)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(c.weight for c in self.contributions)

    def contribution(self, rank: int) -> Contribution | None:
        return next((c for c in self.contributions if c.rank == rank), None)

    def owner(self, chunk: int) -> int:
        """The rank that averages this chunk."""
        return self.contributions[chunk % len(self.contributions)].rank

    @cached_property
    def digest(self) -> str:
        """The `previous` of the next commit."""
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
    """The state before round `round_no`: all earlier commits are applied to it."""

    run_id: str
    round_no: int
    previous: str
    """Digest of the last commit that is applied to it, or of the agreement."""
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
    """This rank no longer needs any round below `round_no`. `count` increases with every write."""

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
    """The member `name` if it has this type, or `CorruptUpdate`."""
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
    """Set if the replica rejected its own update; the offer has no chunks then."""
    slot: int = 0
    inline: memoryview | None = None
    """The joined encoded chunks, if the offer contains them."""
    expected: tuple[int, ...] = ()
    """The participants that this rank expected, if it did not upload the chunks that it owns among them."""

    def is_local_only(self, chunk: int) -> bool:
        """Whether the rank did not upload this chunk before the offer."""
        return bool(self.expected) and self.expected[chunk % len(self.expected)] == self.rank

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of layout, codec and chunk checksums, each followed by a line feed. Commits refer to it."""
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
        """Check the offer of this run, round and rank."""
        frame = open_frame(data, kind="offer")
        h = frame.header
        if (h.get("run"), h.get("round"), h.get("rank")) != (run_id, round_no, rank):
            raise CorruptUpdate("an offer belongs to another run, round or rank", rank=rank, check="identity")
        withdrawn = h.get("withdrawn")
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
            None if withdrawn is None else Rejection(rank, *texts(withdrawn)),
            slot,
            expected=tuple(whole(rank) for rank in member(h, "expected", list)),
        )
        return replace(offer, inline=frame.payload) if h.get("inline") is True else offer
