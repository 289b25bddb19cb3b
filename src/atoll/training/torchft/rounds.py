"""The manager's side of the rounds: joins, catches up, exchanges, and keeps snapshots for those who come back.

Exchanges and snapshots go on in one background thread while the model trains. Everything that touches the model happens
in the caller's thread; so does catching up, while the background thread has nothing to do.
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
"""What an update counts that has nothing trained in it, next to others of weight 1."""
_STEP = "step "


@dataclass(frozen=True)
class Found:
    """A committed round and its mean. Its `base` says which torchft step it was."""

    outcome: RoundOutcome
    mean: F32

    @property
    def step(self) -> int:
        return int(self.outcome.commit.base.removeprefix(_STEP))


class TorchftRounds:
    """One replica's rounds. `step` counts what torchft counts; `round_no` counts exchanges."""

    def __init__(
        self, rank: int, make_client: Callable[[list[Layout]], RoundClient], snapshot_every: int, *, is_strict: bool
    ) -> None:
        self.round_no, self.step = 0, 0
        self.batches = 0
        """Participants, summed over all steps."""
        self.ranks: tuple[int, ...] = ()
        """Whose updates were in the last round."""
        self._rank, self._make_client, self._every = rank, make_client, snapshot_every
        self._is_strict = is_strict
        self._background = Background("atoll-torchft")
        self._joined: tuple[RoundClient, AgreedState] | None = None
        self._standing: tuple[int, F32] | None = None
        self._owed: Found | None = None
        self._due_at = -1
        self._may_lack_rounds = True
        """Whether the store may have deleted a round that this replica has not applied."""
        self._is_closed = False

    @property
    def is_joined(self) -> bool:
        return self._joined is not None

    @property
    def client(self) -> RoundClient:
        assert self._joined is not None, "a replica joins before it does anything else"
        return self._joined[0]

    @property
    def state(self) -> AgreedState:
        assert self._joined is not None, "a replica joins before it does anything else"
        return self._joined[1]

    def join(self, state: AgreedState) -> bool:
        """Agree on the initial weights, and go to where the others are; whether they were ahead."""
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
        """Take in every round that was committed without us, or that torchft did not apply; whether there was one.

        What a manager may lack after a round of its own is the next commit, so that is asked for first; the store is
        listed only if there is one, or if rounds may have been deleted that this replica lacks.
        """
        began = self.round_no
        if self._owed is not None:
            self._take_in(self._owed)
        self._background.rest()  # the client makes one call at a time, and the model belongs to this thread
        if self._may_lack_rounds or self.client.is_committed(self.round_no):
            self.client.catch_up(self.round_no, self._take_in_committed, self._load, replace_diverged=True)
            self._may_lack_rounds = False
        if self.round_no > began:
            log.info("caught up from round %d to round %d (step %d)", began, self.round_no, self.step)
        return self.round_no > began

    @property
    def is_current(self) -> bool:
        """Whether no round can have been committed without us: all must be in every round, and ours are all settled."""
        return self._is_strict and self._owed is None and self._standing is None

    @property
    def fragment(self) -> int:
        """The fragment that is exchanged next."""
        return self.step % len(self.state.layouts)

    @property
    def fragment_size(self) -> int:
        """How many values are exchanged next."""
        return self.state.layouts[self.fragment].size

    def begin(self, update: F32, *, is_behind: bool) -> Future[Found]:
        """Start an exchange. `is_behind`: the update was not trained from the state that this round starts from."""
        fragment, round_no, base = self.fragment, self.round_no, f"{_STEP}{self.step}"
        wanted = self.fragment_size
        if update.size != wanted:
            raise ConfigError(f"{update.size} values are to be averaged, but fragment {fragment} has {wanted}")
        weight = 1.0
        if is_behind:
            stand_in = self.state.stand_in(fragment)
            update = update if stand_in is None else stand_in
            weight = NEGLIGIBLE if stand_in is not None or not update.any() else weight
        if self._standing is not None and self._standing[0] == round_no:
            update = self._standing[1]  # what an earlier try has announced is what the others count
        self._standing = (round_no, update)
        client, mean = self.client, np.empty(update.size, dtype=np.float32)

        def exchange() -> Found:
            out = ArrayVector([mean])
            try:
                done = client.exchange(round_no, update, weight=weight, fragment=fragment, base=base, out=out)
            except LeftBehind:
                self._may_lack_rounds = True
                raise
            return Found(done.outcome, mean)

        return self._background.submit(exchange)

    def settle(self, found: Found) -> None:
        """A round is committed and applied."""
        self.state.note(found.outcome.fragment, found.mean)
        self.round_no, self.step, self.ranks = found.outcome.round_no + 1, found.step + 1, found.outcome.ranks
        self.batches += len(self.ranks)
        self._standing = self._owed = None
        if self.round_no % self._every == 0:
            self._due_at = self.round_no

    def owe(self, found: Found) -> None:
        """A round is committed, but torchft was told not to apply it: that is made up for when we next catch up."""
        self._owed = found

    def tidy(self) -> None:
        """Publish a snapshot if one is due, and let old rounds go. The outer step must be done."""
        if self._due_at != self.round_no or self._owed is not None:
            return
        self._due_at = -1
        # One of those who took part, another one each time; if it fails, the next snapshot is not far.
        writer = self.ranks[self.round_no // self._every % len(self.ranks)] if self.ranks else -1
        sections = self.state.export() if writer == self._rank else None
        round_no, meta = self.round_no, {"step": self.step, "batches": self.batches}
        self._background.submit(lambda: self._keep(round_no, meta, sections))

    def close(self, *, leave: bool, wait: bool) -> None:
        """End the thread. With `leave`, the others do not wait for this replica any more."""
        if self._joined is not None and not self._is_closed:
            client, self._is_closed = self.client, True
            self._background.submit(lambda: _depart(client, leave=leave))
        self._background.close(wait=wait)

    def _take_in(self, found: Found) -> None:
        self.state.apply(found.outcome.fragment, found.mean)
        self.settle(found)

    def _take_in_committed(self, done: Exchanged) -> None:
        assert done.mean is not None
        self._take_in(Found(done.outcome, done.mean))

    def _load(self, loaded: LoadedSnapshot) -> None:
        """Take over a snapshot that is further than we are."""
        self.state.load(loaded.buffers)
        self.round_no, self.step = loaded.round_no, int(loaded.meta["step"])
        self.batches = int(loaded.meta["batches"])
        self._standing = self._owed = None

    def _keep(self, round_no: int, meta: dict[str, int], sections: dict[str, Buffer] | None) -> None:
        try:
            self.client.acknowledge(round_no)
            if sections is not None:
                self.client.write_snapshot(round_no, sections, meta)
                self.client.retire()
        except AtollError as exc:
            log.warning("no snapshot of round %d: %s", round_no, exc.message)


def _depart(client: RoundClient, *, leave: bool) -> None:
    try:
        if leave:
            client.leave()
    except AtollError as exc:
        log.warning("could not say goodbye: %s", exc.message)
    finally:
        client.close()
