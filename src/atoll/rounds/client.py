"""One replica in the rounds of a run: `RoundClient` for training code, `RoundSteps` for drivers and tests.

    client = RoundClient(store, run_id, rank, world_size, layouts=[layout], attempt=attempt)
    weights = client.join(initial_weights)             # the weights that the run agreed on
    first = client.catch_up(0, apply, load)            # takes in what was committed before this replica joined
    for round_no in range(first, ...):
        done = client.exchange(round_no, update, weight=tokens)      # update: float32 vector, start minus now
        apply(done.mean)                               # the same bits on every replica

Every call ends, if need be with an error: `Fenced` (stop: another process holds this rank), `QuorumLost`,
`CorruptUpdate`, `StoreError`, or `LeftBehind` (the other replicas are rounds ahead: call `catch_up`).
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import InternalError
from atoll.kernels.allocator import keep_freed_memory
from atoll.rounds import catch_up as catching_up
from atoll.rounds import exchange as exchanging
from atoll.rounds import join, retention
from atoll.rounds.agree import read_commit
from atoll.rounds.catch_up import LoadedSnapshot, RunPosition
from atoll.rounds.codecs import DEFAULT_CODEC, recommended_mean
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.context import RoundContext, Tuning
from atoll.rounds.events import EventLog
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.io import Counters, Steps, StoreIO, ThreadedDriver
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout, Sink, Source, as_source
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import with_retry_timeout

log = logging.getLogger("atoll.rounds")


@dataclass(frozen=True)
class Exchanged:
    """The result of a round. `mean` is None when the caller passed its own sink."""

    outcome: RoundOutcome
    mean: F32 | None

    @property
    def round_no(self) -> int:
        return self.outcome.round_no

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.outcome.ranks

    @property
    def is_included(self) -> bool:
        return self.outcome.is_included


class RoundClient:
    """One replica of one run, with blocking calls. Not thread-safe: one call at a time."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        rank: int,
        world_size: int,
        *,
        layouts: Sequence[Layout],
        attempt: int = 0,
        launch: int = 1,
        rounds_of: int | None = None,
        codec_name: str = DEFAULT_CODEC,
        mean_codec: str | None = None,
        chunk: int | None = None,
        quorum: Quorum | None = None,
        settings: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
        lease_s: float = 900.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._steps = RoundSteps(
            run_id, rank, world_size, layouts=layouts, attempt=attempt, launch=launch, rounds_of=rounds_of,
            codec_name=codec_name, mean_codec=mean_codec, chunk=chunk, quorum=quorum, settings=settings, tuning=tuning,
            lease_s=lease_s, clock=clock,
        )  # fmt: skip
        if self._steps.tuning.keep_freed_memory:
            keep_freed_memory()
        self._clock = clock
        self._drive = ThreadedDriver(with_retry_timeout(store, self._steps.tuning.retry_s), clock)

    @property
    def agreement(self) -> Agreement:
        return self._steps.context.agreement

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds since the client was created."""
        return self._steps.io.counters

    @property
    def exchange_s(self) -> float:
        """Seconds of all exchanges so far."""
        return self._steps.io.timeline.exchange_s

    @property
    def exposed_s(self) -> float:
        """Seconds of exchanges during which training did not compute, according to the calls of `mark`."""
        return self._steps.io.timeline.exposed_s

    @property
    def hidden_share(self) -> float:
        """The share of the exchange time that overlapped with computing."""
        return self._steps.io.timeline.hidden_share

    @property
    def rejections(self) -> int:
        """How many updates of this rank were rejected, in the rounds that this process applied."""
        context = self._steps.context
        return context.history.rejections[context.rank]

    def mark(self, phase: str, began: float, ended: float | None = None, *, round_no: int | None = None) -> None:
        """Record when training computed (`compute`) or took an outer step (`apply`), by `clock.monotonic()`.

        Call it for `compute` before the exchange of what was computed, and before waiting for a background exchange.
        Without any call, all time between exchanges counts as computing. Thread-safe.
        """
        self._steps.io.timeline.add(phase, began, self._clock.monotonic() if ended is None else ended, round_no)

    @property
    def position(self) -> str:
        """Digest of the last commit that this replica applied. A checkpoint stores it next to the round number."""
        return self._steps.context.previous

    def join(self, initial: Sequence[Buffer]) -> list[Buffer]:
        """Claim the rank and agree on layout, settings and weights.

        `initial` has one buffer for each tensor, fragment after fragment, in layout order, in the tensor's own dtype.
        Returns the agreed buffers: the same objects if ours are equal, else new ones. Raises `Conflict`, which lists
        the differences, if this replica was built differently.
        """
        return self._drive(self._steps.join(initial))

    def exchange(
        self,
        round_no: int,
        update: Source | NDArray[Any],
        *,
        weight: float,
        fragment: int | None = None,
        base: str = "",
        out: Sink | None = None,
    ) -> Exchanged:
        """Contribute `update` with this weight (tokens) to a round, and return the agreed mean.

        `update` is read in place and more than once: it must not change before this call returns.
        `base` is the digest of the state that the update was made from; a replica with another state is rejected.
        With `out` the mean is written there, chunk by chunk, and nothing as large as the model is allocated. `out` may
        be the arrays that `update` reads from.
        """
        sink, mean = self._sink(round_no % len(self.agreement.layouts) if fragment is None else fragment, out)
        source = as_source(update)
        steps = self._steps.exchange(round_no, source, sink, weight=weight, fragment=fragment, base=base)
        return Exchanged(self._drive(steps), mean)

    def replay(self, round_no: int, *, out: Sink | None = None) -> Exchanged | None:
        """Return the mean of a committed round without contributing; None when the round is not committed yet."""
        mean: F32 | None = None

        def sink_for(fragment: int) -> Sink:
            nonlocal mean
            sink, mean = self._sink(fragment, out)
            return sink

        outcome = self._drive(self._steps.replay(round_no, sink_for))
        return None if outcome is None else Exchanged(outcome, mean)

    def is_committed(self, round_no: int) -> bool:
        """Whether the store has the commit of a round; one GET. The commit of an old round may have been deleted."""
        return self._drive(self._steps.is_committed(round_no))

    def catch_up(
        self,
        round_no: int,
        apply: Callable[[Exchanged], None],
        load: Callable[[LoadedSnapshot], None],
        *,
        sink_for: Callable[[int], Sink] | None = None,
        replace_diverged: bool = False,
    ) -> int:
        """Apply every round committed from `round_no` on, and return the next round to contribute to.

        `apply` gets the mean of each round, in order. `load` gets a snapshot that replaces the state, when replaying is
        impossible or slower. Both are called in this thread. With `sink_for` the mean of a fragment is written to
        `sink_for(fragment)`. With `replace_diverged`, a replica whose state the others rejected as different also loads
        a snapshot, instead of raising `CorruptUpdate`. Call this after `join`, after `LeftBehind`, and after a round
        that did not include this replica.
        """
        mean: F32 | None = None

        def own_sink_for(fragment: int) -> Sink:
            nonlocal mean
            sink, mean = self._sink(fragment, None if sink_for is None else sink_for(fragment))
            return sink

        def apply_mean(outcome: RoundOutcome) -> None:
            apply(Exchanged(outcome, mean))

        steps = self._steps.catch_up(round_no, own_sink_for, apply_mean, load, replace_diverged=replace_diverged)
        return self._drive(steps)

    def latest(self) -> RunPosition:
        """How far the run is, according to the store."""
        return self._drive(self._steps.latest())

    def write_snapshot(
        self, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any] | None = None
    ) -> bool:
        """Write the state before `round_no`, which must be the next round; False when another replica has done so."""
        return self._drive(self._steps.write_snapshot(round_no, buffers, meta))

    def load_snapshot(self, at_least: int = 0) -> LoadedSnapshot | None:
        """The newest readable snapshot of round `at_least` or later; continue with `replay(snapshot.round_no)`."""
        return self._drive(self._steps.load_snapshot(at_least))

    def continue_from(self, position: str) -> None:
        """Continue after this replica's own checkpoint; `position` is the value that the checkpoint stored."""
        self._steps.continue_from(position)

    def acknowledge(self, round_no: int) -> None:
        """Promise never to need a round below `round_no` again, even after a crash. Call it after a checkpoint."""
        self._drive(self._steps.acknowledge(round_no))

    def retire(self) -> int:
        """Delete rounds that no live replica needs; returns the number of deleted objects."""
        return self._drive(self._steps.retire())

    def leave(self) -> None:
        """Record that this rank has left; the other replicas then stop waiting for it."""
        self._drive(self._steps.leave())

    def close(self) -> None:
        """Write the measurements and end the threads. The other replicas do not learn of it; see `leave`."""
        self._drive(self._steps.finish())
        self._drive.close()

    def __enter__(self) -> RoundClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sink(self, fragment: int, out: Sink | None) -> tuple[Sink, F32 | None]:
        """The sink for the mean of a fragment, and the array behind it if the caller gave no sink."""
        if out is not None:
            return out, None
        mean = np.empty(self.agreement.layouts[fragment].size, dtype=np.float32)
        return ArrayVector([mean]), mean


