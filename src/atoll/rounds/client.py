"""What training code uses: one replica's place in the rounds of a run, with plain blocking calls.

    client = RoundClient(store, run_id, rank, world_size, layouts=[layout], attempt=attempt)
    weights = client.join(initial_weights)             # agreed: whoever was first
    first = client.catch_up(0, apply, load)            # what was committed before we came
    for round_no in range(first, ...):
        done = client.exchange(round_no, update, weight=tokens)      # update: float32 vector, start minus now
        apply(done.mean)                               # the same bits on every replica

Everything may raise: `Fenced` (stop: another process plays this rank), `QuorumLost`, `CorruptUpdate`, `StoreError`, and
`LeftBehind` (the others are far ahead: `catch_up`). No call waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from atoll.rounds.allocator import keep_freed_memory
from atoll.rounds.codec import F32
from atoll.rounds.drive import Driver
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.protocol import Head, RoundProtocol
from atoll.rounds.records import Agreement
from atoll.rounds.requests import Counters
from atoll.rounds.snapshots import LoadedSnapshot
from atoll.rounds.vectors import Parts, Sink, Source, as_source
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import with_patience

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

    @_with_the_options_of(RoundProtocol.__init__)
    def __init__(self, store: Store, *replica: Any, **options: Any) -> None:
        """`store`, and then the arguments of `RoundProtocol`."""
        self._protocol = RoundProtocol(*replica, **options)
        if self._protocol.tuning.keep_freed_memory:
            keep_freed_memory()
        self._clock = self._protocol.io.clock
        self._drive = Driver(with_patience(store, self._protocol.tuning.retry_s), self._clock)

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

    def latest(self) -> Head:
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
        return Parts([mean]), mean
