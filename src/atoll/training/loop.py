"""The outer loop of one replica: the agreed state, the round it is at, and how it gets there and back.

Knows the model as a vector and the others as a `RoundClient`; nothing of optimizers, data or checkpoints. `begin` sends
a round on its way, `land` brings it home. Between the two, with a delay, training goes on, and the agreed state belongs
to the background thread. At most one round is under way: commits form a chain.

How a round in the background is stopped: where it waits, and before each piece it reads or writes.

Stopping takes no longer than the requests that are under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from atoll._time import SYSTEM_CLOCK
from atoll.rounds.catch_up import LoadedSnapshot
from atoll.rounds.client import Exchanged, RoundClient
from atoll.rounds.codecs.base import F32
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.layout import ArrayVector
from atoll.rounds.outer import OuterRule
from atoll.rounds.records import LeftBehind
from atoll.stores.base import Buffer
from atoll.training.background import Background, awaited
from atoll.training.feedback import ErrorFeedback
from atoll.training.model import ModelVector
from atoll.training.outer import OuterState, Stream

T = TypeVar("T")


class Stopped(Exception):
    """This replica is ending; nobody waits for the round any more."""


class StoppableClock:
    """The real clock; sleeping ends with `Stopped` once it is stopped."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def time(self) -> float:
        return SYSTEM_CLOCK.time()

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        self._stop.set()

    def go_on(self) -> None:
        self._stop.clear()

    def check(self) -> None:
        """Raise `Stopped` if it is time to end."""
        if self._stop.is_set():
            raise Stopped


class StoppableParts(ArrayVector):
    """An array as the source and the sink of a round that may be stopped."""

    def __init__(self, array: F32, clock: StoppableClock) -> None:
        super().__init__([array])
        self._clock = clock

    def read(self, start: int, stop: int) -> F32:
        self._clock.check()
        return super().read(start, stop)

    def write(self, start: int, values: F32) -> None:
        self._clock.check()
        super().write(start, values)


def done(action: Callable[[], T]) -> Future[T]:
    """The result, or the error, of doing it here and now."""
    result: Future[T] = Future()
    try:
        result.set_result(action())
    except Exception as exc:  # noqa: BLE001 - whoever asks for the result gets it
        result.set_exception(exc)
    return result


log = logging.getLogger("atoll.training")


@dataclass(frozen=True)
class Landing:
    """A round that is over and applied to the agreed state."""

    outcome: RoundOutcome
    digest: str
    """Names the state it led to."""


@dataclass(frozen=True)
class PendingRound:
    """A round under way."""

    fragment: int
    landing: Future[Landing]


