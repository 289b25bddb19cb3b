"""The outer loop of one replica: the agreed state, the round it is at, and how it gets there and back.

Knows the model as a vector and the others as a `RoundClient`; nothing of optimizers, data or checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from atoll.rounds.client import RoundClient
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.outer import OuterRule
from atoll.rounds.records import LeftBehind
from atoll.rounds.vectors import Parts
from atoll.stores.base import Buffer
from atoll.training.outer import OuterState
from atoll.training.params import ModelVector

log = logging.getLogger("atoll.training")


class OuterLoop:
    """Joins at once: when it is made, the live weights are the agreed initial ones."""

    def __init__(self, vector: ModelVector, rule: OuterRule, client: RoundClient) -> None:
        self.vector, self.client = vector, client
        self.round_no = 0
        """The next round."""
        agreed = client.join(vector.tensors())
        self.state = OuterState(rule, vector.values_of(agreed), vector.averaged_from)
        self._update = np.empty(vector.size, dtype=np.float32)
        self._mean = Parts([self._update])
        self.settle()

    def settle(self) -> None:
        """Make the live weights those of the agreed state."""
        self.vector.write(self.state.values)

    def hold(self, weight: float) -> RoundOutcome | None:
        """Exchange what was trained since the last round and take the outer step; live weights become the agreed ones.

        None when the others are so far ahead that this round is gone; this replica is where they are then.
        """
        self.vector.refresh()
        if self.state.rule.kind == "average":
            self.vector.read(self._update)
        else:
            self.vector.read_update(self.state.values, self._update)
        try:
            # The mean takes the place of the update, chunk by chunk.
            done = self.client.exchange(
                self.round_no, self._mean, weight=weight, base=self.state.digest, out=self._mean
            )
        except LeftBehind as behind:
            log.warning("%s; catching up from a snapshot", behind.message)
            self.catch_up()
            return None
        self._step()
        self.settle()
        return done.outcome

    def catch_up(self) -> None:
        """Go to where the others are: from a snapshot if there is a later one, then commit by commit."""
        began = self.round_no
        while (head := self.client.latest()).next_round > self.round_no:
            before, trouble = self.round_no, None
            if (head.snapshot_round or 0) > self.round_no:
                self._load_snapshot()
            try:
                self._replay()
            except LeftBehind as behind:
                trouble = behind
            if self.round_no == before:
                message = f"round {before} is gone, and no later snapshot can be read"
                raise trouble or LeftBehind(message, round_no=before, latest=head.next_round)
        if self.round_no > began:
            log.info("caught up from round %d to round %d", began, self.round_no)
        self.settle()

    def restore(self, sections: Mapping[str, Buffer], round_no: int, position: str, *, has_stepped: bool) -> None:
        """Take up the state of a checkpoint."""
        self.state.load(sections, has_stepped=has_stepped)
        self.round_no = round_no
        self.client.continue_from(position)
        self.settle()

    def write_snapshot(self) -> bool:
        """Publish the state for those who come late; False if somebody has."""
        return self.client.write_snapshot(self.round_no, self.state.sections(), {"started": [self.state.has_stepped]})

    def _load_snapshot(self) -> None:
        loaded = self.client.load_snapshot(at_least=self.round_no + 1)
        if loaded is not None:
            started = loaded.meta.get("started", [True])
            self.state.load(loaded.buffers, has_stepped=bool(started[0]))
            self.round_no = loaded.round_no

    def _replay(self) -> None:
        while self.client.replay(self.round_no, out=self._mean) is not None:
            self._step()

    def _step(self) -> None:
        self.state.apply(self._update)
        self.round_no += 1
