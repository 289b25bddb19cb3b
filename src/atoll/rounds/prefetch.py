"""Averaging before the commit: a replica reads the others' chunks as they are uploaded, and publishes their mean.

Every replica expects the participants of the last round again, so it knows which chunks it will own. If the commit
names those participants, most of the averaging is done by then, and uploads and downloads have overlapped. If not,
the means are not used: a mean is stored under the id of its participants.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.errors import CorruptUpdate, StoreError
from atoll.rounds import one_pass
from atoll.rounds.average import ReducedChunk, finish
from atoll.rounds.chunks import check_update, reported, update_header
from atoll.rounds.codecs.base import F32, as_bytes, codec
from atoll.rounds.contributions import Participant, Participants, PrefetchedMean, joined, mean_name, sink_slice
from atoll.rounds.frames import FrameReader, checksum
from atoll.rounds.io import Gather, Steps
from atoll.rounds.records import text
from atoll.rounds.reduce import Accumulator
from atoll.stores.base import Buffer

if TYPE_CHECKING:
    from atoll.rounds.exchange import RoundState

log = logging.getLogger("atoll.rounds")

_SAFE_NORM = 1e38
"""No value exceeds the norm of its vector, so a sum of norms below this fits float32."""


class _ChunkSource(NamedTuple):
    """One rank's part of a chunk."""

    payload: Buffer | FrameReader
    check: str
    """XXH3-64 of the payload according to its header; empty for our own part."""
    weight: float
    norm: float


