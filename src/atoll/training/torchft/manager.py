"""A manager for torchft's `DiLoCo` and `LocalSGD` whose replicas meet in a store: no Lighthouse, no sockets.

    from torchft.local_sgd import DiLoCo
    from atoll.training.torchft import Manager

    manager = Manager("s3://bucket/exp", rank, world_size, run_id="exp-7")
    with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=50):
        ...                                     # your loop, unchanged

Theory of operation. torchft asks for the mean of one tensor after the other; they are collected and exchanged at once,
as one round, as soon as the last tensor of the fragment is there. The exchange goes on in the background; with
`fragment_sync_delay` the model trains meanwhile, and torchft waits that many steps later. Where it is not known which
tensor is the last (the first round of `LocalSGD` without `model`), it starts when one of them is waited for. Nothing
here raises out of `allreduce` or `wait`: the error is kept, `should_commit` says False, torchft goes back to the last
global weights and trains on. A round that was committed without this replica is taken in at the next `start_quorum`.

Where the replicas of a torchft run meet: the store, the run and the rank, from whatever the caller knows.

What a torchft run says about itself: its step, its bytes, and how much of the exchange training did not wait for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.distributed import ReduceOp

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import ReplicaContext
from atoll.errors import AtollError, ConfigError, Fenced, RoundError
from atoll.registry import open_store
from atoll.rounds.client import RoundClient
from atoll.rounds.codecs import EXACT_CODEC
from atoll.rounds.context import Tuning
from atoll.rounds.io import Counters
from atoll.rounds.layout import Layout
from atoll.rounds.quorum import Quorum
from atoll.rounds.timeline import COMPUTE
from atoll.stores.base import Store
from atoll.training.diloco import Progress
from atoll.training.torchft.rounds import Found, TorchftRounds
from atoll.training.torchft.state import (
    FRAGMENT_KEY,
    FragmentState,
    TorchftFragment,
    WeightState,
    flat,
    fragment_behind,
    write_mean,
)
from atoll.training.torchft.work import Work

if TYPE_CHECKING:
    from atoll.training.allreduce import ObjectStoreAllReduce


class Place:
    """Which store, which run, which rank."""

    def __init__(self, store: Store, rank: int, world_size: int, run_id: str, attempt: int) -> None:
        self.store, self.rank, self.world_size, self.run_id, self.attempt = store, rank, world_size, run_id, attempt

    @classmethod
    def of(
        cls,
        store: str | os.PathLike[str] | Store | ReplicaContext | ObjectStoreAllReduce,
        rank: int | None,
        world_size: int | None,
        run_id: str | None,
        attempt: int,
    ) -> Place:
        if isinstance(store, ReplicaContext):
            return cls(store.store, store.rank, store.world_size, run_id or store.run_id, attempt or store.attempt)
        from atoll.training.allreduce import ObjectStoreAllReduce

        if isinstance(store, ObjectStoreAllReduce):
            return cls(store.store, store.rank, store.world_size, run_id or store.round_id or "torchft", attempt)
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: give both, with the rank below the world size")
        opened = open_store(store) if isinstance(store, str | os.PathLike) else store
        return cls(opened, rank, world_size, run_id or "torchft", attempt)


class RoundMeter:
    """Tells the rounds when the caller trained: whenever it was not in the manager. For the caller's thread only."""

    def __init__(self, rounds: TorchftRounds, ctx: ReplicaContext | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._rounds, self._clock = rounds, clock
        self._progress = Progress(ctx, clock=clock) if ctx is not None else None
        self._began = self._trained_since = clock.monotonic()
        self._waited_s = self._told_s = 0.0
        self._is_waiting = False

    @property
    def wait_share(self) -> float:
        """The part of the time so far that training waited."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges so far that went on while the model trained."""
        return self._rounds.client.hidden_share if self._rounds.is_joined else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is waiting; inside of waiting it changes nothing."""
        if self._is_waiting:
            yield
            return
        self.trained()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            began, self._trained_since = self._trained_since, self._clock.monotonic()
            self._waited_s += self._trained_since - began

    def trained(self) -> None:
        """Training has gone on until now; told before an exchange begins, so that it counts for that one."""
        if self._is_waiting:
            return
        now = self._clock.monotonic()
        if self._rounds.is_joined:
            self._rounds.client.mark(COMPUTE, self._trained_since, now)
        self._trained_since = now

    def note(self, metrics: dict[str, float]) -> None:
        """New values for the live views."""
        if self._progress is not None:
            self._progress.note(self._rounds.step, metrics)

    def round_over(self) -> None:
        """A round is committed; the live views hear of it."""
        if self._progress is None:
            return
        waited_s, self._told_s = self._waited_s - self._told_s, self._waited_s
        self._progress.round_over(self._rounds.step, waited_s, self._rounds.client)


log = logging.getLogger("atoll.training")

_READ_TIMEOUT_S = 60.0


class Manager:
    """Duck-types `torchft.Manager`. One for each replica; a process that comes back makes a new one and is healed.

    The same store and `run_id` is the same run: a new process with an old rank takes over that rank, gets the global
    weights, the outer state and the step, and goes on. A new run needs a new `run_id`, or an empty prefix.
    """

    _use_async_quorum = False

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | ReplicaContext | ObjectStoreAllReduce,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        run_id: str | None = None,
        attempt: int = 0,
        model: nn.Module | None = None,
        min_replica_size: int | None = None,
        timeout_s: float = 1800.0,
        max_retries: int | None = None,
        codec: str = EXACT_CODEC,
        mean_codec: str | None = None,
        snapshot_every: int = 10,
        quorum: Quorum | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """`store` is a URI, a store, or something that knows more: a `ReplicaContext` or an `ObjectStoreAllReduce`.

        `model` is for `LocalSGD`, which tells its manager nothing of the weights: with it, they are agreed on before
        the first step and healed. `min_replica_size` lets rounds go on with fewer than all; `quorum` says more.
        """
        place = Place.of(store, rank, world_size, run_id, attempt)
        self.rank, self.world_size, self.run_id = place.rank, place.world_size, place.run_id
        quorum = quorum or _quorum(min_replica_size, place.world_size, timeout_s)
        tuning = tuning or Tuning(outlier_factor=None, retry_s=min(120.0, timeout_s / 2))

        def make_client(layouts: list[Layout]) -> RoundClient:
            return RoundClient(
                place.store, place.run_id, place.rank, place.world_size, layouts=layouts, attempt=place.attempt,
                codec_name=codec, mean_codec=mean_codec, quorum=quorum, tuning=tuning, settings={"trainer": "torchft"},
            )  # fmt: skip

        self._rounds = TorchftRounds(place.rank, make_client, snapshot_every, is_strict=quorum.is_strict)
        self._meter = RoundMeter(self._rounds, store if isinstance(store, ReplicaContext) else None)
        self._model, self._max_retries = model, max_retries
        self._fragments: dict[str, tuple[TorchftFragment, Callable[[Any], None], Callable[[], Any]]] = {}
        self._save_fns: dict[str, Callable[[], Any]] = {}
        self._works: list[Work] = []
        self._exchange: Future[Found] | None = None
        self._found: Found | None = None
        self._error: Exception | None = None
        self._is_behind = self._has_quorum = False
        self._failures = 0
        self._reading, self._is_stepping = threading.Lock(), False

    # ---- what DiLoCo and LocalSGD call

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Take note of a fragment of DiLoCo. Other state is only handed out again by `_manager_state_dict`."""
        if key in self._save_fns:
            raise ConfigError(f"`{key}` is registered already: one manager serves one DiLoCo", reason="registered")
        if key.startswith(FRAGMENT_KEY):
            if self._rounds.is_joined:
                raise ConfigError("the manager is in use already: make DiLoCo before the first optimizer step")
            self._fragments[key] = (fragment_behind(load_state_dict, key), load_state_dict, state_dict)
        self._save_fns[key] = state_dict

    def disallow_state_dict_read(self) -> None:
        """An inner step begins: what was collected goes on its way, and nobody reads half-stepped weights."""
        self._join()
        self._begin()
        self._rounds.tidy()
        if not self._is_stepping:
            self._reading.acquire()
            self._is_stepping = True

    def allow_state_dict_read(self) -> None:
        if self._is_stepping:
            self._is_stepping = False
            self._reading.release()

    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: object = None) -> None:  # noqa: ARG002
        """Begin a round: forget the last error, and catch up if rounds were committed without this replica.

        Raises only what going on cannot mend: `Fenced`, and mistakes in the configuration.
        """
        with self._meter.waiting():
            self._settle()
            self._abandon()
            self._error, self._has_quorum = None, True
            try:
                self._rounds.tidy()
                if not self._join() and self._rounds.is_joined and allow_heal and not self._rounds.is_current:
                    self._is_behind = self._rounds.catch_up()
            except (Fenced, ConfigError):
                raise
            except AtollError as exc:
                self.report_error(exc)

    def wait_quorum(self) -> None:
        """Nothing to wait for: `start_quorum` is over when it returns."""

    def current_step(self) -> int:
        """Committed steps; equal on all replicas of a round. Joins the run first: others may have begun before us."""
        self._join()
        return self._rounds.step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: object = None) -> Work:  # noqa: ARG002
        """The mean over the participants, in `tensor`, once the work was waited for. Never raises, never waits.

        `should_quantize` does nothing, as with torchft on CPU: `codec` says how values travel.
        """
        work = Work(tensor, self._settle)
        try:
            _check_reducible(tensor, reduce_op)
            if self._exchange is not None and tensor.numel():
                raise ConfigError("the fragment is on its way already, and has no such tensor")
        except AtollError as exc:
            self.report_error(exc)
        if self._error is not None:
            work.finish()
            return work
        self._works.append(work)
        if self._has_all_tensors():
            self._begin()
        return work

    def should_commit(self, timeout: object = None) -> bool:  # noqa: ARG002
        """Whether the round worked out; then it is one step more. Raises `Fenced`, and after `max_retries` failures."""
        self._settle()
        if self._error is not None:
            self._abandon()
            return self._refuse(self._error)
        found, self._found, self._failures = self._found, None, 0
        if found is not None:
            self._rounds.settle(found)
            self._meter.round_over()
        else:
            self._rounds.step += 1
            self._rounds.batches += self.num_participants()
        return True

    # ---- how it is going

    def log(self, **metrics: float) -> None:
        """Say how it is going: shown by `atoll status`, `top` and the live table, with step, bytes and waiting."""
        self._meter.note(metrics)

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds of the rounds so far."""
        return self._rounds.client.counters if self._rounds.is_joined else Counters()

    @property
    def wait_share(self) -> float:
        """The part of the time so far that went into rounds instead of training."""
        return self._meter.wait_share

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges so far that went on while the model trained: 0 without `fragment_sync_delay`."""
        return self._meter.hidden_share

    # ---- for tests, and for other parts of torchft

    def errored(self) -> Exception | None:
        """What went wrong since `start_quorum`."""
        return self._error

    def report_error(self, e: Exception) -> None:
        """Make the next `should_commit` say False."""
        self._error = self._error or e
        log.warning("rank %d, step %d: %s", self.rank, self._rounds.step, e)

    def num_participants(self) -> int:
        """How many replicas were in the last round; all of them before the first."""
        return len(self._rounds.ranks) or self.world_size

    def participating_rank(self) -> int | None:
        """This replica's place among the participants; None before the first quorum, or if it was left out."""
        if not self._has_quorum:
            return None
        ranks = self._rounds.ranks or tuple(range(self.world_size))
        return ranks.index(self.rank) if self.rank in ranks else None

    def is_participating(self) -> bool:
        return self.participating_rank() is not None

    def batches_committed(self) -> int:
        """Participants, summed over all committed steps."""
        return self._rounds.batches

    def state_dict(self) -> dict[str, int]:
        return {"step": self._rounds.step, "batches_committed": self._rounds.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Set the counters. If the run has gone further, that counts as soon as this replica joins."""
        self._rounds.step, self._rounds.batches = state_dict["step"], state_dict["batches_committed"]

    def _manager_state_dict(self) -> dict[str, Any]:
        """Everything that was registered, and the counters. Waits while an inner step is going on."""
        if not self._reading.acquire(timeout=_READ_TIMEOUT_S):
            raise TimeoutError("the state cannot be read: an optimizer step has been going on for a minute")
        try:
            return {"user": {key: save() for key, save in self._save_fns.items()}, "torchft": self.state_dict()}
        finally:
            self._reading.release()

    def shutdown(self, wait: bool = True, *, leave: bool = True) -> None:
        """End the exchange under way and the thread. With `leave`, the others stop waiting for this replica."""
        if wait:
            self._settle()
            self._rounds.tidy()
        self._rounds.close(leave=leave, wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error this replica may be started again, and is waited for.
        self.shutdown(wait=kind is None, leave=kind is None)

    # ---- one round

    def _join(self, tensors: list[Tensor] | None = None) -> bool:
        """Join the run as soon as it is known what is exchanged; whether that was now."""
        if self._rounds.is_joined:
            return False
        if self._fragments:
            self._rounds.join(FragmentState(self._fragments))
        elif self._model is not None:
            self._rounds.join(WeightState.of_model(self._model))
        elif tensors is not None:
            # Without a model nothing was healed: if others are ahead, what was trained here began somewhere else.
            self._is_behind = self._rounds.join(WeightState.of_tensors(tensors))
        return self._rounds.is_joined

    def _has_all_tensors(self) -> bool:
        """Whether the whole fragment was handed in, as far as that is known."""
        return self._rounds.is_joined and sum(w.tensor.numel() for w in self._works) == self._rounds.fragment_size

    def _begin(self) -> None:
        """Send what was collected on its way."""
        if self._exchange is not None or not self._works or self._error is not None:
            return
        tensors = [work.tensor for work in self._works]
        self._meter.trained()
        try:
            self._join(tensors)
            self._exchange = self._rounds.begin(flat(tensors), is_behind=self._is_behind)
        except Exception as exc:  # noqa: BLE001 - torchft cannot bear an error here; should_commit will tell
            self.report_error(exc)
        self._is_behind = False

    def _settle(self) -> bool:
        """Bring the exchange to its end: tensors hold the mean, callbacks have run. Whether it worked out."""
        self._begin()
        exchange, self._exchange = self._exchange, None
        works, self._works = self._works, []
        try:
            if exchange is not None:
                with self._meter.waiting():
                    self._found = exchange.result()
                write_mean([work.tensor for work in works], self._found.mean)
        except Exception as exc:  # noqa: BLE001 - see above
            self.report_error(exc)
        for work in works:
            try:
                work.finish()
            except Exception as exc:  # noqa: BLE001 - a callback of the caller's
                self.report_error(exc)
        return self._error is None

    def _abandon(self) -> None:
        """A mean that torchft will not apply though the others do is applied when we next catch up."""
        if self._found is not None:
            self._rounds.owe(self._found)
            self._found = None

    def _refuse(self, error: Exception) -> bool:
        if isinstance(error, Fenced):
            raise error
        self._failures += 1
        if self._max_retries is not None and self._failures > self._max_retries:
            message = f"{self._failures} rounds in a row failed, the last one with: {error}"
            raise RoundError(message, round_no=self._rounds.round_no) from error
        return False


MockManager = Manager
"""The name other tools import: a manager that needs no servers."""


def _quorum(least: int | None, world_size: int, timeout_s: float) -> Quorum:
    """All replicas, or at least so many."""
    return Quorum(None if least is None or least >= world_size else least, deadline_s=timeout_s)


def _check_reducible(tensor: Tensor, reduce_op: object) -> None:
    if not tensor.is_floating_point():
        raise ConfigError(f"only floating point tensors can be averaged, not {tensor.dtype}")
    if reduce_op is not None and reduce_op != ReduceOp.AVG:
        raise ConfigError(f"only the mean can be had, not {reduce_op}")
