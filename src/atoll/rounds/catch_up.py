"""How a replica that is new, late or restarted reaches the current round: it replays commits or loads a snapshot.

A snapshot holds named buffers that the caller gives. All replicas have equal state, so the snapshot of any is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import CorruptUpdate, KeyNotFound, LeftBehind
from atoll.rounds import blobs
from atoll.rounds.context import RoundContext
from atoll.rounds.exchange import RoundOutcome, replay
from atoll.rounds.io import Steps
from atoll.rounds.layout import Sink
from atoll.rounds.records import Snapshot
from atoll.stores.base import Buffer

log = logging.getLogger("atoll.rounds")

REPLAY_LIMIT = 4
"""A replica loads a snapshot that is more rounds ahead than this, because replaying them would take longer."""


@dataclass(frozen=True)
class RunPosition:
    """How far a run is, according to the store."""

    next_round: int
    """The first round that is not committed."""
    oldest_round: int | None
    """The oldest round whose commit is in the store."""
    snapshot_round: int | None
    """The newest round that has a snapshot."""


@dataclass(frozen=True)
class LoadedSnapshot:
    """The state before round `round_no`."""

    record: Snapshot
    buffers: dict[str, memoryview]

    @property
    def round_no(self) -> int:
        return self.record.round_no

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.record.meta


def catch_up(
    context: RoundContext,
    round_no: int,
    sink_for: Callable[[int], Sink],
    apply: Callable[[RoundOutcome], None],
    load: Callable[[LoadedSnapshot], None],
    *,
    replace_diverged: bool,
) -> Steps[int]:
    """Apply every round committed from `round_no` on, and return the next round to contribute to.

    `sink_for(fragment)` gives the sink for a mean; `apply` is called once it is filled. `load` replaces the state when
    the rounds are gone, or when loading is faster than replaying; with `replace_diverged` also when the other replicas
    rejected our state as different from theirs, which otherwise raises `CorruptUpdate`.
    """
    while (position := (yield from run_position(context))).next_round > round_no:
        before, trouble = round_no, None
        is_far = position.snapshot_round is not None and position.snapshot_round > round_no + REPLAY_LIMIT
        if is_far or position.oldest_round is None or position.oldest_round > round_no:
            round_no = yield from _load_later_snapshot(context, round_no, load)
        try:
            while (outcome := (yield from replay(context, round_no, sink_for))) is not None:
                apply(outcome)
                round_no += 1
        except (LeftBehind, CorruptUpdate) as exc:
            if isinstance(exc, CorruptUpdate) and not (replace_diverged and exc.check == "base"):
                raise
            trouble = exc
        if trouble is not None or round_no == before:  # later rounds exist, but this one cannot be replayed
            gone = round_no
            round_no = yield from _load_later_snapshot(context, gone, load)
            if round_no == gone:
                message = f"round {gone} is gone and no snapshot after it can be read"
                raise LeftBehind(message, round_no=gone, latest=position.next_round - 1) from trouble
    return round_no


def _load_later_snapshot(context: RoundContext, round_no: int, load: Callable[[LoadedSnapshot], None]) -> Steps[int]:
    """Load a snapshot of a later round, if one can be read; returns the round that is next after that."""
    loaded = yield from load_snapshot(context, round_no + 1)
    if loaded is None:
        return round_no
    log.info("rank %d loads the snapshot of round %d instead of round %d", context.rank, loaded.round_no, round_no)
    load(loaded)
    return loaded.round_no


def run_position(context: RoundContext) -> Steps[RunPosition]:
    """How far the run is; two LISTs."""
    keys = context.keys
    commits = [keys.parse_commit(key) for key in (yield from context.io.list(keys.commits_prefix()))]
    snapshots = yield from snapshot_rounds(context)
    next_round = max([-1, *commits, *(r - 1 for r in snapshots)]) + 1
    return RunPosition(next_round, min(commits, default=None), max(snapshots, default=None))


def write_snapshot(
    context: RoundContext, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any]
) -> Steps[bool]:
    """Write the state before `round_no`; False when another replica has done so already."""
    io, keys = context.io, context.keys
    if (yield from io.probe(keys.snapshot(round_no))) is not None:
        return False
    parts = list(buffers.values())
    blob = blobs.describe(round_no, parts)
    yield from blobs.write_blob(io, keys, blob, parts)
    sizes = tuple((name, memoryview(part).nbytes) for name, part in buffers.items())
    record = Snapshot(context.run_id, round_no, context.previous, sizes, blob, dict(meta))
    created = yield from io.create(keys.snapshot(round_no), record.seal())
    stored = yield from io.read(keys.snapshot(round_no), Snapshot.open)
    if stored.blob.digest != blob.digest:
        yield from blobs.delete_blob(io, keys, blob)
        message = f"two replicas hold different states before round {round_no}"
        raise CorruptUpdate(message, round_no=round_no, rank=context.rank, check="base")
    if created:
        context.events.add("snapshot_written", round_no, bytes=blob.size_bytes)
    return created


def load_snapshot(context: RoundContext, at_least: int = 0) -> Steps[LoadedSnapshot | None]:
    """The newest readable snapshot of round `at_least` or later. The context then continues from it."""
    for round_no in reversed((yield from snapshot_rounds(context))):
        if round_no < at_least:
            break
        try:
            loaded = yield from _load(context, round_no)
        except (CorruptUpdate, KeyNotFound) as exc:  # damaged, or deleted during the read: try the one before
            context.events.add("snapshot_unreadable", round_no, detail=str(exc))
            continue
        context.previous = loaded.record.previous
        return loaded
    return None


def snapshot_rounds(context: RoundContext) -> Steps[list[int]]:
    """The rounds that have a snapshot record, ascending."""
    listed = yield from context.io.list(context.keys.snapshots_prefix())
    return sorted(context.keys.parse_snapshot(key) for key in listed)


def _load(context: RoundContext, round_no: int) -> Steps[LoadedSnapshot]:
    record = yield from context.io.read(context.keys.snapshot(round_no), Snapshot.open)
    if (record.run_id, record.round_no) != (context.run_id, round_no):
        raise CorruptUpdate("a snapshot is of another run or round", round_no=round_no, check="identity")
    whole = yield from blobs.read_blob(context.io, context.keys, record.blob)
    views = blobs.sections(whole, [size for _, size in record.sections])
    return LoadedSnapshot(record, {name: view for (name, _), view in zip(record.sections, views, strict=True)})
