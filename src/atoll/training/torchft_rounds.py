"""The manager's side of the rounds: joins, catches up, exchanges, and keeps snapshots for those who come back.

Every call of the round client is made in one background thread, so that an exchange can go on while the model trains;
everything that touches the model happens in the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from atoll.errors import AtollError, ConfigError, CorruptUpdate
from atoll.rounds.client import RoundClient
from atoll.rounds.codec import F32
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.layout import Layout
from atoll.rounds.records import LeftBehind
from atoll.rounds.vectors import Parts
from atoll.stores.base import Buffer
from atoll.training.torchft_state import AgreedState
from atoll.training.torchft_work import Background

log = logging.getLogger("atoll.training")

NEGLIGIBLE = 1e-6
"""What an update counts that has nothing trained in it, next to others of weight 1."""
REPLAY_LIMIT = 4
"""With a snapshot further ahead than this many rounds, loading it is less work than replaying them."""
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
        head = self._background.do(client.latest)
        if head.next_round and (head.oldest_round != 0 or (head.snapshot_round or 0) > REPLAY_LIMIT):
            self._jump()
        return self.catch_up() or self.round_no > 0

    def catch_up(self) -> bool:
        """Take in every round that was committed without us, or that torchft did not apply; whether there was one."""
        began = self.round_no
        if self._owed is not None:
            self._take_in(self._owed)
        while True:
            try:
                found = self._background.do(self._replay)
            except LeftBehind:
                self._jump()
            except CorruptUpdate as exc:
                if exc.check != "base":  # else the others went on from another state, and we take over theirs
                    raise
                self._jump()
            else:
                if found is None:
                    break
                self._take_in(found)
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
            out = Parts([mean])
            done = client.exchange(round_no, update, weight=weight, fragment=fragment, base=base, out=out)
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
        if self._joined is not None:
            client = self.client
            self._background.submit(lambda: _depart(client, leave=leave))
        self._background.close(wait=wait)

    def _replay(self) -> Found | None:
        room = np.empty(max(layout.size for layout in self.state.layouts), dtype=np.float32)
        done = self.client.replay(self.round_no, out=Parts([room]))
        if done is None:
            return None
        return Found(done.outcome, room[: self.state.layouts[done.outcome.fragment].size])

    def _take_in(self, found: Found) -> None:
        self.state.apply(found.outcome.fragment, found.mean)
        self.settle(found)

    def _jump(self) -> None:
        """Take over a snapshot that is further than we are."""
        loaded = self._background.do(lambda: self.client.load_snapshot(self.round_no + 1))
        if loaded is None:
            message = f"round {self.round_no} is gone and no snapshot after it can be read"
            raise LeftBehind(message, round_no=self.round_no, latest=self.round_no)
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
