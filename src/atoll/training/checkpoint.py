"""A replica's own checkpoints: one immutable object for each, in the run's store, the newest two kept.

An object is there whole or not at all, so a crash while writing loses nothing: the one before still stands. The
newest that checks out is the one to go on from; it is found by listing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import CorruptUpdate, KeyNotFound
from atoll.keys import RunKeys
from atoll.rounds.frames import open_frame, seal_frame
from atoll.rounds.io import Counters, Driver, Requests
from atoll.stores.base import Store
from atoll.training import tree

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a replica before round `round_no`."""

    round_no: int
    position: str
    """Digest of the last commit in it; the rounds' own bookmark."""
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one rank of one run."""

    def __init__(self, store: Store, run_id: str, rank: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._rank = run_id, rank
        self._keys = RunKeys(run_id)
        self._io = Requests(clock, random.Random())
        self._drive = Driver(store, clock)

    @property
    def counters(self) -> Counters:
        return self._io.counters

    def write(self, checkpoint: Checkpoint) -> int:
        """Write it and let older ones go; the round of the oldest that is left."""
        header = {
            "kind": "checkpoint",
            "run": self._run_id,
            "rank": self._rank,
            "round": checkpoint.round_no,
            "position": checkpoint.position,
        }
        sealed = seal_frame(header, tree.pack(checkpoint.state))
        self._drive(self._io.put(self._key(checkpoint.round_no), sealed))
        rounds = self.rounds()
        for old in rounds[:-KEPT]:
            self._drive(self._io.delete(self._key(old)))
        return rounds[-KEPT:][0]

    def newest(self) -> Checkpoint | None:
        """The newest one that can be read; what cannot is deleted, so that nobody counts on it."""
        for round_no in reversed(self.rounds()):
            try:
                return self._read(round_no)
            except CorruptUpdate:
                self._drive(self._io.delete(self._key(round_no)))
            except KeyNotFound:
                continue
        return None

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, ascending."""
        listed = self._drive(self._io.list(self._keys.checkpoints_prefix(self._rank)))
        return sorted(self._keys.parse_checkpoint(key)[1] for key in listed)

    def _read(self, round_no: int) -> Checkpoint:
        frame = self._drive(self._io.read(self._key(round_no), lambda data: open_frame(data, kind="checkpoint")))
        header = frame.header
        if (header.get("run"), header.get("rank"), header.get("round")) != (self._run_id, self._rank, round_no):
            raise CorruptUpdate("a checkpoint is of another run, rank or round", round_no=round_no, check="identity")
        return Checkpoint(round_no, str(header.get("position")), tree.unpack(frame.payload))

    def _key(self, round_no: int) -> str:
        return self._keys.checkpoint(self._rank, round_no)
