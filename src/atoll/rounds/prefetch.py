"""Averaging while the round is still being agreed: others' chunks are read as they land, and their mean published.

Everybody expects the ranks of the last round to take part again, and knows which chunks would be whose. If that is what
is committed, most of the work is done by then, and uploads and downloads have gone on side by side. If not, nothing
is lost but the effort: a mean names the party it was made of.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.errors import CorruptUpdate, StoreError
from atoll.rounds import one_pass
from atoll.rounds.average import Reduced, finish
from atoll.rounds.chunks import check_update, told, update_header
from atoll.rounds.codecs.base import F32, as_bytes, codec
from atoll.rounds.contributions import Participant, Participants, PrefetchedMean, joined, mean_name
from atoll.rounds.frames import FrameReader, checksum
from atoll.rounds.io import Gather, Steps
from atoll.rounds.records import text
from atoll.rounds.reduce import Accumulator
from atoll.stores.base import Buffer

if TYPE_CHECKING:
    from atoll.rounds.exchange import RoundState

_SAFE_NORM = 1e38
"""No value is larger than its norm, so sums below this are within float32."""


class _ChunkSource(NamedTuple):
    """One rank's part of a chunk."""

    payload: Buffer | FrameReader
    check: str
    """XXH3-64 of the payload as its writer says; empty for our own."""
    weight: float
    norm: float


