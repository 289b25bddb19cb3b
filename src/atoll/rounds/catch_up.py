"""Snapshots let a replica that is new, late or restarted begin at a recent round instead of the first.

A snapshot holds whatever buffers the caller gives, under names. All replicas have equal state, so anyone's is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.rounds import blobs
from atoll.rounds.context import RoundContext
from atoll.rounds.io import Steps
from atoll.rounds.records import Snapshot
from atoll.stores.base import Buffer


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


def write_snapshot(
    member: RoundContext, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any]
) -> Steps[bool]:
    """Write the state before `round_no`; False when another replica has done so already."""
    io, keys = member.io, member.keys
    if (yield from io.probe(keys.snapshot(round_no))) is not None:
        return False
    parts = list(buffers.values())
    blob = blobs.describe(round_no, parts)
    yield from blobs.write_blob(io, keys, blob, parts)
    sizes = tuple((name, memoryview(part).nbytes) for name, part in buffers.items())
    record = Snapshot(member.run_id, round_no, member.previous, sizes, blob, dict(meta))
    created = yield from io.create(keys.snapshot(round_no), record.seal())
    stands = yield from io.read(keys.snapshot(round_no), Snapshot.open)
    if stands.blob.digest != blob.digest:
        yield from blobs.delete_blob(io, keys, blob)
        message = f"two replicas hold different states before round {round_no}"
        raise CorruptUpdate(message, round_no=round_no, rank=member.rank, check="base")
    if created:
        member.events.add("snapshot_written", round_no, bytes=blob.size_bytes)
    return created


def load_snapshot(member: RoundContext, at_least: int = 0) -> Steps[LoadedSnapshot | None]:
    """The newest snapshot that can be read, if it is of round `at_least` or later. The member continues from it."""
    rounds = yield from snapshot_rounds(member)
    for round_no in reversed(rounds):
        if round_no < at_least:
            break
        try:
            loaded = yield from _load(member, round_no)
        except (CorruptUpdate, KeyNotFound) as exc:
            # Retired while we read it, or damaged: an older or newer one may do.
            member.events.add("snapshot_unreadable", round_no, detail=str(exc))
            continue
        member.previous = loaded.record.previous
        return loaded
    return None


def snapshot_rounds(member: RoundContext) -> Steps[list[int]]:
    """The rounds that have a snapshot record, ascending."""
    listed = yield from member.io.list(member.keys.snapshots_prefix())
    return sorted(member.keys.parse_snapshot(key) for key in listed)


def _load(member: RoundContext, round_no: int) -> Steps[LoadedSnapshot]:
    record = yield from member.io.read(member.keys.snapshot(round_no), Snapshot.open)
    if (record.run_id, record.round_no) != (member.run_id, round_no):
        raise CorruptUpdate("a snapshot is of another run or round", round_no=round_no, check="identity")
    whole = yield from blobs.read_blob(member.io, member.keys, record.blob)
    views = blobs.sections(whole, [size for _, size in record.sections])
    return LoadedSnapshot(record, {name: view for (name, _), view in zip(record.sections, views, strict=True)})