class OuterLoop:
    """Joins at once: when it is made, the live weights are the agreed initial ones."""

    def __init__(
        self,
        vector: ModelVector,
        rule: OuterRule,
        client: RoundClient,
        stream: Stream,
        feedback: ErrorFeedback | None,
        clock: StoppableClock,
        *,
        rank: int,
    ) -> None:
        self.vector, self.client, self.stream, self.feedback = vector, client, stream, feedback
        self.round_no = 0
        """The next round; the one under way, while one is."""
        self.flight: PendingRound | None = None
        self._clock, self._rank = clock, rank
        self._background = Background("atoll-flight", clock.check)
        self._chores: list[Future[object]] = []
        agreed = client.join(vector.tensors())
        self.state = OuterState(rule, vector.values_of(agreed), vector.fragments, vector.averaged_from)
        self._digest: str | None = None
        largest = max(part.stop - part.start for part in vector.fragments)
        self._update: F32 = np.empty(largest, dtype=np.float32)
        self._stand_in: F32 | None = np.empty(largest, dtype=np.float32) if stream.is_eager else None
        self.settle()

    @property
    def digest(self) -> str:
        """Names the agreed state before round `round_no`."""
        if self._digest is None:
            self._digest = self.state.digest
        return self._digest

    @property
    def begun(self) -> int:
        """How many rounds have begun."""
        return self.round_no + (self.flight is not None)

    @property
    def fragment(self) -> int:
        """What round `round_no` is about."""
        return self.round_no % self.stream.fragments

    def settle(self) -> None:
        """Make the live weights those of the agreed state."""
        self.vector.write(self.state.values)

    # ---- a round

    def begin(self, weight: float) -> None:
        """Send what was trained of the next fragment on its way. Without a delay it is back when this returns."""
        assert self.flight is None, "one round at a time"
        fragment = self.fragment
        self.vector.refresh()
        update = self._read(fragment)
        job = self._job(fragment, update, weight, self.digest)
        if self._stand_in is None:
            self.flight = PendingRound(fragment, self._background.submit(job) if self.stream.delay else done(job))
            return
        stand_in = self._stand_in[: update.size]
        self.state.foresee(fragment, update, stand_in)  # before the mean takes the place of the update
        self.flight = PendingRound(fragment, self._background.submit(job))
        self.vector.write(stand_in, fragment)

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        for chore in [chore for chore in self._chores if chore.done()]:
            self._chores.remove(chore)
            chore.result()
        if self.flight is not None and self.flight.landing.done():
            error = self.flight.landing.exception()
            if error is not None and not isinstance(error, LeftBehind):
                self.land()

    def land(self) -> RoundOutcome | None:
        """Wait for the round under way and bring the live weights together with what came of it.

        None when the others are so far ahead that this round is gone; this replica is where they are then.
        """
        assert self.flight is not None
        fragment, pending = self.flight.fragment, self.flight.landing
        try:
            landing = awaited(pending)
        except LeftBehind as behind:
            log.warning("%s; catching up from a snapshot", behind.message)
            self.flight = None
            if self.feedback is not None:
                self.feedback.settle(fragment, is_included=False)
            self.catch_up()
            return None
        except Exception:
            self._give_up(fragment)
            raise
        began = self._clock.monotonic()
        self.flight, self._digest = None, landing.digest
        self._merge(fragment, is_included=landing.outcome.is_included)
        self.round_no += 1
        self.client.mark("apply", began, round_no=landing.outcome.round_no)
        return landing.outcome

    def stop(self) -> None:
        """Give up what is under way; returns when nothing is."""
        self._clock.stop()
        self._background.close()
        self._clock.go_on()
        self.flight = None
        self._chores.clear()

    def _read(self, fragment: int) -> F32:
        """The update of a fragment, where the exchange will read it."""
        update = self._room(fragment)
        if self.state.rule.kind == "average":
            self.vector.read(update, fragment)
        else:
            self.vector.read_update(self.state.fragment(fragment), update, fragment)
        return update if self.feedback is None else self.feedback.fold(fragment, update)

    def _job(self, fragment: int, update: F32, weight: float, base: str) -> Callable[[], Landing]:
        """The exchange, and all that depends on nothing but its outcome: what may run in the background."""
        round_no, room = self.round_no, self._room(fragment)
        sink = StoppableParts(room, self._clock)
        # Without feedback the mean takes the place of the update, chunk by chunk.
        source = sink if self.feedback is None else StoppableParts(update, self._clock)

        def job() -> Landing:
            done = self.client.exchange(round_no, source, weight=weight, fragment=fragment, base=base, out=sink)
            began = self._clock.monotonic()
            self.state.apply(fragment, room)
            landing = Landing(done.outcome, self.state.digest)
            self._account(fragment, landing.outcome)
            self.client.mark("apply", began, round_no=round_no)
            return landing

        return job

    def _account(self, fragment: int, outcome: RoundOutcome) -> None:
        """Say what of the update is still owed."""
        if self.feedback is None:
            return
        is_refused = any(refused.rank == self._rank for refused in outcome.commit.rejected)
        # A commit may have taken what we offered before, in a try of this round that failed, or before we died.
        if is_refused or (not outcome.is_included and outcome.commit.contribution(self._rank) is not None):
            self.feedback.forget(fragment)
        else:
            self.feedback.settle(fragment, is_included=outcome.is_included)

    def _merge(self, fragment: int, *, is_included: bool) -> None:
        """A replica whose update is not in the mean takes the agreed weights: its own led nowhere."""
        agreed = self.state.fragment(fragment)
        if not is_included:
            self.settle()
        elif self._stand_in is not None:
            offsets = self._stand_in[: agreed.size]
            np.subtract(agreed, offsets, out=offsets)
            self.vector.shift(offsets, fragment)
        elif self.stream.alpha == 0:
            self.vector.write(agreed, fragment)
        elif self.stream.alpha < 1:
            self.vector.mix(agreed, self.stream.alpha, fragment)

    def _give_up(self, fragment: int) -> None:
        """After an error the round may be tried again, with what is trained by then."""
        self.flight = None
        if self.feedback is not None:
            self.feedback.forget(fragment)
        if self._stand_in is not None:
            self._merge(fragment, is_included=True)

    def _room(self, fragment: int) -> F32:
        """Where the update of a fragment is gathered, and its mean."""
        span = self.vector.fragments[fragment]
        return self._update[: span.stop - span.start]

    # ---- to where the others are, and back

    def catch_up(self) -> None:
        """Go to where the others are, by a snapshot and commit by commit."""
        self.rest()
        began = self.round_no

        def room(fragment: int) -> StoppableParts:
            return StoppableParts(self._room(fragment), self._clock)

        self.client.catch_up(began, self._apply_committed, self._load_snapshot, sink_for=room)
        if self.round_no > began:
            log.info("caught up from round %d to round %d", began, self.round_no)
            self.settle()

    def restore(self, sections: Mapping[str, Buffer], round_no: int, position: str, started: Sequence[Any]) -> None:
        """Take up the state of a checkpoint."""
        self.state.load(sections, started)
        self.round_no, self._digest = round_no, None
        self.client.continue_from(position)
        self.settle()

    def publish(self, then: Callable[[], object]) -> None:
        """Write a snapshot of the state for those who come late, and then do that; behind training, with a delay."""
        round_no = self.round_no

        def chore() -> None:
            self.client.write_snapshot(round_no, self.state.sections(), {"started": self.state.started})
            then()

        if self.stream.delay:
            self._chores.append(self._background.submit(chore))
        else:
            chore()

    def rest(self) -> None:
        """Wait until nothing but training goes on; no round may be under way."""
        assert self.flight is None
        while self._chores:
            awaited(self._chores.pop(0))

    def _apply_committed(self, done: Exchanged) -> None:
        """Apply the mean of a round that was committed without this replica."""
        fragment = done.outcome.fragment
        self.state.apply(fragment, self._room(fragment))
        self.round_no, self._digest = done.round_no + 1, None

    def _load_snapshot(self, loaded: LoadedSnapshot) -> None:
        self.state.load(loaded.buffers, loaded.meta.get("started", [True] * self.stream.fragments))
        self.round_no, self._digest = loaded.round_no, None
