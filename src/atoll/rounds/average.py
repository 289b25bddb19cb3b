"""The mean of a committed round, on the fixed chunk grid. `exchange` and `replay` call `average`.

In mode `scatter` the owner of chunk i, which is the (i mod n)-th participant, averages and publishes it; the first
mean created under a key counts. A replica that does not get a chunk in time computes it from the updates in the store:
from all of them, or from all but the part that a dead owner did not upload. In mode `whole` every replica averages
every chunk itself. Bytes are verified before they are added up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import CorruptUpdate, KeyNotFound, LeftBehind, StoreUnavailable
from atoll.rounds import one_pass
from atoll.rounds.chunks import Encoded
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.context import RoundContext
from atoll.rounds.contributions import MeanTask, PrefetchedMean, joined, sink_slice
from atoll.rounds.frames import FrameReader, checksum
from atoll.rounds.io import Discard, Gather, Steps
from atoll.rounds.publish import repair_offer
from atoll.rounds.reduce import Accumulator, Coefficients, is_finite
from atoll.stores.base import Buffer

log = logging.getLogger("atoll.rounds")


@dataclass(frozen=True)
class ReducedChunk:
    """The mean of a chunk: its values, its encoded bytes, and the checksums of its parts."""

    values: F32
    encoded: list[Buffer]
    check: str
    """XXH3-64 of the encoded bytes; empty for a mean that is not published."""
    is_finite: bool
    parts: tuple[str | None, ...]
    """The checksum of each participant's chunk; None for one that was left out."""


def average(task: MeanTask) -> Steps[None]:
    """Fill the sink with the mean of the commit."""
    yield from task.fetch_offers()
    chunks, rank, ours = range(len(task.grid)), task.context.rank, task.ours
    width = task.context.chunk_width(len(task.participants))
    if task.commit.mode == "whole":
        yield Gather([_average_own(task, i) for i in chunks], width)
        return
    is_owned = [task.participants.owner(i) == rank for i in chunks]
    late = [i for i in chunks if ours is not None and ours.is_local_only(i) and not is_owned[i]]
    yield Gather([task.upload_late(i) for i in late], task.context.connections)
    # Our own chunks come first, because the others' means are probably not there yet. A restarted owner without its
    # values fetches its chunks too: the earlier process may have published them and deleted their parts.
    own = [i for i in chunks if is_owned[i] and ours is not None]
    yield Gather([_average_own(task, i) for i in own], width)
    yield Gather([_fetch(task, i) for i in chunks if i not in own], task.context.connections)
    yield from task.clear_wait()
    if task.own is not None and task.own.inline is None:
        for chunk in chunks:  # every mean is published, so no replica reads our update again
            if not task.own.is_local_only(chunk):
                yield Discard(task.context.keys.update(task.own.round_no, rank, task.own.incarnation, chunk))


def finish(context: RoundContext, accumulator: Accumulator, parts: tuple[str | None, ...], mode: str) -> ReducedChunk:
    """The mean that every replica applies: rounded by its codec if it is published, else unrounded."""
    began = context.io.clock.monotonic()
    values = accumulator.mean()
    encoded: list[Buffer] = []
    if mode == "scatter":
        how = codec(context.agreement.mean_codec)
        encoded = how.encode(values)
        values = how.decode(joined(encoded), values.size)
    reduced = ReducedChunk(values, encoded, checksum(*encoded) if encoded else "", is_finite(values), parts)
    context.io.spend("reduce", began)
    return reduced


def _average_own(task: MeanTask, chunk: int) -> Steps[None]:
    """Average a chunk that we own, unless its prefetched mean is valid."""
    prefetched = task.prefetched.pop(chunk, None)
    if prefetched is not None and _is_still_valid(task, prefetched, chunk):
        if prefetched.values is not None:
            task.sink.write(task.grid.span(chunk)[0], prefetched.values)
        return
    if task.commit.mode == "whole":
        reduced = yield from _reduce(task, chunk)
        task.sink.write(task.grid.span(chunk)[0], reduced.values)
        return
    trouble = None
    try:
        if (yield from _publish(task, chunk)):
            return
    except CorruptUpdate as exc:  # a replica that could read every contribution may still publish the mean
        trouble = exc
    yield from _fetch(task, chunk, trouble)


def _is_still_valid(task: MeanTask, prefetched: PrefetchedMean, chunk: int) -> bool:
    is_as_expected = (prefetched.participants_id, prefetched.mode) == (task.participants.id, task.commit.mode)
    return is_as_expected and _matches_offers(task, prefetched.parts, chunk)


def _matches_offers(task: MeanTask, parts: tuple[str | None, ...], chunk: int) -> bool:
    """Whether every part has the checksum in its offer. A part that was left out, or an unknown offer, matches."""
    if len(parts) != len(task.participants):
        return False
    offers = [task.offers.get(rank) for rank in task.participants.ranks]
    pairs = zip(parts, offers, strict=True)
    return all(part is None or offer is None or part == offer.chunks[chunk] for part, offer in pairs)


