"""The outer loop of one replica: the agreed state, its round, and how it begins, finishes and catches up with rounds.

`DiLoCo` calls it. The loop knows the model as a vector and the other replicas through a `RoundClient`; it knows nothing
of optimizers, data or checkpoints. `begin` starts a round, `finish` applies its result. With a delay, training goes on
in between, and the background thread owns the agreed state. At most one round is in progress: commits form a chain.

`stop` cancels a round in progress: the round ends at its next wait, or before the next piece that it reads or writes.
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

log = logging.getLogger("atoll.training")
T = TypeVar("T")


@dataclass(frozen=True)
class Applied:
    """A finished round whose mean is applied to the agreed state."""

    outcome: RoundOutcome
    digest: str
    """The digest of the state after the round."""


@dataclass(frozen=True)
class PendingRound:
    """A round in progress."""

    fragment: int
    applied: Future[Applied]


class OuterLoop:
    """The constructor joins the run and sets the live weights to the agreed initial ones."""

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
        """The round in progress, or else the next one."""
        self.pending: PendingRound | None = None
        self._clock, self._rank = clock, rank
        self._background = Background("atoll-round", clock.check)
        self._tasks: list[Future[object]] = []
        agreed = client.join(vector.tensors())
        self.state = OuterState(rule, vector.values_of(agreed), vector.fragments, vector.averaged_from)
        self._digest: str | None = None
        largest = max(part.stop - part.start for part in vector.fragments)
        self._update: F32 = np.empty(largest, dtype=np.float32)
        self._predicted: F32 | None = np.empty(largest, dtype=np.float32) if stream.is_eager else None
        self.settle()

    @property
    def digest(self) -> str:
        """The digest of the agreed state before round `round_no`."""
        if self._digest is None:
            self._digest = self.state.digest
        return self._digest

    @property
    def begun(self) -> int:
        """The number of rounds that have begun."""
        return self.round_no + (self.pending is not None)

    @property
    def fragment(self) -> int:
        """The fragment that round `round_no` exchanges."""
        return self.round_no % self.stream.fragments

    def settle(self) -> None:
        """Set the live weights to the agreed ones."""
        self.vector.write(self.state.values)

    # ---- a round

    def begin(self, weight: float) -> None:
        """Start the exchange of the next fragment. Without a delay it is finished when this returns."""
        assert self.pending is None, "one round at a time"
        fragment = self.fragment
        self.vector.refresh()
        update = self._read(fragment)
        job = self._job(fragment, update, weight, self.digest)
        log.debug("rank %d begins round %d, fragment %d, weight %g", self._rank, self.round_no, fragment, weight)
        if self._predicted is None:
            self.pending = PendingRound(fragment, self._background.submit(job) if self.stream.delay else _run_now(job))
            return
        predicted = self._predicted[: update.size]
        self.state.predict(fragment, update, predicted)  # before the mean replaces the update
        self.pending = PendingRound(fragment, self._background.submit(job))
        self.vector.write(predicted, fragment)

    def check(self) -> None:
        """Raise the error of a background task, if one failed."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        if self.pending is not None and self.pending.applied.done():
            error = self.pending.applied.exception()
            if error is not None and not isinstance(error, LeftBehind):
                self.finish()

    def finish(self) -> RoundOutcome | None:
        """Wait for the round in progress and merge its result into the live weights.

        None if the store has deleted the round because the others are far ahead; this replica has caught up then.
        """
        assert self.pending is not None
        fragment, pending = self.pending.fragment, self.pending.applied
        try:
            applied = awaited(pending)
        except LeftBehind as behind:
            log.warning("%s; catching up from a snapshot", behind.message)
            self.pending = None
            if self.feedback is not None:
                self.feedback.settle(fragment, is_included=False)
            self.catch_up()
            return None
        except Exception:
            log.debug("rank %d: round %d failed and is due again", self._rank, self.round_no, exc_info=True)
            self._cancel(fragment)
            raise
        began = self._clock.monotonic()
        self.pending, self._digest = None, applied.digest
        self._merge(fragment, is_included=applied.outcome.is_included)
        self.round_no += 1
        self.client.mark("apply", began, round_no=applied.outcome.round_no)
        log.debug("rank %d applied round %d of ranks %s", self._rank, self.round_no - 1, applied.outcome.ranks)
        return applied.outcome

    def stop(self) -> None:
        """Cancel the round in progress and the background tasks; return when they have ended."""
        self._clock.stop()
        self._background.close()
        self._clock.restart()
        self.pending = None
        self._tasks.clear()

    def _read(self, fragment: int) -> F32:
        """The update of a fragment, in the memory that the exchange reads."""
        update = self._buffer(fragment)
        if self.state.rule.kind == "average":
            self.vector.read(update, fragment)
        else:
            self.vector.read_update(self.state.fragment(fragment), update, fragment)
        return update if self.feedback is None else self.feedback.fold(fragment, update)

    def _job(self, fragment: int, update: F32, weight: float, base: str) -> Callable[[], Applied]:
        """The exchange and the outer step: the part of a round that may run in the background."""
        round_no, mean = self.round_no, self._buffer(fragment)
        sink = StoppableVector(mean, self._clock)
        # Without error feedback the mean replaces the update, chunk by chunk.
        source = sink if self.feedback is None else StoppableVector(update, self._clock)

        def job() -> Applied:
            done = self.client.exchange(round_no, source, weight=weight, fragment=fragment, base=base, out=sink)
            began = self._clock.monotonic()
            self.state.apply(fragment, mean)
            applied = Applied(done.outcome, self.state.digest)
            self._update_residual(fragment, applied.outcome)
            self.client.mark("apply", began, round_no=round_no)
            return applied

        return job

    def _update_residual(self, fragment: int, outcome: RoundOutcome) -> None:
        """Keep the part of the update that the mean does not have for the next round."""
        if self.feedback is None:
            return
        is_refused = any(refused.rank == self._rank for refused in outcome.commit.rejected)
        # The commit may have an earlier offer of this replica: of a failed attempt, or from before a restart.
        if is_refused or (not outcome.is_included and outcome.commit.contribution(self._rank) is not None):
            self.feedback.forget(fragment)
        else:
            self.feedback.settle(fragment, is_included=outcome.is_included)

    def _merge(self, fragment: int, *, is_included: bool) -> None:
        """Bring the live weights together with the agreed ones; take the latter if the mean lacks our update."""
        agreed = self.state.fragment(fragment)
        if not is_included:
            self.settle()
        elif self._predicted is not None:
            offsets = self._predicted[: agreed.size]
            np.subtract(agreed, offsets, out=offsets)
            self.vector.shift(offsets, fragment)
        elif self.stream.alpha == 0:
            self.vector.write(agreed, fragment)
        elif self.stream.alpha < 1:
            self.vector.mix(agreed, self.stream.alpha, fragment)

    def _cancel(self, fragment: int) -> None:
        """Discard a failed round; a later attempt sends the training until then."""
        self.pending = None
        if self.feedback is not None:
            self.feedback.forget(fragment)
        if self._predicted is not None:
            self._merge(fragment, is_included=True)

    def _buffer(self, fragment: int) -> F32:
        """The memory for the update of a fragment, and then for its mean."""
        span = self.vector.fragments[fragment]
        return self._update[: span.stop - span.start]

    # ---- catching up, checkpoints and snapshots

    def catch_up(self) -> None:
        """Apply the rounds that the others committed: from a snapshot if needed, then commit by commit."""
        self.wait_for_tasks()
        began = self.round_no

        def sink_of(fragment: int) -> StoppableVector:
            return StoppableVector(self._buffer(fragment), self._clock)

        self.client.catch_up(began, self._apply_committed, self._load_snapshot, room=sink_of)
        if self.round_no > began:
            log.info("caught up from round %d to round %d", began, self.round_no)
            self.settle()

    def restore(self, sections: Mapping[str, Buffer], round_no: int, position: str, started: Sequence[Any]) -> None:
        """Load the state of a checkpoint."""
        self.state.load(sections, started)
        self.round_no, self._digest = round_no, None
        self.client.continue_from(position)
        self.settle()

    def publish(self, then: Callable[[], object]) -> None:
        """Write a snapshot of the state for late replicas, then call `then`; with a delay, in the background."""
        round_no = self.round_no

        def task() -> None:
            log.debug("rank %d writes the snapshot of round %d", self._rank, round_no)
            self.client.write_snapshot(round_no, self.state.sections(), {"started": self.state.started})
            then()

        if self.stream.delay:
            self._tasks.append(self._background.submit(task))
        else:
            task()

    def wait_for_tasks(self) -> None:
        """Wait until the background thread is idle. No round may be in progress."""
        assert self.pending is None
        while self._tasks:
            awaited(self._tasks.pop(0))

    def _apply_committed(self, done: Exchanged) -> None:
        """Apply a round that was committed without this replica."""
        fragment = done.outcome.fragment
        self.state.apply(fragment, self._buffer(fragment))
        self.round_no, self._digest = done.round_no + 1, None

    def _load_snapshot(self, loaded: LoadedSnapshot) -> None:
        self.state.load(loaded.buffers, loaded.meta.get("started", [True] * self.stream.fragments))
        self.round_no, self._digest = loaded.round_no, None


class Stopped(Exception):
    """The round in progress was cancelled because this replica ends."""


class StoppableClock:
    """The system clock; after `stop`, `sleep` and `check` raise `Stopped`."""

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

    def restart(self) -> None:
        self._stop.clear()

    def check(self) -> None:
        """Raise `Stopped` after `stop`."""
        if self._stop.is_set():
            raise Stopped


class StoppableVector(ArrayVector):
    """An array as the source and the sink of a round that `StoppableClock.stop` cancels."""

    def __init__(self, array: F32, clock: StoppableClock) -> None:
        super().__init__([array])
        self._clock = clock

    def read(self, start: int, stop: int) -> F32:
        self._clock.check()
        return super().read(start, stop)

    def write(self, start: int, values: F32) -> None:
        self._clock.check()
        super().write(start, values)


def _run_now(action: Callable[[], T]) -> Future[T]:
    """Call the action in this thread; the future has its result or its error."""
    result: Future[T] = Future()
    try:
        result.set_result(action())
    except Exception as exc:  # noqa: BLE001 - the future raises it
        result.set_exception(exc)
    return result