def prefetch(state: RoundState) -> Steps[dict[int, PrefetchedMean]]:
    """Average the chunks that we will own if the participants are the expected ones, until the commit is known."""
    context, expected = state.context, state.expected
    if not expected or state.is_inline or state.is_retry:
        return {}
    chunks = range(len(context.grid(state.fragment)))
    mine = [i for i in chunks if state.mode == "whole" or state.ranks[i % len(expected)] == context.rank]
    if (
        not state.is_separate
    ):  # the means are kept in new memory until the update is no longer needed: limit their number
        mine = mine[: max(1, context.connections // 2)]
    # Only the first chunk is polled for until the others have uploaded theirs.
    if not mine or (first := (yield from _await_parts(state, mine[0]))) is None:
        return {}
    children = [_average(state, mine[0], first), *(_await_and_average(state, i) for i in mine[1:])]
    found: list[PrefetchedMean | None] = yield Gather(children, context.chunk_width(len(expected)))
    means = {chunk: mean for chunk, mean in zip(mine, found, strict=True) if mean is not None}
    log.debug("round %d: rank %d prefetched %d of %d means", state.round_no, context.rank, len(means), len(mine))
    return means


def _await_and_average(state: RoundState, chunk: int) -> Steps[PrefetchedMean | None]:
    parts = yield from _await_parts(state, chunk)
    return None if parts is None else (yield from _average(state, chunk, parts))


def _await_parts(state: RoundState, chunk: int) -> Steps[list[_ChunkSource] | None]:
    """Every participant's part of a chunk; None if the round is decided otherwise before they are there."""
    children = [_await_part(state, rank, chunk) for rank in state.ranks]
    found: list[_ChunkSource | None] = yield Gather(children, 1 if state.context.is_local_store else len(children))
    parts = [part for part in found if part is not None]
    if len(parts) == len(found) and all(part.weight > 0 for part in parts):
        return parts
    _close(parts)
    return None


def _await_part(state: RoundState, rank: int, chunk: int) -> Steps[_ChunkSource | None]:
    """A rank's part of a chunk, opened but not read; None once the round turns out to be unexpected."""
    context, grid = state.context, state.context.grid(state.fragment)
    if rank == context.rank:
        values = state.source.read(*grid.span(chunk))
        norm = state.encoded[chunk].norm if chunk in state.encoded else math.inf
        return _ChunkSource(joined(codec(state.draft.codec).encode(values)), "", state.weight, norm)
    header = update_header(state.draft, grid, chunk)
    header |= {"rank": rank, "incarnation": state.expected[rank]}
    del header["attempt"], header["weight"]
    key = context.keys.update(state.round_no, rank, state.expected[rank], chunk)
    pauses = context.pauses()
    while not state.is_unexpected:
        must_exist = state.is_over  # a committed update was announced, and its chunks were uploaded before that
        body = yield from context.io.open(key)
        if body is not None:
            try:
                reader = yield from context.io.receive(partial(FrameReader, body, context.io.clock, kind="update"))
                return _checked(reader, header)
            except BaseException as exc:
                body.close()
                if not isinstance(exc, CorruptUpdate | StoreError):
                    raise
        if must_exist:
            break  # damaged or missing: fall back to the checked path of `average`
        yield from context.io.sleep(next(pauses))
    return None


def _checked(reader: FrameReader, header: dict[str, Any]) -> _ChunkSource:
    check_update(reader.header, reader.payload_bytes, header)
    return _ChunkSource(reader, text(reader.header.get("xxh3")), *reported(reader.header))


def _average(state: RoundState, chunk: int, parts: list[_ChunkSource]) -> Steps[PrefetchedMean | None]:
    """Average a chunk while it is downloaded, and publish the mean in mode `scatter`; None if that fails."""
    context = state.context
    pairs = zip(state.ranks, parts, strict=True)
    participants = Participants(tuple(Participant(rank, state.expected[rank], part.weight) for rank, part in pairs))
    start, stop = context.grid(state.fragment).span(chunk)
    in_sink = sink_slice(state.sink, start, stop) if state.is_separate else None
    out = np.empty(stop - start, np.float32) if in_sink is None else in_sink
    began = context.io.clock.monotonic()
    try:
        reduced = yield from context.io.receive(lambda: _reduce(state, chunk, participants, parts, out))
    except (CorruptUpdate, StoreError):
        return None  # fall back to the checked path of `average`
    finally:
        _close(parts)
        received = began + sum(part.payload.seconds for part in parts if isinstance(part.payload, FrameReader))
        context.io.spend("get", began, received)
        context.io.spend("reduce", received)
    if reduced is None:
        return None
    if state.mode == "scatter":
        name = mean_name(context, state.round_no, state.fragment, participants.id, chunk)
        key = context.keys.mean(state.round_no, participants.id, chunk)
        if not (yield from context.io.create(key, name.seal(reduced.parts, reduced.encoded, check=reduced.check))):
            return None
    if state.is_separate and reduced.values is not in_sink:
        state.sink.write(start, reduced.values)
    values = None if state.is_separate else reduced.values
    return PrefetchedMean(participants.id, state.mode, reduced.parts, values)


def _reduce(
    state: RoundState, chunk: int, participants: Participants, parts: list[_ChunkSource], out: F32
) -> ReducedChunk | None:
    """The mean of these parts; None if a checksum is wrong or a value is not finite."""
    agreement = state.context.agreement
    how, of_mean = codec(agreement.codec), codec(agreement.mean_codec)
    if how.payload_is_values and (state.mode == "whole" or of_mean.payload_is_values):
        own = state.encoded.get(chunk)
        done = one_pass.average_and_check(
            [
                part.payload
                if isinstance(part.payload, FrameReader)
                else one_pass.InMemory(part.payload, own.check if own else "")
                for part in parts
            ],
            participants.coefficients,
            out,
            is_hashed=state.mode == "scatter",
            is_surely_finite=sum(part.norm for part in parts) < _SAFE_NORM,
        )
        reduced = ReducedChunk(out, [as_bytes(out)], done.check, done.is_finite, done.checks)
    else:
        payloads = [p.payload.whole() if isinstance(p.payload, FrameReader) else p.payload for p in parts]
        accumulator = Accumulator(out.size, participants.coefficients, out)
        accumulator.add_all(how, payloads)
        checks = (p.payload.check if isinstance(p.payload, FrameReader) else checksum(p.payload) for p in parts)
        reduced = finish(state.context, accumulator, tuple(checks), state.mode)
    is_right = all(part.check in ("", check) for part, check in zip(parts, reduced.parts, strict=True))
    return reduced if reduced.is_finite and is_right else None


def _close(parts: list[_ChunkSource]) -> None:
    for part in parts:
        if isinstance(part.payload, FrameReader):
            part.payload.close()