def _fetch(task: MeanTask, chunk: int, trouble: CorruptUpdate | None = None) -> Steps[None]:
    """Download a chunk of the mean, or compute it when the owner takes longer than `patience_s`."""
    context, owner = task.context, task.participants.owner(chunk)
    pauses = context.pauses()
    waited_s = total_s = 0.0
    while True:
        if (yield from _download(task, chunk)):
            task.silent.discard(owner)
            task.awaited.discard(owner)
            return
        if waited_s >= context.tuning.patience_s or (waited_s == 0.0 and owner in task.silent):
            if owner not in task.silent:
                log.info("round %d: rank %d did not publish chunk %d in time", task.commit.round_no, owner, chunk)
            task.silent.add(owner)
            yield from _repair_own(task, chunk)
            try:
                if (yield from _publish(task, chunk)):
                    return
            except CorruptUpdate as exc:
                trouble = exc
            waited_s = 0.0
        if task.time_left_s <= 0:
            raise trouble or CorruptUpdate(
                f"chunk {chunk} of the mean did not come in {task.deadline_s:g} s",
                round_no=task.commit.round_no,
                rank=owner,
                check="missing",
            )
        goes_on = not (context.quorum.is_strict and task.is_local_only(chunk))
        if not goes_on:
            yield from task.check_alive(owner)
        left_s = context.tuning.patience_s - waited_s if goes_on else task.time_left_s
        yield from task.report_wait(owner, total_s, left_s, goes_on)
        pause = min(next(pauses), max(0.0, task.time_left_s))
        yield from context.io.sleep(pause)
        waited_s, total_s = waited_s + pause, total_s + pause


def _repair_own(task: MeanTask, chunk: int) -> Steps[None]:
    """Upload our offer and our part of a chunk again if they cannot be read: others may be waiting for them."""
    if task.own is None:
        return
    yield from repair_offer(task.context, task.own)
    if task.ours is None or task.ours.inline is not None or task.ours.is_local_only(chunk):
        return
    try:
        yield from task.read_contribution(task.ours, chunk)
    except (CorruptUpdate, LeftBehind):
        # When the mean overwrites the update, a damaged mean may have replaced our values in memory.
        if task.own_chunk(task.ours, chunk) is not None:
            yield from task.upload_late(chunk)


def _publish(task: MeanTask, chunk: int) -> Steps[bool]:
    """Average a chunk and create its mean; False when another replica's mean is there, which must be downloaded."""
    reduced = yield from _reduce(task, chunk)
    sealed = task.name(chunk).seal(reduced.parts, reduced.encoded, check=reduced.check)
    if not (yield from task.context.io.create(task.key(chunk), sealed)):
        if (yield from _must_keep_stored(task, chunk, is_complete=None not in reduced.parts)):
            return False
        yield from task.context.io.put(
            task.key(chunk), sealed
        )  # the stored mean is damaged: write the same bytes again
    elif None in reduced.parts:
        yield from _check_not_retired(task, reduced.parts, chunk)
    task.sink.write(task.grid.span(chunk)[0], reduced.values)
    return True


def _must_keep_stored(task: MeanTask, chunk: int, *, is_complete: bool) -> Steps[bool]:
    """Whether the stored mean must not be replaced: it is good, or another replica may have applied it.

    When a part may be left out, two different means are possible, and a replica may have read the stored one before it
    was damaged.
    """
    try:
        found = yield from task.context.io.read(task.key(chunk), task.name(chunk).open, is_promised=True)
    except KeyNotFound as exc:
        raise task.retired(exc) from exc
    except CorruptUpdate:
        return not is_complete or (task.is_local_only(chunk) and not task.context.quorum.is_strict)
    return _matches_offers(task, found.parts, chunk)


def _check_not_retired(task: MeanTask, parts: Sequence[str | None], chunk: int) -> Steps[None]:
    """Raise `LeftBehind` if an earlier mean was deleted before we created ours. Its parts were deleted before it."""
    for rank, part in zip(task.participants.ranks, parts, strict=True):
        offer = task.offers.get(rank)
        if part is None or offer is None or (task.is_ours(offer) and offer.is_local_only(chunk)):
            continue
        try:
            yield from task.read_contribution(offer, chunk)
        except LeftBehind:
            yield from task.context.io.delete(task.key(chunk))
            raise
        return


