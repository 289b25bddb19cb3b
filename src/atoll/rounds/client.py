"""What training code uses: one replica's place in the rounds of a run, with plain blocking calls.

    client = RoundClient(store, run_id, rank, world_size, layouts=[layout], attempt=attempt)
    weights = client.join(initial_weights)             # agreed: whoever was first
    first = client.catch_up(0, apply, load)            # what was committed before we came
    for round_no in range(first, ...):
        done = client.exchange(round_no, update, weight=tokens)      # update: float32 vector, start minus now
        apply(done.mean)                               # the same bits on every replica

Everything may raise: `Fenced` (stop: another process plays this rank), `QuorumLost`, `CorruptUpdate`, `StoreError`, and
`LeftBehind` (the others are far ahead: `catch_up`). No call waits for ever.

A replica's side of the protocol, as steps to be driven: what `RoundClient` does, without the blocking.

Tests drive many of these in one thread; `RoundClient` drives one with threads and a real clock.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import CorruptUpdate, InternalError, LeftBehind
from atoll.kernels.allocator import keep_freed_memory
from atoll.rounds import exchange as rounds_exchange
from atoll.rounds import join, retention
from atoll.rounds.agree import read_commit
from atoll.rounds.catch_up import LoadedSnapshot, load_snapshot, snapshot_rounds, write_snapshot
from atoll.rounds.codecs import DEFAULT_CODEC, recommended_mean
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.context import RoundContext, Tuning
from atoll.rounds.events import EventLog
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.io import Counters, Steps, StoreIO, ThreadedDriver
from atoll.rounds.join import ANY_CHUNK, NO_BLOB, begin
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout, Sink, Source, as_source
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import with_retry_timeout

REPLAY_LIMIT = 4
"""With a snapshot further ahead than this many rounds, loading it is less work than replaying them."""


@dataclass(frozen=True)
class RunPosition:
    """Where a run is, as the store shows it."""

    next_round: int
    """The first round that is not committed."""
    oldest_round: int | None
    """The oldest committed round that is still there."""
    snapshot_round: int | None
    """The newest round that has a snapshot."""


class RoundSteps:
    """One replica of one run. Call `join` first; then `exchange` once for every round, in order."""

    def __init__(
        self,
        run_id: str,
        rank: int,
        world_size: int,
        *,
        layouts: Sequence[Layout],
        attempt: int = 0,
        codec_name: str = DEFAULT_CODEC,
        mean_codec: str | None = None,
        chunk: int | None = None,
        quorum: Quorum | None = None,
        settings: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
        lease_s: float = 900.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        token: str | None = None,
    ) -> None:
        self._keys = RoundKeys(run_id)
        self._rank, self._attempt = rank, attempt
        self._quorum, self.tuning = quorum or Quorum(), tuning or Tuning()
        self._token = token or uuid.uuid4().hex
        self._quorum.check_reachable(world_size)
        if chunk:
            Grid(0, chunk)  # refuses odd sizes
        self._wanted = Agreement(
            run_id,
            world_size,
            tuple(layouts),
            chunk or ANY_CHUNK,
            codec(codec_name).name,
            codec(mean_codec or recommended_mean(codec_name)).name,
            dict(settings or {}),
            NO_BLOB,
        )
        self.io = StoreIO(clock, rng or random.Random(), retry_s=self.tuning.retry_s)
        self._leases = retention.Leases(lease_s)
        self._acks = 0
        self._member: RoundContext | None = None

    @property
    def member(self) -> RoundContext:
        if self._member is None:
            raise InternalError("a replica joins before it does anything else")
        return self._member

    def join(self, initial: Sequence[Buffer]) -> Steps[list[Buffer]]:
        """Agree on everything and claim the rank; the initial weights that stand come back."""
        # In this order, so that a process that was built differently is refused before it fences the right one.
        start = yield from begin(self.io, self._keys, self._wanted, initial, self._rank, self.tuning)
        claim = yield from join.take_rank(self.io, self._keys, self._rank, self._attempt, self._token)
        events = EventLog(self._keys, self._rank, claim.incarnation, self.io.clock)
        self.io.timeline.open(self._keys, self._rank, claim.incarnation)
        self._member = RoundContext(
            self.io, self._keys, claim, start.agreement, self._quorum, self.tuning, events,
            previous=start.agreement.digest,
        )  # fmt: skip
        asked = self.io.clock.monotonic()  # now, while nothing else goes on: how far away is the store?
        yield from self.io.probe(self._keys.claim(self._rank, claim.incarnation))
        self._member.memory.trips.append(self.io.clock.monotonic() - asked)
        return start.initial

    def exchange(
        self, round_no: int, source: Source, sink: Sink, *, weight: float, fragment: int | None = None, base: str = ""
    ) -> Steps[RoundOutcome]:
        """Contribute to a round and take in its mean."""
        which = self._fragment(round_no) if fragment is None else fragment
        self.io.timeline.begin(round_no, which)
        try:
            outcome = yield from rounds_exchange.exchange(self.member, round_no, which, source, weight, base, sink)
        except BaseException:
            self.io.timeline.end(is_included=False, is_over=False)
            raise
        self.io.timeline.end(is_included=outcome.is_included)
        return outcome

    def replay(self, round_no: int, room: Callable[[int], Sink]) -> Steps[RoundOutcome | None]:
        """Take in a round without contributing; None when it is not committed. `room(fragment)` is the sink."""
        return (yield from rounds_exchange.replay(self.member, round_no, room))

    def is_committed(self, round_no: int) -> Steps[bool]:
        """Whether the store has the commit of a round; one GET."""
        return (yield from read_commit(self.member, round_no, is_awaited=False)) is not None

    def catch_up(
        self,
        round_no: int,
        room: Callable[[int], Sink],
        apply: Callable[[RoundOutcome], None],
        load: Callable[[LoadedSnapshot], None],
        *,
        replace_diverged: bool = False,
    ) -> Steps[int]:
        """Take in all that was committed from `round_no` on; the next round to contribute to comes back.

        `room(fragment)` gives the sink for a mean, `apply` is called once it is filled. `load` replaces the state when
        the rounds are gone, or when loading is less work than replaying; with `replace_diverged` also when the others
        rejected our state as different from theirs, which otherwise raises `CorruptUpdate`.
        """
        while (head := (yield from self.latest())).next_round > round_no:
            before, trouble = round_no, None
            is_far = head.snapshot_round is not None and head.snapshot_round > round_no + REPLAY_LIMIT
            if is_far or head.oldest_round is None or head.oldest_round > round_no:
                round_no = yield from self._jump(round_no, load)
            try:
                while (outcome := (yield from self.replay(round_no, room))) is not None:
                    apply(outcome)
                    round_no += 1
            except (LeftBehind, CorruptUpdate) as exc:
                if isinstance(exc, CorruptUpdate) and not (replace_diverged and exc.check == "base"):
                    raise
                trouble = exc
            if trouble is not None or round_no == before:  # there are later rounds, and this one is not to be had
                gone = round_no
                round_no = yield from self._jump(gone, load)
                if round_no == gone:
                    message = f"round {gone} is gone and no snapshot after it can be read"
                    raise LeftBehind(message, round_no=gone, latest=head.next_round - 1) from trouble
        return round_no

    def _jump(self, round_no: int, load: Callable[[LoadedSnapshot], None]) -> Steps[int]:
        """Take over a snapshot that is further than we are, if one can be read; the round that is next then."""
        loaded = yield from self.load_snapshot(round_no + 1)
        if loaded is None:
            return round_no
        load(loaded)
        return loaded.round_no

    def latest(self) -> Steps[RunPosition]:
        """Where the others are; two LISTs."""
        keys = self.member.keys
        commits = [keys.parse_commit(key) for key in (yield from self.io.list(keys.commits_prefix()))]
        snapshots = yield from snapshot_rounds(self.member)
        next_round = max([-1, *commits, *(r - 1 for r in snapshots)]) + 1
        return RunPosition(next_round, min(commits, default=None), max(snapshots, default=None))

    def write_snapshot(
        self, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any] | None = None
    ) -> Steps[bool]:
        """Publish the state before `round_no`, which must be the next round; False when another has."""
        return (yield from write_snapshot(self.member, round_no, buffers, meta or {}))

    def load_snapshot(self, at_least: int = 0) -> Steps[LoadedSnapshot | None]:
        """The newest readable snapshot; the next round to replay is its `round_no`."""
        return (yield from load_snapshot(self.member, at_least))

    def continue_from(self, position: str) -> None:
        """Take up after a checkpoint of one's own: `position` is `member.previous` as it was when that was written."""
        self.member.previous = position

    def acknowledge(self, round_no: int) -> Steps[None]:
        """Promise never to need a round below `round_no` again, even after a crash."""
        self._acks += 1
        yield from retention.acknowledge(self.member, round_no, self._acks)

    def retire(self) -> Steps[int]:
        """Delete what no live replica needs; one replica calling it, after it wrote a snapshot, is enough."""
        return (yield from retention.retire(self.member, self._leases))

    def _fragment(self, round_no: int) -> int:
        return round_no % len(self.member.agreement.layouts)

    def leave(self) -> Steps[None]:
        """Say goodbye: the others do not wait for this rank any more."""
        self.member.events.add("left", -1, rank=self._rank)
        yield from self.member.events.flush(self.io)
        yield from self.io.timeline.finish(self.io)
        yield from join.leave(self.io, self._keys, self.member.claim)

    def finish(self) -> Steps[None]:
        """Leave in the store what was measured; quiet, and at once, if the store does not answer."""
        if self._member is not None and not self.io.is_cut_off:
            yield from self.io.timeline.finish(self.io)


