"""The manager's rounds: join, catch up, exchange, and publish snapshots for replicas that come back.

Exchanges and snapshots run in one background thread while the model trains. Only the caller's thread touches the model;
it also catches up, while the background thread is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from atoll.errors import AtollError, ConfigError
from atoll.rounds.catch_up import LoadedSnapshot
from atoll.rounds.client import Exchanged, RoundClient
from atoll.rounds.codecs.base import F32
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.records import LeftBehind
from atoll.stores.base import Buffer
from atoll.training.background import Background
from atoll.training.torchft.state import AgreedState

log = logging.getLogger("atoll.training")

NEGLIGIBLE = 1e-6
"""The weight of an update without training, next to others of weight 1."""
_STEP = "step "


@dataclass(frozen=True)
class CommittedRound:
    """A committed round and its mean. The `base` of the commit has the torchft step."""

    outcome: RoundOutcome
    mean: F32

    @property
    def step(self) -> int:
        return int(self.outcome.commit.base.removeprefix(_STEP))


class TorchftRounds:
    """One replica's rounds. `step` is torchft's step counter; `round_no` counts exchanges."""

    def __init__(
        self, rank: int, make_client: Callable[[list[Layout]], RoundClient], snapshot_every: int, *, is_strict: bool
    ) -> None:
        self.round_no, self.step = 0, 0
        self.batches = 0
        """Participants, summed over all steps."""
        self.ranks: tuple[int, ...] = ()
        """The participants of the last round."""
        self._rank, self._make_client, self._every = rank, make_client, snapshot_every
        self._is_strict = is_strict
        self._background = Background("atoll-torchft")
        self._joined: tuple[RoundClient, AgreedState] | None = None
        self._offered: tuple[int, F32] | None = None
        self._unapplied: CommittedRound | None = None
        self._due_at = -1
        self._may_lack_rounds = True
        """Whether the store may have deleted a round that this replica has not applied."""
        self._is_closed = False

    @property
    def is_joined(self) -> bool:
        return self._joined is not None

    @property
    def client(self) -> RoundClient:
        assert self._joined is not None, "`join` comes first"
        return self._joined[0]

    @property
    def state(self) -> AgreedState:
        assert self._joined is not None, "`join` comes first"
        return self._joined[1]

    def join(self, state: AgreedState) -> bool:
        """Agree on the initial weights and catch up; whether the others were ahead."""
        client = self._make_client(list(state.layouts))
        initial = state.initial()
        try:
            state.adopt(self._background.do(lambda: client.join(initial)))
        except BaseException:
            client.close()
            raise
        self._joined = client, state
        return self.catch_up()

    def catch_up(self) -> bool:
        """Apply rounds that were committed without this replica or not applied by torchft; whether there is one.

        After a round of its own, a replica can lack only later commits, so it reads the next commit first. It lists the
        store only if that commit exists, or if the store may have deleted rounds that this replica lacks.
        """
        began = self.round_no
        if self._unapplied is not None:
            self._apply(self._unapplied)
        self._background.rest()  # the client allows one call at a time
        if self._may_lack_rounds or self.client.is_committed(self.round_no):
            self.client.catch_up(self.round_no, self._apply_committed, self._load, replace_diverged=True)
            self._may_lack_rounds = False
        if self.round_no > began:
            log.info("caught up from round %d to round %d (step %d)", began, self.round_no, self.step)
        return self.round_no > began

    @property
    def is_current(self) -> bool:
        """Whether no round can be committed without this replica: the quorum is strict, and no round is unfinished."""
        return self._is_strict and self._unapplied is None and self._offered is None

    @property
    def fragment(self) -> int:
        """The fragment of the next exchange."""
        return self.step % len(self.state.layouts)

    @property
    def fragment_size(self) -> int:
        """The number of values of the next exchange."""
        return self.state.layouts[self.fragment].size

    def begin(self, update: F32, *, is_behind: bool) -> Future[CommittedRound]:
        """Start an exchange. `is_behind`: the update was not trained from the agreed state of this round."""
        fragment, round_no, base = self.fragment, self.round_no, f"{_STEP}{self.step}"
        wanted = self.fragment_size
        if update.size != wanted:
            raise ConfigError(f"the update has {update.size} values, but fragment {fragment} has {wanted}")
        weight = 1.0
        if is_behind:
            placeholder = self.state.placeholder(fragment)
            update = update if placeholder is None else placeholder
            weight = NEGLIGIBLE if placeholder is not None or not update.any() else weight
        if self._offered is not None and self._offered[0] == round_no:
            update = self._offered[1]  # the others use the offer of the earlier attempt
        self._offered = (round_no, update)
        client, mean = self.client, np.empty(update.size, dtype=np.float32)

        def exchange() -> CommittedRound:
            out = ArrayVector([mean])
            try:
                done = client.exchange(round_no, update, weight=weight, fragment=fragment, base=base, out=out)
            except LeftBehind:
                self._may_lack_rounds = True
                raise
            return CommittedRound(done.outcome, mean)

        log.debug("rank %d begins round %d, fragment %d, step %d", self._rank, round_no, fragment, self.step)
        return self._background.submit(exchange)

    def settle(self, found: CommittedRound) -> None:
        """Advance past a round that is committed and applied."""
        self.state.note(found.outcome.fragment, found.mean)
        self.round_no, self.step, self.ranks = found.outcome.round_no + 1, found.step + 1, found.outcome.ranks
        self.batches += len(self.ranks)
        self._offered = self._unapplied = None
        if self.round_no % self._every == 0:
            self._due_at = self.round_no

    def defer(self, found: CommittedRound) -> None:
        """Keep a committed round that torchft does not apply; the next `catch_up` applies it."""
        self._unapplied = found

    def tidy(self) -> None:
        """Publish a snapshot if one is due, and delete old rounds. The outer step must be done."""
        if self._due_at != self.round_no or self._unapplied is not None:
            return
        self._due_at = -1
        # The participants take turns in writing snapshots; if one fails, the next snapshot follows soon.
        writer = self.ranks[self.round_no // self._every % len(self.ranks)] if self.ranks else -1
        sections = self.state.export() if writer == self._rank else None
        round_no, meta = self.round_no, {"step": self.step, "batches": self.batches}
        self._background.submit(lambda: self._publish(round_no, meta, sections))

    def close(self, *, leave: bool, wait: bool) -> None:
        """End the thread. With `leave`, the other replicas no longer wait for this one."""
        if self._joined is not None and not self._is_closed:
            client, self._is_closed = self.client, True
            self._background.submit(lambda: _depart(client, leave=leave))
        self._background.close(wait=wait)

    def _apply(self, found: CommittedRound) -> None:
        self.state.apply(found.outcome.fragment, found.mean)
        self.settle(found)

    def _apply_committed(self, done: Exchanged) -> None:
        assert done.mean is not None
        self._apply(CommittedRound(done.outcome, done.mean))

    def _load(self, loaded: LoadedSnapshot) -> None:
        """Load a snapshot of a later round."""
        self.state.load(loaded.buffers)
        self.round_no, self.step = loaded.round_no, int(loaded.meta["step"])
        self.batches = int(loaded.meta["batches"])
        self._offered = self._unapplied = None

    def _publish(self, round_no: int, meta: dict[str, int], sections: dict[str, Buffer] | None) -> None:
        try:
            self.client.acknowledge(round_no)
            if sections is not None:
                self.client.write_snapshot(round_no, sections, meta)
                self.client.retire()
        except AtollError as exc:
            log.warning("cannot write the snapshot of round %d: %s", round_no, exc.message)


def _depart(client: RoundClient, *, leave: bool) -> None:
    try:
        if leave:
            client.leave()
    except AtollError as exc:
        log.warning("cannot leave the run: %s", exc.message)
    finally:
        client.close()