def _download(task: MeanTask, chunk: int) -> Steps[bool]:
    """Read a chunk of the mean from the store into the sink, verified on the way; False while there is no good one."""
    io = task.context.io
    body = yield from io.open(task.key(chunk))
    if body is None:
        return False
    began = io.clock.monotonic()
    try:
        reader = yield from io.receive(lambda: FrameReader(body, io.clock, kind="mean"))
        check, parts = task.name(chunk).check(reader.header, reader.payload_bytes)
        is_good = _matches_offers(task, parts, chunk)
        if is_good:
            is_good = yield from io.receive(lambda: _write_to_sink(task, chunk, reader, check))
        received = began + reader.seconds
        io.spend("get", began, received)
        io.spend("reduce", received)
        return is_good
    except (CorruptUpdate, StoreUnavailable) as exc:
        log.debug("round %d: chunk %d of the mean cannot be read: %s", task.commit.round_no, chunk, exc)
        return False
    finally:
        body.close()


def _write_to_sink(task: MeanTask, chunk: int, reader: FrameReader, check: str) -> bool:
    """Write a mean to the sink as it arrives; whether it has this checksum. If not, the sink holds undefined values."""
    how = codec(task.context.agreement.mean_codec)
    start, stop = task.grid.span(chunk)
    out = sink_slice(task.sink, start, stop)
    # The sink may be the memory of our update. It must not be overwritten unchecked if it is the only copy of our part.
    ours = task.ours
    is_only_copy = ours is not None and ours.is_local_only(chunk) and task.participants.owner(chunk) == ours.rank
    if how.payload_is_values and out is not None and not is_only_copy:
        one_pass.copy_hashed(reader, out)
        return reader.check == check
    payload = reader.whole()
    if reader.check != check:
        return False
    if out is None:
        task.sink.write(start, how.decode(payload, stop - start))
    else:
        how.decode_into(payload, out)
    return True


def _reduce(task: MeanTask, chunk: int) -> Steps[ReducedChunk]:
    """Average one chunk from its contributions in rank order, a few contributions at a time."""
    context = task.context
    left_out = yield from _left_out(task, chunk)
    included = [one for one in task.participants if one.rank not in left_out]
    accumulator = Accumulator(task.grid.count(chunk), Coefficients.of([one.weight for one in included]))
    window = max(1, context.connections - 1)
    parts: dict[int, str] = {}
    for first in range(0, len(included), window):
        few = included[first : first + window]
        children = [task.contribution_of(one.rank, chunk) for one in few]
        found: list[Encoded] = yield Gather(children, 1 if context.is_local_store else window)
        began = context.io.clock.monotonic()
        accumulator.add_all(codec(context.agreement.codec), [one.payload for one in found])
        parts |= {one.rank: part.check for one, part in zip(few, found, strict=True)}
        context.io.spend("reduce", began)
    ordered = tuple(parts.get(rank) for rank in task.participants.ranks)
    reduced = finish(context, accumulator, ordered, task.commit.mode)
    if not reduced.is_finite:
        yield from _raise_not_finite(task, [one.rank for one in included], chunk)
    return reduced


def _left_out(task: MeanTask, chunk: int) -> Steps[set[int]]:
    """Ranks whose part of a chunk is lost: they did not upload it, and are not there to average or upload it.

    In a strict run only the owner may leave out its own part: after a restart, when its update is not the same again.
    Otherwise any replica may leave out a part, once its rank had `patience_s` to upload it.
    """
    owner, is_strict = task.participants.owner(chunk), task.context.quorum.is_strict
    found: set[int] = set()
    for rank in task.participants.ranks:
        offer = yield from task.offer_of(rank)
        if not offer.is_local_only(chunk) or task.is_ours(offer):
            continue
        if rank != owner:
            if not is_strict and not (yield from task.is_uploaded_late(offer, chunk, task.context.tuning.patience_s)):
                found.add(rank)
        elif is_strict and owner != task.context.rank:
            message = f"chunk {chunk} needs the contribution of rank {owner}, which was never uploaded"
            raise CorruptUpdate(message, round_no=task.commit.round_no, rank=owner, check="missing")
        else:
            found.add(rank)
    if len(found) == len(task.participants):
        message = f"no participant uploaded its contribution to chunk {chunk}"
        raise CorruptUpdate(message, round_no=task.commit.round_no, rank=owner, check="missing")
    return found


def _raise_not_finite(task: MeanTask, ranks: Sequence[int], chunk: int) -> Steps[None]:
    """Raise `CorruptUpdate` that names the rank whose values are not finite."""
    count = task.grid.count(chunk)
    for rank in ranks:
        found = yield from task.contribution_of(rank, chunk)
        if not is_finite(codec(task.context.agreement.codec).decode(found.payload, count)):
            message = f"the update of rank {rank} has values that are not finite, in chunk {chunk}"
            raise CorruptUpdate(message, round_no=task.commit.round_no, rank=rank, check="finite")
    raise CorruptUpdate(f"the mean overflows in chunk {chunk}", round_no=task.commit.round_no, check="finite")
