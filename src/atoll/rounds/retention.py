"""Letting old rounds go: never what a live replica may still ask for, never more than a bounded past kept.

A round may go when two snapshots are past it and every live rank has acknowledged a later round. Deleting is only
tidying: a crash in the middle leaves what the next call finds again, and a reader that meets a gap loads a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.rounds.catch_up import snapshot_rounds
from atoll.rounds.context import RoundContext
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import latest_claims, read_agreement
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Ack, Snapshot

KEPT_SNAPSHOTS = 2
"""One to load, and one for whoever began to load before it was there."""


@dataclass
class Leases:
    """When this observer last saw each rank's acknowledgement change. Only its own clock is used."""

    lease_s: float
    seen: dict[int, tuple[int, int, float]] = field(default_factory=dict)

    def is_live(self, ack: Ack, now: float) -> bool:
        last = self.seen.get(ack.rank)
        if last is None or last[:2] != (ack.incarnation, ack.count):
            self.seen[ack.rank] = (ack.incarnation, ack.count, now)
            return True
        return now - last[2] < self.lease_s


def acknowledge(member: RoundContext, round_no: int, count: int) -> Steps[None]:
    """Say that this rank will never again need a round below `round_no`."""
    ack = Ack(member.rank, member.claim.incarnation, round_no, count)
    yield from member.io.put(member.keys.ack(member.rank), ack.seal())


def retire(member: RoundContext, leases: Leases) -> Steps[int]:
    """Delete what nobody needs any more; the number of objects that went."""
    kept = (yield from snapshot_rounds(member))[-KEPT_SNAPSHOTS:]
    if len(kept) < KEPT_SNAPSHOTS:
        return 0
    needed = yield from _needed_from(member, leases)
    if needed is None:
        return 0
    floor = min(needed, kept[0])
    try:
        data, commits = yield from _doomed(member, floor, kept)
    except (KeyNotFound, CorruptUpdate):
        return 0  # another replica is tidying, or a snapshot is not what it should be: keep everything
    # Means after what they were made of: who finds a mean missing must not be able to make another one.
    for some in ([key for key in data if "/mean/" not in key], [key for key in data if "/mean/" in key]):
        yield Gather([member.io.delete(key) for key in some], member.connections)
    for key in commits:  # oldest first: a commit that is there proves that those after it are
        yield from member.io.delete(key)
    if data or commits:
        member.events.add("rounds_retired", floor, objects=len(data) + len(commits))
    return len(data) + len(commits)


def _needed_from(member: RoundContext, leases: Leases) -> Steps[int | None]:
    """The lowest round a live rank may still ask for; None when a live rank has not said."""
    io, keys = member.io, member.keys
    now = io.clock.monotonic()
    needed: list[int] = []
    for rank, standing in (yield from latest_claims(io, keys)).items():
        if standing.has_left:
            continue
        try:
            ack = yield from io.read(keys.ack(rank), Ack.open)
        except (KeyNotFound, CorruptUpdate):
            ack = Ack(rank, standing.incarnation, 0, -1)
        # In a strict run every rank is needed for every round, so a silent one is late, never gone.
        if leases.is_live(ack, now) or member.quorum.is_strict:
            if ack.count < 0:
                return None
            needed.append(ack.round_no)
    return min(needed, default=None)


def _doomed(member: RoundContext, floor: int, kept: list[int]) -> Steps[tuple[list[str], list[str]]]:
    """Keys that may go: bulk and snapshot records, and commits, which go last."""
    io, keys = member.io, member.keys
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