P = ParamSpec("P")


@dataclass(frozen=True)
class Exchanged:
    """What came of a round. `mean` is None when the caller gave a sink of its own."""

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


def _with_the_options_of(
    steps: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Store, P], None]]:
    """Give a constructor that passes its arguments on, after a store, the signature of the one that takes them."""

    def signed(init: Callable[..., None]) -> Callable[Concatenate[Any, Store, P], None]:
        own, store, *_ = signature(init).parameters.values()
        _, *passed_on = signature(steps).parameters.values()
        vars(init)["__signature__"] = Signature([own, store, *passed_on], return_annotation="None")
        return init

    return signed


class RoundClient:
    """One replica of one run. Not thread-safe: one call at a time."""

    @_with_the_options_of(RoundSteps.__init__)
    def __init__(self, store: Store, *replica: Any, **options: Any) -> None:
        """`store`, and then the arguments of `RoundSteps`."""
        self._protocol = RoundSteps(*replica, **options)
        if self._protocol.tuning.keep_freed_memory:
            keep_freed_memory()
        self._clock = self._protocol.io.clock
        self._drive = ThreadedDriver(with_retry_timeout(store, self._protocol.tuning.retry_s), self._clock)

    @property
    def agreement(self) -> Agreement:
        return self._protocol.member.agreement

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds since the client was made."""
        return self._protocol.io.counters

    @property
    def exchange_s(self) -> float:
        """Seconds of all exchanges so far."""
        return self._protocol.io.timeline.exchange_s

    @property
    def exposed_s(self) -> float:
        """Seconds of exchanges during which nothing was computed, as far as `mark` told."""
        return self._protocol.io.timeline.exposed_s

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges that went on behind computing."""
        return self._protocol.io.timeline.hidden_share

    @property
    def rejections(self) -> int:
        """How many updates of this rank were rejected, in the rounds this process took in."""
        member = self._protocol.member
        return member.memory.rejections[member.rank]

    def mark(self, phase: str, began: float, ended: float | None = None, *, round_no: int | None = None) -> None:
        """Tell when training computed (`compute`) or took an outer step (`apply`), by `clock.monotonic()`. Thread-safe.

        Computing is told before the exchange it was for, and before waiting for one in the background; if it never is,
        all time between exchanges counts.
        """
        self._protocol.io.timeline.add(phase, began, self._clock.monotonic() if ended is None else ended, round_no)

    @property
    def position(self) -> str:
        """Digest of the last commit that was taken in; belongs in a checkpoint, next to the round number."""
        return self._protocol.member.previous

    def join(self, initial: Sequence[Buffer]) -> list[Buffer]:
        """Claim the rank and agree on layout, settings and weights.

        `initial` has one buffer for each tensor, fragment after fragment, in layout order, in the tensor's own dtype.
        Back come the buffers that stand: the very same ones if ours are equal, else new ones. `Conflict` says what
        differs if this replica was built differently.
        """
        return self._drive(self._protocol.join(initial))

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

        `update` is read where it lies, and more than once: nobody may change it before this returns.
        `base` is the digest of the state the update was made from; replicas whose state differs are found out by it.
        With `out` the mean goes there, chunk by chunk, and nothing as big as the model is allocated. `out` may be the
        arrays `update` reads from.
        """
        sink, mean = self._sink(round_no % len(self.agreement.layouts) if fragment is None else fragment, out)
        source = as_source(update)
        steps = self._protocol.exchange(round_no, source, sink, weight=weight, fragment=fragment, base=base)
        return Exchanged(self._drive(steps), mean)

    def replay(self, round_no: int, *, out: Sink | None = None) -> Exchanged | None:
        """Take in the mean of a committed round without contributing; None when there is no such commit yet."""
        mean: F32 | None = None

        def room(fragment: int) -> Sink:
            nonlocal mean
            sink, mean = self._sink(fragment, out)
            return sink

        outcome = self._drive(self._protocol.replay(round_no, room))
        return None if outcome is None else Exchanged(outcome, mean)

    def is_committed(self, round_no: int) -> bool:
        """Whether the store has the commit of a round; one GET. An old round may have been deleted."""
        return self._drive(self._protocol.is_committed(round_no))

    def catch_up(
        self,
        round_no: int,
        apply: Callable[[Exchanged], None],
        load: Callable[[LoadedSnapshot], None],
        *,
        room: Callable[[int], Sink] | None = None,
        replace_diverged: bool = False,
    ) -> int:
        """Take in everything committed from `round_no` on, and return the next round to contribute to.

        `apply` gets each round's mean, in order; `load` gets a snapshot that replaces the state, when replaying is not
        possible or more work. Both are called in this thread. With `room` the mean of a fragment goes to the sink
        `room(fragment)`. With `replace_diverged`, a replica whose state the others rejected as different from theirs
        loads a snapshot too, instead of raising `CorruptUpdate`. Call this after `join`, after `LeftBehind`, and after
        a round that did not include us.
        """
        mean: F32 | None = None

        def sink_of(fragment: int) -> Sink:
            nonlocal mean
            sink, mean = self._sink(fragment, None if room is None else room(fragment))
            return sink

        def applied(outcome: RoundOutcome) -> None:
            apply(Exchanged(outcome, mean))

        return self._drive(self._protocol.catch_up(round_no, sink_of, applied, load, replace_diverged=replace_diverged))

    def latest(self) -> RunPosition:
        """Where the others are."""
        return self._drive(self._protocol.latest())

    def write_snapshot(
        self, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any] | None = None
    ) -> bool:
        """Publish the state before `round_no`, the next round; False when another replica has done so."""
        return self._drive(self._protocol.write_snapshot(round_no, buffers, meta))

    def load_snapshot(self, at_least: int = 0) -> LoadedSnapshot | None:
        """The newest readable snapshot of round `at_least` or later; go on with `replay(snapshot.round_no)`."""
        return self._drive(self._protocol.load_snapshot(at_least))

    def continue_from(self, position: str) -> None:
        """Go on after a checkpoint of one's own, written when `position` was this."""
        self._protocol.continue_from(position)

    def acknowledge(self, round_no: int) -> None:
        """Promise never to need a round below `round_no` again, even after a crash: call it after a checkpoint."""
        self._drive(self._protocol.acknowledge(round_no))

    def retire(self) -> int:
        """Delete rounds that no live replica needs; the number of objects deleted."""
        return self._drive(self._protocol.retire())

    def leave(self) -> None:
        """Say goodbye: nobody waits for this rank any more."""
        self._drive(self._protocol.leave())

    def close(self) -> None:
        """End the threads. Says nothing to the others; see `leave`."""
        self._drive(self._protocol.finish())
        self._drive.close()

    def __enter__(self) -> RoundClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sink(self, fragment: int, out: Sink | None) -> tuple[Sink, F32 | None]:
        """Where the mean of a fragment goes, and the array it goes to if the caller gave no sink."""
        if out is not None:
            return out, None
        mean = np.empty(self.agreement.layouts[fragment].size, dtype=np.float32)
        return ArrayVector([mean]), mean
