"""Deleting old rounds: a live replica keeps what it may still read, and the store keeps a bounded number of rounds.

A round can be deleted when two snapshots are later and every live rank has acknowledged a later round. A crash in the
middle is harmless: the next call finds the remaining objects, and a reader that finds a gap loads a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.rounds.catch_up import snapshot_rounds
from atoll.rounds.context import RoundContext
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import present_claims, read_agreement
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Ack, Snapshot

KEPT_SNAPSHOTS = 2
"""The newest, and the one before it, which another replica may be loading."""


@dataclass
class Leases:
    """When this process last saw the acknowledgement of each rank change, by its own clock."""

    lease_s: float
    seen: dict[int, tuple[int, int, float]] = field(default_factory=dict)

    def is_live(self, ack: Ack, now: float) -> bool:
        last = self.seen.get(ack.rank)
        if last is None or last[:2] != (ack.incarnation, ack.count):
            self.seen[ack.rank] = (ack.incarnation, ack.count, now)
            return True
        return now - last[2] < self.lease_s


def acknowledge(context: RoundContext, round_no: int, count: int) -> Steps[None]:
    """Record that this rank will never need a round below `round_no` again."""
    ack = Ack(context.rank, context.claim.incarnation, round_no, count)
    yield from context.io.put(context.keys.ack(context.rank), ack.seal())


def retire(context: RoundContext, leases: Leases) -> Steps[int]:
    """Delete what no live rank needs any more; returns the number of deleted objects."""
    kept = (yield from snapshot_rounds(context))[-KEPT_SNAPSHOTS:]
    if len(kept) < KEPT_SNAPSHOTS:
        return 0
    needed = yield from _needed_from(context, leases)
    if needed is None:
        return 0
    floor = min(needed, kept[0])
    try:
        data, commits = yield from _deletable(context, floor, kept)
    except (KeyNotFound, CorruptUpdate):
        return 0  # another replica is deleting, or a snapshot is damaged: keep everything
    # Means are deleted after their parts: a replica that finds a mean missing must not be able to compute another one.
    for some in ([key for key in data if "/mean/" not in key], [key for key in data if "/mean/" in key]):
        yield Gather([context.io.delete(key) for key in some], context.connections)
    for key in commits:  # oldest first: if a commit exists, so do all later ones
        yield from context.io.delete(key)
    if data or commits:
        context.events.add("rounds_retired", floor, objects=len(data) + len(commits))
    return len(data) + len(commits)


def _needed_from(context: RoundContext, leases: Leases) -> Steps[int | None]:
    """The lowest round that a live rank may still read; None when a live rank has not acknowledged any round."""
    io, keys = context.io, context.keys
    now = io.clock.monotonic()
    needed: list[int] = []
    for rank, claim in (yield from present_claims(io, keys)).items():
        if claim.has_left:
            continue
        try:
            ack = yield from io.read(keys.ack(rank), Ack.open)
        except (KeyNotFound, CorruptUpdate):
            ack = Ack(rank, claim.incarnation, 0, -1)
        # A strict run needs every rank for every round, so a silent rank is late, never gone.
        if leases.is_live(ack, now) or context.quorum.is_strict:
            if ack.count < 0:
                return None
            needed.append(ack.round_no)
    return min(needed, default=None)


def _deletable(context: RoundContext, floor: int, kept: list[int]) -> Steps[tuple[list[str], list[str]]]:
    """Keys that can be deleted: first bulk objects and snapshot records, then commits."""
    io, keys = context.io, context.keys
    agreement = yield from read_agreement(io, keys)
    named = {(0, agreement.initial.digest)} if agreement is not None else set()
    for round_no in kept:
        record = yield from io.read(keys.snapshot(round_no), Snapshot.open)
        named.add((round_no, record.blob.digest))
    rounds = [key for key in (yield from io.list(keys.rounds_prefix())) if _round_of(keys, key) < floor]
    commits = [key for key in (yield from io.list(keys.commits_prefix())) if keys.parse_commit(key) < floor]
    records = [key for key in (yield from io.list(keys.snapshots_prefix())) if keys.parse_snapshot(key) < kept[0]]
    pieces = [
        key
        for key in (yield from io.list(keys.blobs_prefix()))
        if keys.parse_blob(key)[0] <= kept[-1] and keys.parse_blob(key) not in named
    ]
    return [*records, *rounds, *pieces], commits


def _round_of(keys: RoundKeys, key: str) -> int:
    return int(key.removeprefix(keys.rounds_prefix()).split("/", 1)[0])
