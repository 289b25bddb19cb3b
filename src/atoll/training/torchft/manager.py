"""A manager for torchft's `DiLoCo` and `LocalSGD` whose replicas exchange through a store: no Lighthouse, no sockets.

    from torchft.local_sgd import DiLoCo
    from atoll.training.torchft import Manager

    manager = Manager("s3://bucket/exp", rank, world_size, run_id="exp-7")
    with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=50):
        ...                                     # your loop, unchanged

Theory of operation. torchft asks for the mean of one tensor after the other. The manager collects them and exchanges
them in one round, in the background, as soon as it has the last tensor of the fragment; with `fragment_sync_delay` the
model trains meanwhile, and torchft waits that many steps later. If the last tensor is unknown (the first round of
`LocalSGD` without `model`), the exchange starts when torchft waits for the first tensor. `allreduce` and `wait` never
raise: the manager keeps the error, `should_commit` returns False, and torchft restores the last global weights and
trains on. The next `start_quorum` applies rounds that were committed without this replica.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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
from atoll.training.torchft.rounds import CommittedRound, TorchftRounds
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

log = logging.getLogger("atoll.training")

_READ_TIMEOUT_S = 60.0


class Manager:
    """Has the interface of `torchft.Manager`. Each replica has one; a restarted process creates a new one.

    The same store and `run_id` are the same run: a new process with an old rank takes over that rank, gets the global
    weights, the outer state and the step, and continues. A new run needs a new `run_id`, or an empty prefix.
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
        """`store` is a URI, a store, a `ReplicaContext` or an `ObjectStoreAllReduce`.

        `model` is for `LocalSGD`, which does not pass its weights to the manager: the replicas agree on the weights of
        `model` before the first step, and a late replica gets them. `min_replica_size` replicas are enough for a round;
        `quorum` has more settings.
        """
        replica = ReplicaAddress.of(store, rank, world_size, run_id, attempt)
        self.rank, self.world_size, self.run_id = replica.rank, replica.world_size, replica.run_id
        quorum = quorum or _quorum(min_replica_size, replica.world_size, timeout_s)
        tuning = tuning or Tuning(outlier_factor=None, retry_s=min(120.0, timeout_s / 2))

        def make_client(layouts: list[Layout]) -> RoundClient:
            return RoundClient(
                replica.store, replica.run_id, replica.rank, replica.world_size,
                layouts=layouts, attempt=replica.attempt, launch=replica.launch,
                rounds_of=replica.rounds_of, codec_name=codec, mean_codec=mean_codec, quorum=quorum, tuning=tuning,
                settings={"trainer": "torchft"},
            )  # fmt: skip

        self._rounds = TorchftRounds(replica.rank, make_client, snapshot_every, is_strict=quorum.is_strict)
        self._meter = RoundMeter(self._rounds, store if isinstance(store, ReplicaContext) else None)
        self._model, self._max_retries = model, max_retries
        self._fragments: dict[str, tuple[TorchftFragment, Callable[[Any], None], Callable[[], Any]]] = {}
        self._save_fns: dict[str, Callable[[], Any]] = {}
        self._works: list[Work] = []
        self._exchange: Future[CommittedRound] | None = None
        self._found: CommittedRound | None = None
        self._error: Exception | None = None
        self._is_behind = self._has_quorum = False
        self._failures = 0
        self._reading, self._is_stepping = threading.Lock(), False

    # ---- the interface for DiLoCo and LocalSGD

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Register a fragment of DiLoCo. Other state is only returned again by `_manager_state_dict`."""
        if key in self._save_fns:
            raise ConfigError(f"`{key}` is registered already: one manager serves one DiLoCo", reason="registered")
        if key.startswith(FRAGMENT_KEY):
            if self._rounds.is_joined:
                raise ConfigError("the manager is in use already: construct DiLoCo before the first optimizer step")
            self._fragments[key] = (fragment_behind(load_state_dict, key), load_state_dict, state_dict)
        self._save_fns[key] = state_dict

    def disallow_state_dict_read(self) -> None:
        """An inner step begins: start the exchange of the collected tensors, and lock the state against readers."""
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
        """Begin a round: clear the last error, and catch up if rounds were committed without this replica.

        Raises only `Fenced` and `ConfigError`, which a retry cannot repair.
        """
        with self._meter.waiting():
            self._settle()
            self._defer()
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
        """Does nothing: `start_quorum` has finished when it returns."""

    def current_step(self) -> int:
        """Committed steps; equal on all replicas of a round. Joins the run first: other replicas may be ahead."""
        self._join()
        return self._rounds.step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: object = None) -> Work:  # noqa: ARG002
        """Replace `tensor` by the mean over the participants; waiting for the work finishes it. Never raises or waits.

        `should_quantize` does nothing, as with torchft on CPU: `codec` is the encoding.
        """
        work = Work(tensor, self._settle)
        try:
            _check_reducible(tensor, reduce_op)
            if self._exchange is not None and tensor.numel():
                raise ConfigError("the exchange of the fragment has started without this tensor")
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
        """Whether the round succeeded; if so, the step advances. Raises `Fenced`, and after `max_retries` failures."""
        self._settle()
        if self._error is not None:
            self._defer()
            return self._refuse(self._error)
        found, self._found, self._failures = self._found, None, 0
        if found is not None:
            self._rounds.settle(found)
            self._meter.round_over()
        else:
            self._rounds.step += 1
            self._rounds.batches += self.num_participants()
        return True

    # ---- progress

    def log(self, **metrics: float) -> None:
        """Report metrics: `atoll status`, `top` and the live table show them with the step, bytes and waiting time."""
        self._meter.note(metrics)

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds of the rounds so far."""
        return self._rounds.client.counters if self._rounds.is_joined else Counters()

    @property
    def wait_share(self) -> float:
        """The share of the time so far that was spent in rounds instead of training."""
        return self._meter.wait_share

    @property
    def hidden_share(self) -> float:
        """The share of the exchange time so far during which the model trained: 0 without `fragment_sync_delay`."""
        return self._meter.hidden_share

    # ---- the rest of torchft's interface

    def errored(self) -> Exception | None:
        """The first error since `start_quorum`."""
        return self._error

    def report_error(self, e: Exception) -> None:
        """Make the next `should_commit` return False."""
        self._error = self._error or e
        log.warning("rank %d, step %d: %s", self.rank, self._rounds.step, e)

    def num_participants(self) -> int:
        """The number of participants of the last round; the world size before the first."""
        return len(self._rounds.ranks) or self.world_size

    def participating_rank(self) -> int | None:
        """This replica's index among the participants; None before the first quorum, or if it is not one of them."""
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
        """Set the counters. When this replica joins, the run's counters replace them if they are higher."""
        self._rounds.step, self._rounds.batches = state_dict["step"], state_dict["batches_committed"]

    def _manager_state_dict(self) -> dict[str, Any]:
        """The registered state and the counters. Waits while an inner step is in progress."""
        if not self._reading.acquire(timeout=_READ_TIMEOUT_S):
            raise TimeoutError("cannot read the state: an optimizer step has been in progress for a minute")
        try:
            return {"user": {key: save() for key, save in self._save_fns.items()}, "torchft": self.state_dict()}
        finally:
            self._reading.release()

    def shutdown(self, wait: bool = True, *, leave: bool = True) -> None:
        """Finish the exchange and end the thread. With `leave`, the others stop waiting for this replica."""
        if wait:
            self._settle()
            self._rounds.tidy()
        self._rounds.close(leave=leave, wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the replica may be restarted, so the others wait for it.
        self.shutdown(wait=kind is None, leave=kind is None)

    # ---- one round

    def _join(self, tensors: list[Tensor] | None = None) -> bool:
        """Join the run as soon as the exchanged tensors are known; whether this call joined."""
        if self._rounds.is_joined:
            return False
        if self._fragments:
            self._rounds.join(FragmentState(self._fragments))
        elif self._model is not None:
            self._rounds.join(WeightState.of_model(self._model))
        elif tensors is not None:
            # Without a model the live weights cannot be replaced: if others are ahead, this update started elsewhere.
            self._is_behind = self._rounds.join(WeightState.of_tensors(tensors))
        return self._rounds.is_joined

    def _has_all_tensors(self) -> bool:
        """Whether all tensors of the fragment were passed in, as far as that is known."""
        return self._rounds.is_joined and sum(w.tensor.numel() for w in self._works) == self._rounds.fragment_size

    def _begin(self) -> None:
        """Start the exchange of the collected tensors."""
        if self._exchange is not None or not self._works or self._error is not None:
            return
        tensors = [work.tensor for work in self._works]
        self._meter.trained()
        try:
            self._join(tensors)
            self._exchange = self._rounds.begin(flat(tensors), is_behind=self._is_behind)
        except Exception as exc:  # noqa: BLE001 - torchft does not handle an error here; should_commit returns False
            self.report_error(exc)
        self._is_behind = False

    def _settle(self) -> bool:
        """Finish the exchange: write the mean to the tensors and run the callbacks; whether it succeeded."""
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
            except Exception as exc:  # noqa: BLE001 - an error of the caller's callback
                self.report_error(exc)
        return self._error is None

    def _defer(self) -> None:
        """Keep a mean that torchft does not apply, but the others do, for the next `catch_up`."""
        if self._found is not None:
            self._rounds.defer(self._found)
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
"""The name that other tools import: a manager without servers."""


def _quorum(least: int | None, world_size: int, timeout_s: float) -> Quorum:
    """A quorum of all replicas, or of at least `least`."""
    return Quorum(None if least is None or least >= world_size else least, deadline_s=timeout_s)


def _check_reducible(tensor: Tensor, reduce_op: object) -> None:
    if not tensor.is_floating_point():
        raise ConfigError(f"only floating point tensors can be averaged, not {tensor.dtype}")
    if reduce_op is not None and reduce_op != ReduceOp.AVG:
        raise ConfigError(f"only the mean is supported, not {reduce_op}")


class ReplicaAddress(NamedTuple):
    """The store, the run and the rank of a torchft replica."""

    store: Store
    rank: int
    world_size: int
    run_id: str
    attempt: int
    launch: int = 1
    rounds_of: int | None = None

    @classmethod
    def of(
        cls,
        store: str | os.PathLike[str] | Store | ReplicaContext | ObjectStoreAllReduce,
        rank: int | None,
        world_size: int | None,
        run_id: str | None,
        attempt: int,
    ) -> ReplicaAddress:
        if isinstance(store, ReplicaContext):
            name, tried = run_id or store.run_id, attempt or store.attempt
            return cls(store.store, store.rank, store.world_size, name, tried, store.launch, store.rounds_of)
        from atoll.training.allreduce import ObjectStoreAllReduce

        if isinstance(store, ObjectStoreAllReduce):
            return cls(store.store, store.rank, store.world_size, run_id or store.round_id or "torchft", attempt)
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(
                f"rank={rank}, world_size={world_size}: both are needed, and the rank must be below the world size"
            )
        opened = open_store(store) if isinstance(store, str | os.PathLike) else store
        return cls(opened, rank, world_size, run_id or "torchft", attempt)


class RoundMeter:
    """Measures when the caller trains, that is, when it is not in the manager. For the caller's thread only."""

    def __init__(self, rounds: TorchftRounds, ctx: ReplicaContext | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._rounds, self._clock = rounds, clock
        self._progress = Progress(ctx, clock=clock) if ctx is not None else None
        self._began = self._trained_since = clock.monotonic()
        self._waited_s = self._reported_s = 0.0
        self._is_waiting = False

    @property
    def wait_share(self) -> float:
        """The share of the time so far that training waited."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    @property
    def hidden_share(self) -> float:
        """The share of the exchange time so far during which the model trained."""
        return self._rounds.client.hidden_share if self._rounds.is_joined else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting. May be nested."""
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
        """Count the time until now as training. Called before an exchange begins, so that it counts for that one."""
        if self._is_waiting:
            return
        now = self._clock.monotonic()
        if self._rounds.is_joined:
            self._rounds.client.mark(COMPUTE, self._trained_since, now)
        self._trained_since = now

    def note(self, metrics: dict[str, float]) -> None:
        """Report metrics to the live views."""
        if self._progress is not None:
            self._progress.note(self._rounds.step, metrics)

    def round_over(self) -> None:
        """Report a committed round to the live views."""
        if self._progress is None:
            return
        waited_s, self._reported_s = self._waited_s - self._reported_s, self._waited_s
        self._progress.round_over(self._rounds.step, waited_s, self._rounds.client)