class RoundSteps:
    """What `RoundClient` does, as generators that a driver runs. Tests drive many replicas in one thread.

    Call `join` first; then `exchange` once for every round, in order. See `RoundClient` for what each call does.
    """

    def __init__(
        self,
        run_id: str,
        rank: int,
        world_size: int,
        *,
        layouts: Sequence[Layout],
        attempt: int = 0,
        launch: int = 1,
        rounds_of: int | None = None,
        codec_name: str = DEFAULT_CODEC,
        mean_codec: str | None = None,
        chunk: int | None = None,
        quorum: Quorum | None = None,
        settings: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
        lease_s: float = 900.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self._keys = RoundKeys(run_id, launch, rounds_of)
        self._rank, self._attempt = rank, attempt
        self._quorum, self.tuning = quorum or Quorum(), tuning or Tuning()
        self._token = uuid.uuid4().hex
        self._quorum.check_reachable(world_size)
        if chunk:
            Grid(0, chunk)  # raises `InvalidSpec` for a size that is no multiple
        self._wanted = Agreement(
            run_id,
            world_size,
            tuple(layouts),
            chunk or join.ANY_CHUNK,
            codec(codec_name).name,
            codec(mean_codec or recommended_mean(codec_name)).name,
            dict(settings or {}),
            join.NO_BLOB,
        )
        self.io = StoreIO(clock, rng or random.Random(), retry_s=self.tuning.retry_s)
        self._leases = retention.Leases(lease_s)
        self._acks = 0
        self._context: RoundContext | None = None

    @property
    def context(self) -> RoundContext:
        if self._context is None:
            raise InternalError("`join` must be called before any other call")
        return self._context

    def join(self, initial: Sequence[Buffer]) -> Steps[list[Buffer]]:
        # `begin` comes first, so that a process that was built differently fails before it fences the right one.
        start = yield from join.begin(self.io, self._keys, self._wanted, initial, self._rank, self.tuning)
        claim = yield from join.take_rank(self.io, self._keys, self._rank, self._attempt, self._token)
        events = EventLog(self._keys, self._rank, claim.incarnation, self.io.clock)
        self.io.timeline.open(self._keys, self._rank, claim.incarnation)
        context = self._context = RoundContext(
            self.io, self._keys, claim, start.agreement, self._quorum, self.tuning, events,
            previous=start.agreement.digest,
        )  # fmt: skip
        asked = self.io.clock.monotonic()  # measured now, while no other request runs
        yield from self.io.probe(self._keys.claim(self._rank, claim.incarnation))
        context.history.latencies.append(self.io.clock.monotonic() - asked)
        log.info(
            "run %s: rank %d of %d joined as incarnation %d; codec %s, chunks of %d values, store latency %.4f s",
            context.run_id, claim.rank, start.agreement.world_size, claim.incarnation, start.agreement.codec,
            start.agreement.chunk, context.history.latencies[-1],
        )  # fmt: skip
        return start.initial

    def exchange(
        self, round_no: int, source: Source, sink: Sink, *, weight: float, fragment: int | None = None, base: str = ""
    ) -> Steps[RoundOutcome]:
        if fragment is None:
            fragment = round_no % len(self.context.agreement.layouts)
        self.io.timeline.begin(round_no, fragment)
        try:
            outcome = yield from exchanging.exchange(self.context, round_no, fragment, source, weight, base, sink)
        except BaseException:
            self.io.timeline.end(is_included=False, is_over=False)
            raise
        self.io.timeline.end(is_included=outcome.is_included)
        return outcome

    def replay(self, round_no: int, sink_for: Callable[[int], Sink]) -> Steps[RoundOutcome | None]:
        return exchanging.replay(self.context, round_no, sink_for)

    def is_committed(self, round_no: int) -> Steps[bool]:
        return (yield from read_commit(self.context, round_no, is_awaited=False)) is not None

    def catch_up(
        self,
        round_no: int,
        sink_for: Callable[[int], Sink],
        apply: Callable[[RoundOutcome], None],
        load: Callable[[LoadedSnapshot], None],
        *,
        replace_diverged: bool = False,
    ) -> Steps[int]:
        return catching_up.catch_up(self.context, round_no, sink_for, apply, load, replace_diverged=replace_diverged)

    def latest(self) -> Steps[RunPosition]:
        return catching_up.run_position(self.context)

    def write_snapshot(
        self, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any] | None = None
    ) -> Steps[bool]:
        return catching_up.write_snapshot(self.context, round_no, buffers, meta or {})

    def load_snapshot(self, at_least: int = 0) -> Steps[LoadedSnapshot | None]:
        return catching_up.load_snapshot(self.context, at_least)

    def continue_from(self, position: str) -> None:
        self.context.previous = position

    def acknowledge(self, round_no: int) -> Steps[None]:
        self._acks += 1
        return retention.acknowledge(self.context, round_no, self._acks)

    def retire(self) -> Steps[int]:
        """One replica that calls it after it wrote a snapshot is enough."""
        return retention.retire(self.context, self._leases)

    def leave(self) -> Steps[None]:
        self.context.events.add("left", -1, rank=self._rank)
        yield from self.context.events.flush(self.io)
        yield from self.io.timeline.finish(self.io)
        yield from join.leave(self.io, self._keys, self.context.claim)

    def finish(self) -> Steps[None]:
        """Write the measurements to the store, unless the store was unavailable when it was last asked."""
        if self._context is not None and not self.io.is_cut_off:
            yield from self.io.timeline.finish(self.io)