def prefetch(turn: RoundState) -> Steps[None]:
    """Average what will be ours if everybody takes part, until it is known who does."""
    member, expected = turn.member, turn.expected
    if not expected or turn.is_inline or turn.is_again:
        return
    chunks = range(len(member.grid(turn.fragment)))
    mine = [i for i in chunks if turn.mode == "whole" or turn.ranks[i % len(expected)] == member.rank]
    if not turn.is_separate:  # the mean will take the place of the update, which may yet be needed: keep it aside
        mine = mine[: max(1, member.connections // 2)]
    # Until the others are there, only the first chunk is asked for; the rest does not wait for it to be published.
    if mine and (first := (yield from _await_parts(turn, mine[0]))) is not None:
        yield Gather(
            [_average(turn, mine[0], first), *(_foresee(turn, i) for i in mine[1:])], member.side_by_side(len(expected))
        )


def _foresee(turn: RoundState, chunk: int) -> Steps[None]:
    """Average one chunk, unless the round is agreed before everything for it is there."""
    parts = yield from _await_parts(turn, chunk)
    if parts is not None:
        yield from _average(turn, chunk, parts)


def _await_parts(turn: RoundState, chunk: int) -> Steps[list[_ChunkSource] | None]:
    """Everybody's part of a chunk; None when the round is agreed before they are there."""
    children = [_await_part(turn, rank, chunk) for rank in turn.ranks]
    found: list[_ChunkSource | None] = yield Gather(children, 1 if turn.member.is_local_store else len(children))
    parts = [part for part in found if part is not None]
    if len(parts) == len(found) and all(part.weight > 0 for part in parts):
        return parts
    _close(parts)
    return None


def _average(turn: RoundState, chunk: int, parts: list[_ChunkSource]) -> Steps[None]:
    """Average a chunk while it arrives, and publish it if it is to be published."""
    member = turn.member
    seats = zip(turn.ranks, parts, strict=True)
    party = Participants(tuple(Participant(rank, turn.expected[rank], part.weight) for rank, part in seats))
    start, stop = member.grid(turn.fragment).span(chunk)
    room = turn.room(start, stop)
    out = np.empty(stop - start, np.float32) if room is None else room
    began = member.io.clock.monotonic()
    try:
        reduced = yield from member.io.receive(lambda: _reduced(turn, chunk, party, parts, out))
    except (CorruptUpdate, StoreError):
        return  # left to those who look more closely
    finally:
        _close(parts)
        received = began + sum(part.payload.seconds for part in parts if isinstance(part.payload, FrameReader))
        member.io.spend("get", began, received)
        member.io.spend("reduce", received)
    if reduced is None:
        return
    if turn.mode == "scatter":
        name = mean_name(member, turn.round_no, turn.fragment, party.id, chunk)
        key = member.keys.mean(turn.round_no, party.id, chunk)
        if not (yield from member.io.create(key, name.seal(reduced.parts, reduced.encoded, check=reduced.check))):
            return
    if turn.is_separate and reduced.values is not room:
        turn.sink.write(start, reduced.values)
    values = None if turn.is_separate else reduced.values
    turn.foreseen[chunk] = PrefetchedMean(party.id, turn.mode, reduced.parts, values)


def _reduced(turn: RoundState, chunk: int, party: Participants, parts: list[_ChunkSource], out: F32) -> Reduced | None:
    """The mean of these parts; None if one of them is not what it claims to be, or values are not finite."""
    agreement = turn.member.agreement
    how, of_mean = codec(agreement.codec), codec(agreement.mean_codec)
    if how.payload_is_values and (turn.mode == "whole" or of_mean.payload_is_values):
        own = turn.seen.get(chunk)
        done = one_pass.average_and_check(
            [
                part.payload
                if isinstance(part.payload, FrameReader)
                else one_pass.InMemory(part.payload, own.check if own else "")
                for part in parts
            ],
            party.coefficients,
            out,
            is_hashed=turn.mode == "scatter",
            is_surely_finite=sum(part.norm for part in parts) < _SAFE_NORM,
        )
        reduced = Reduced(out, [as_bytes(out)], done.check, done.is_finite, done.checks)
    else:
        payloads = [p.payload.whole() if isinstance(p.payload, FrameReader) else p.payload for p in parts]
        accumulator = Accumulator(out.size, party.coefficients, out)
        accumulator.add_all(how, payloads)
        checks = (p.payload.check if isinstance(p.payload, FrameReader) else checksum(p.payload) for p in parts)
        reduced = finish(turn.member, accumulator, tuple(checks), turn.mode)
    is_right = all(part.check in ("", check) for part, check in zip(parts, reduced.parts, strict=True))
    return reduced if reduced.is_finite and is_right else None


def _await_part(turn: RoundState, rank: int, chunk: int) -> Steps[_ChunkSource | None]:
    """A rank's part of a chunk as soon as they are there; None once it is known that others take part."""
    member = turn.member
    if rank == member.rank:
        values = turn.source.read(*member.grid(turn.fragment).span(chunk))
        norm = turn.seen[chunk].norm if chunk in turn.seen else math.inf
        return _ChunkSource(joined(codec(turn.draft.codec).encode(values)), "", turn.weight, norm)
    header = update_header(turn.draft, member.grid(turn.fragment), chunk)
    header |= {"rank": rank, "incarnation": turn.expected[rank]}
    del header["attempt"], header["weight"]
    key = member.keys.update(turn.round_no, rank, turn.expected[rank], chunk)
    pauses = member.pauses()
    while not turn.is_void:
        is_there = turn.is_over  # what was committed was announced, and what was announced had been written
        body = yield from member.io.open(key)
        if body is not None:
            try:
                incoming = yield from member.io.receive(partial(FrameReader, body, member.io.clock, kind="update"))
                return _arriving(incoming, header)
            except BaseException as exc:
                body.close()
                if not isinstance(exc, CorruptUpdate | StoreError):
                    raise
        if is_there:
            break  # something is wrong; left to those who look more closely
        yield from member.io.sleep(next(pauses))
    return None


def _arriving(incoming: FrameReader, header: dict[str, Any]) -> _ChunkSource:
    check_update(incoming.header, incoming.payload_bytes, header)
    return _ChunkSource(incoming, text(incoming.header.get("xxh3")), *told(incoming.header))


def _close(parts: list[_ChunkSource]) -> None:
    for part in parts:
        if isinstance(part.payload, FrameReader):
            part.payload.close()
