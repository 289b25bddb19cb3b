"""DiLoCo for any torch training loop: train alone for `inner_steps` optimizer steps, then exchange updates in a round.

    with atoll.DiLoCo(model, inner, ctx, inner_steps=50) as outer:
        for batch in outer.steps(batches, rounds=100):
            loss = model(batch).loss; loss.backward(); inner.step(); inner.zero_grad()
            outer.log(loss=loss.item())

Without `steps`, call `outer.step()` at the end of every iteration of your own loop. Rounds run inside that call, never
inside the optimizer: a hook only counts optimizer steps, so gradient accumulation needs no setting.

After a round the live weights have the same bits on every replica. A replica that restarts continues from its
checkpoint; in a strict run it repeats the training it had not saved and gets the bits of an uninterrupted run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from atoll import validation
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import ReplicaContext, current, number_of_rounds, numbers
from atoll.errors import ConfigError, InvalidSpec
from atoll.rounds.client import RoundClient
from atoll.rounds.context import Tuning
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.io import Counters
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum, at_least
from atoll.rounds.tuning import CHUNK_MULTIPLE
from atoll.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    capture_rng,
    load_outer,
    outer_state,
    restore_rng,
)
from atoll.training.feedback import ErrorFeedback, is_wanted
from atoll.training.inner import Feed, InnerOptimizers, Stateful, StepCounter, elements
from atoll.training.loop import OuterLoop, StoppableClock
from atoll.training.model import BufferPolicy, ModelVector, check_optimizers, local_buffers, restore_buffers
from atoll.training.origin import load_origin
from atoll.training.outer import Average, Nesterov, Stream, agreed_rule, default_codec
from atoll.validation import COUNT, SWITCH, Kind, a, is_count, is_number, is_whole, one_of

log = logging.getLogger("atoll.training")
Batch = TypeVar("Batch")
T = TypeVar("T")

_CALL_STEP = "call `step()` of the optimizer that DiLoCo was given"
_RUN_ROUNDS = "iterate over `outer.steps(batches, rounds=…)`, or call `outer.step()` in your loop"
_REPORT_EVERY_S = 0.2


class DiLoCo:
    """One replica's outer optimizer. The constructor joins the run and gives the model the agreed weights.

    `inner_optimizer`: any torch optimizer, or a list of optimizers that step together.
    `outer`: `Nesterov(lr, momentum)` or `Average()`.
    `codec`: the encoding of updates; by default `int8`, and `fp32` for plain averaging. `mean_codec`: that of the mean.
    `error_feedback`: whether the rounding error of the codec is added to the next update; by default with `int4`.
    `fragments`, `delay`, `alpha`, `eager`: exchange one part of the model at a time, during training; see
    `atoll.training.outer`.
    `quorum`: None for every replica in every round, a number of replicas, or a `Quorum`.
    `buffers`: `average` or `local`, see `atoll.training.model`.
    `checkpoint`: rounds between two checkpoints of this replica; None for never.
    `snapshot`: rounds between two snapshots of the agreed state, from which late replicas start.
    `stateful`: further objects to save in a checkpoint, such as `{"scheduler": scheduler}`.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        ctx: ReplicaContext | None = None,
        *,
        inner_steps: int = 50,
        outer: OuterRule | None = None,
        codec: str | None = None,
        mean_codec: str | None = None,
        error_feedback: bool | None = None,
        fragments: int = 1,
        delay: int | None = None,
        alpha: float | None = None,
        eager: bool = False,
        quorum: Quorum | int | None = None,
        buffers: BufferPolicy = "average",
        checkpoint: int | None = 10,
        snapshot: int = 10,
        stateful: Mapping[str, Stateful] | None = None,
        tuning: Tuning | None = None,
        chunk: int | None = None,
    ) -> None:
        given = _checked(type(self).__name__, locals())
        self._stream = Stream.of(given.inner_steps, given.fragments, given.delay, given.alpha, given.eager)
        self._model, self._buffers = model, buffers
        self._inner = InnerOptimizers(inner_optimizer)
        check_optimizers(model, self._inner)
        self.ctx = ctx or current()
        self.inner_steps = given.inner_steps
        self._quorum = at_least(given.quorum) if isinstance(given.quorum, int) else given.quorum or Quorum()
        self._checkpoint_every, self._snapshot_every = given.checkpoint, given.snapshot
        self._stateful = dict(stateful or {})
        self._clock = StoppableClock()
        self._counter = StepCounter(given.fragments)
        self._last_round: int | None = None
        self._feed: Feed[Any] | None = None
        self._saved: dict[str, Any] = {}
        rounds_of = self.ctx.rounds_of or self.ctx.launch
        self._checkpoints = Checkpoints(self.ctx.store, self.ctx.run_id, self.ctx.rank, launch=rounds_of)
        self._progress = Progress(self.ctx)
        self._join(outer or Nesterov(), codec, error_feedback, mean_codec=mean_codec, tuning=tuning, chunk=given.chunk)

    # ---- join

    def _join(self, rule: OuterRule, codec: str | None, error_feedback: bool | None, **options: Any) -> None:
        vector = ModelVector(self._model, self._buffers, self._stream.fragments)
        if self.ctx.from_run is not None:
            load_origin(self.ctx, vector)
        codec = codec or default_codec(rule)
        rule = agreed_rule(rule, codec)
        self._client = RoundClient(
            self.ctx.store, self.ctx.run_id, self.ctx.rank, self.ctx.world_size,
            layouts=vector.layouts, attempt=self.ctx.attempt, launch=self.ctx.launch,
            rounds_of=self.ctx.rounds_of, codec_name=codec, quorum=self._quorum, clock=self._clock,
            settings=self._agreed_settings(rule, vector), **options,
        )  # fmt: skip
        residuals = ErrorFeedback(codec, vector.fragments) if is_wanted(error_feedback, codec) else None
        try:
            self._loop = OuterLoop(vector, rule, self._client, self._stream, residuals, self._clock, rank=self.ctx.rank)
            self._resume()
        except BaseException:
            self._client.close()
            raise
        self._inner.on_step(self._count_step)
        self._training_since = self._paused_since = self._clock.monotonic()

    def _agreed_settings(self, rule: OuterRule, vector: ModelVector) -> dict[str, Any]:
        """The settings, besides the layout, that must be equal on every replica."""
        settings: dict[str, Any] = {
            "outer": rule.to_json(),
            "inner_steps": self.inner_steps,
            "least": self._quorum.least,
        }
        if not self._stream.is_settled:
            settings["stream"] = self._stream.to_json()
        parts = list(zip(vector.averaged_from, vector.fragments, strict=True))
        if any(middle < whole.stop for middle, whole in parts):
            tails = [middle - whole.start for middle, whole in parts]
            settings["averaged_from"] = tails[0] if len(tails) == 1 else tails
        if frozen := vector.frozen_digest():
            settings["frozen_parameters"] = frozen
        return settings

    def _resume(self) -> None:
        """Continue from this replica's checkpoint, or from the round that the other replicas have reached."""
        saved = None if self._checkpoint_every is None else self._checkpoints.newest()
        if saved is not None:
            self._restore(saved)
            log.info("rank %d continues from its checkpoint of round %d", self.ctx.rank, saved.round_no)
        if not self._can_repeat_training(saved):
            before = self.round
            self._loop.catch_up()
            if self.round > before:
                self._counter.restart()
        # If the delay is the whole stride, a checkpoint is written just before the next round begins.
        self._begin_if_due()

    def _can_repeat_training(self, saved: Checkpoint | None) -> bool:
        """Whether the rounds since the checkpoint, or since the start, are few and all in the store.

        A strict run has advanced only by the rounds that this replica did not save; training them again gives the same
        bits.
        """
        if self._checkpoint_every is None or not self._quorum.is_strict:
            return False
        return saved is not None or self._client.latest().next_round <= self._checkpoint_every

    # ---- progress

    @property
    def round(self) -> int:
        """The round that is trained for or in progress, from 0; also the number of finished rounds."""
        return self._loop.round_no

    @property
    def inner_step(self) -> int:
        """Optimizer steps since the start of the run, as every replica counts them: for learning-rate schedules."""
        return self._loop.begun * self._stream.stride + self._counter.since

    @property
    def digest(self) -> str:
        """The digest of the agreed state; equal on every replica after the same round."""
        return self._loop.digest

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds of the rounds so far."""
        return self._client.counters

    @property
    def wait_share(self) -> float:
        """The share of the time so far that was spent in rounds instead of training."""
        return self._progress.wait_share

    @property
    def hidden_share(self) -> float:
        """The share of the exchange time so far during which this replica trained."""
        return self._client.hidden_share

    def log(self, **metrics: float) -> None:
        """Report metrics: `atoll status`, `top` and the live table show them with the round, bytes and waiting time."""
        self._progress.note(self.round, metrics)

    # ---- steps

    def steps(
        self, batches: Iterable[Batch], *, rounds: int, weigh: Callable[[Batch], float] = elements
    ) -> Iterator[Batch]:
        """Yield batches until `rounds` rounds are finished, counted from the start of the run; run each round when due.

        `batches` is iterated again when it ends. `weigh` returns the weight of a batch in the weighted mean, for
        instance its tokens; by default the elements of its first tensor. At the end the model has the agreed weights.
        """
        given = _checked(f"{type(self).__name__}.steps", locals())
        return self._steps(batches, given.rounds, weigh)

    def _steps(self, batches: Iterable[Batch], rounds: int, weigh: Callable[[Batch], float]) -> Iterator[Batch]:
        self._last_round = rounds
        self._progress.begin(self.round, rounds)
        if self._loop.begun < rounds:
            self._feed = Feed(batches, self._saved.pop("data", None))
            if "rng" in self._saved:  # the feed drew random numbers while it skipped batches
                restore_rng(self._saved.pop("rng"))
        self._training_since = self._clock.monotonic()
        while self._loop.begun < rounds:
            assert self._feed is not None
            batch = next(self._feed)
            yield batch
            self.step(weigh(batch))
        self._drain()

    def step(self, weight: float | None = None) -> RoundOutcome | None:
        """End one iteration of the training loop: begin a round, or apply the result of one, when it is due.

        Returns the round that was applied, if any. `weight`, summed over the iterations since a fragment's last
        exchange, is the weight of this replica in the mean; without it, the number of optimizer steps. Raises the error
        of a round in the background.
        """
        self._paused_since = self._clock.monotonic()
        self._client.mark("compute", self._training_since, self._paused_since)
        self._counter.boundary(weight or 0.0)
        if self._counter.idle >= max(1000, 10 * self.inner_steps):
            message = f"{self._counter.idle} iterations of the training loop without an optimizer step: no round is due"
            raise ConfigError(message, hint=_CALL_STEP)
        try:
            self._undo_on_error(self._loop.check)
            outcome = None
            if self._loop.pending is not None and self._counter.since >= self._stream.delay:
                outcome = self._finish_round()
            if self._begin_if_due() and (self._stream.delay == 0 or self._loop.begun == self._last_round):
                outcome = self._finish_round()
            return outcome
        finally:
            self._progress.waited(self._take_pause_s())
            self._training_since = self._paused_since

    def _count_step(self) -> None:
        self._counter.count()
        if self._counter.since >= 10 * self.inner_steps:
            message = f"{self._counter.since} optimizer steps without a round, inner_steps={self.inner_steps}"
            raise ConfigError(message, hint=_RUN_ROUNDS)

    # ---- one round

    def _begin_if_due(self) -> bool:
        if self._counter.since < self._stream.stride:
            return False
        fragment = self._loop.fragment
        self._loop.begin(self._counter.weight(fragment))
        self._counter.begin(fragment)
        return True

    def _finish_round(self) -> RoundOutcome | None:
        """Wait for the round in progress, apply its result, then save and publish what is due."""
        outcome = self._undo_on_error(self._loop.finish)
        if outcome is None or not outcome.is_included:
            self._handle_exclusion(outcome)
        if self.round == self._last_round:
            self._loop.settle()
        self._save_and_publish(outcome)
        self._progress.round_over(self.round, self._take_pause_s(), self._client)
        return outcome

    def _drain(self) -> None:
        """Finish the round in progress and give the model the agreed weights."""
        self._paused_since = self._clock.monotonic()
        if self._loop.pending is not None:
            self._finish_round()
        if not self._stream.is_settled:
            self._loop.settle()

    def _undo_on_error(self, action: Callable[[], T]) -> T:
        """Call the action. If it raises and the round in progress failed, that round is due again."""
        begun = self._loop.begun
        try:
            return action()
        except Exception:
            if self._loop.begun < begun:
                self._counter.undo()
            raise

    def _take_pause_s(self) -> float:
        """The seconds that training has been paused since the last call."""
        began, self._paused_since = self._paused_since, self._clock.monotonic()
        return self._paused_since - began

    def _handle_exclusion(self, outcome: RoundOutcome | None) -> None:
        """Discard the training that the round did not include. None: the round is gone, and the loop has caught up."""
        self._counter.forget(self._stream.stride)
        if outcome is None:
            return
        refused = next((r for r in outcome.commit.rejected if r.rank == self.ctx.rank), None)
        if refused is not None:
            log.warning("round %d rejected the update of this replica: %s", outcome.round_no, refused.detail)
            if refused.check == "finite":
                self._inner.forget()
        elif not self._quorum.is_strict:
            log.warning("round %d was committed without this replica, whose update was late", outcome.round_no)
            self._loop.catch_up()

    def _save_and_publish(self, outcome: RoundOutcome | None) -> None:
        """Write the checkpoint and the snapshot that are due after a round, and delete old rounds."""
        is_last = self.round == self._last_round
        if self._checkpoint_every is not None and (is_last or self.round % self._checkpoint_every == 0):
            self.save()
        if not is_last and self.round % self._snapshot_every:
            return
        if self._checkpoint_every is None:
            self._loop.wait_for_tasks()
            self._client.acknowledge(self.round)
        # The participants take turns in writing snapshots; if one fails, the next snapshot follows soon.
        ranks = outcome.ranks if outcome is not None else ()
        if ranks and ranks[self.round // self._snapshot_every % len(ranks)] == self.ctx.rank:
            self._loop.publish(then=self._client.retire)

    # ---- checkpoints

    def save(self) -> None:
        """Write a checkpoint now. Only between rounds: after `step` finished one, before the next optimizer step."""
        if self._loop.pending is not None:
            message = "a checkpoint can be written only between rounds, and a round is in progress"
            raise ConfigError(message, reason="mid_round", hint="see `checkpoint=`")
        if self._counter.unclaimed or (self._stream.is_settled and self._counter.since):
            message = "a checkpoint can be written only between rounds, before the next optimizer step"
            raise ConfigError(message, reason="mid_round")
        self._loop.wait_for_tasks()
        oldest = self._checkpoints.write(Checkpoint(self.round, self._client.position, self._state()))
        # The older of the two checkpoints must stay usable, so the store keeps the rounds since then.
        self._client.acknowledge(oldest)

    def _state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {
            **outer_state(self._loop),
            "pace": self._counter.state_dict(),
            "inner": self._inner.state_dicts(),
            "buffers": local_buffers(self._model, self._buffers),
            "rng": capture_rng(),
            "data": None if self._feed is None else self._feed.state_dict(),
            "stateful": {name: thing.state_dict() for name, thing in self._stateful.items()},
        }

    def _restore(self, saved: Checkpoint) -> None:
        state = saved.state
        if set(state["stateful"]) != set(self._stateful):
            names = sorted(state["stateful"]), sorted(self._stateful)
            raise ConfigError(f"the checkpoint has stateful={names[0]}, this replica has {names[1]}")
        load_outer(self._loop, saved)
        self._counter.load_state_dict(state["pace"])
        self._inner.load_state_dicts(state["inner"])
        restore_buffers(self._model, state["buffers"])
        for name, thing in self._stateful.items():
            thing.load_state_dict(state["stateful"][name])
        restore_rng(state["rng"])
        self._saved = {"rng": state["rng"], **({} if state["data"] is None else {"data": state["data"]})}

    # ---- the end

    def close(self, *, leave: bool = True) -> None:
        """Release the optimizer and the store. With `leave`, the other replicas no longer wait for this one.

        With `leave`, the round in progress is finished first and the model gets the agreed weights; without, the round
        is cancelled.
        """
        self._inner.release()
        try:
            if leave:
                self._warn_if_no_round()
                self._drain()
                self._loop.wait_for_tasks()
                self._client.leave()
        finally:
            self._loop.stop()
            self._client.close()

    def _warn_if_no_round(self) -> None:
        steps, stride = self._counter.since, self._stream.stride
        if steps and not self._loop.begun:
            hint = f"a round is due after {stride}" if steps < stride else _RUN_ROUNDS
            log.warning("%d optimizer steps and no round: no other replica has this training; %s", steps, hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the replica may be restarted, so the others wait for it.
        self.close(leave=kind is None)


class LocalSGD(DiLoCo):
    """Plain averaging of weights every `inner_steps` steps: `DiLoCo` with `outer=Average()`."""

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        ctx: ReplicaContext | None = None,
        **options: Any,
    ) -> None:
        if "outer" in options:
            raise ConfigError("outer: LocalSGD always has Average()", hint="for another outer step use `DiLoCo`")
        super().__init__(model, inner_optimizer, ctx, outer=Average(), **options)


class Progress:
    """The metrics of one replica for the live views; reported at most every 0.2 s, and at the end of each round."""

    def __init__(self, ctx: ReplicaContext, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ctx, self._clock = ctx, clock
        self._began = clock.monotonic()
        self._waited_s = 0.0
        self._reported_at = -_REPORT_EVERY_S
        self._rounds_total: int | None = None
        self.metrics: dict[str, float] = {}

    @property
    def wait_share(self) -> float:
        """The share of the time so far that was spent in rounds instead of training."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    def begin(self, round_no: int, rounds_total: int) -> None:
        """Training begins or continues at `round_no`; from here on every report has the number of rounds."""
        self._rounds_total = rounds_total
        self._report(round_no)

    def note(self, round_no: int, metrics: dict[str, float]) -> None:
        """Set new values; other metrics keep theirs. `rounds_total` is no metric but the number of rounds."""
        if "round_no" in metrics:
            raise InvalidSpec("log", ["round_no: this name is reserved; every report has the round already"])
        given = dict(metrics)
        self._rounds_total = number_of_rounds(given.pop("rounds_total", None)) or self._rounds_total
        self.metrics.update(numbers(given))
        if self._clock.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._report(round_no)

    def waited(self, seconds: float) -> None:
        """Add time that was spent in rounds instead of training."""
        self._waited_s += seconds

    def round_over(self, round_no: int, waited_s: float, client: RoundClient) -> None:
        self.waited(waited_s)
        used = client.counters
        self.metrics |= {
            "hidden_share": client.hidden_share,
            "wait_share": self.wait_share,
            "bytes": float(used.bytes_up + used.bytes_down),
            "bytes_up": float(used.bytes_up),
            "bytes_down": float(used.bytes_down),
        }
        if client.rejections:
            self.metrics["updates_rejected"] = float(client.rejections)
        self._report(round_no)

    def _report(self, round_no: int) -> None:
        self._reported_at = self._clock.monotonic()
        self._ctx.log(round_no=round_no, rounds_total=self._rounds_total, **self.metrics)


# ---- the rules for arguments


def _checked(called: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a method of `DiLoCo`, checked and with plain numbers; `given` is its `locals()`."""
    is_swapped = isinstance(given.get("model"), Optimizer) and isinstance(given.get("inner_optimizer"), nn.Module)
    hint = f"the model comes first: `{called}(model, inner_optimizer, …)`" if is_swapped else None
    return SimpleNamespace(**validation.check_arguments(called, given, _KINDS, hint))


def _is_quorum(value: object) -> bool:
    return is_whole(value) or isinstance(value, Quorum)


def _is_chunk(value: Any) -> bool:
    return is_count(value) and bool(value % CHUNK_MULTIPLE == 0)


def _are_batches(value: object) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _are_optimizers(value: object) -> bool:
    if isinstance(value, Sequence):
        return bool(value) and all(isinstance(one, Optimizer) for one in value)
    return isinstance(value, Optimizer) or (isinstance(value, Iterable) and not isinstance(value, nn.Module | Mapping))


def _are_stateful(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, Stateful) for name, one in value.items()
    )


_CODEC = Kind("the name of a codec, or None", a(str), may_be_none=True)
_KINDS: dict[str, Kind] = {
    "model": Kind("a torch model (`nn.Module`)", a(nn.Module)),
    "inner_optimizer": Kind("a torch optimizer, or a list of them", _are_optimizers),
    "ctx": Kind("the `ctx` argument of your function, or None", a(ReplicaContext), may_be_none=True),
    "inner_steps": COUNT,
    "outer": Kind("Nesterov(…), Average() or None", a(OuterRule), may_be_none=True),
    "codec": _CODEC,
    "mean_codec": _CODEC,
    "error_feedback": Kind("True, False or None", a(bool), may_be_none=True),
    "fragments": COUNT,
    "delay": Kind("a whole number of steps, or None", is_whole, may_be_none=True),
    "alpha": Kind("a number from 0 to 1, or None", is_number, may_be_none=True),
    "eager": SWITCH,
    "quorum": Kind("a number of replicas, Quorum(…), or None for all of them", _is_quorum, may_be_none=True),
    "buffers": Kind("`average` or `local`", one_of("average", "local")),
    "checkpoint": Kind("a whole number from 1, or None for never", is_count, may_be_none=True),
    "snapshot": COUNT,
    "stateful": Kind(
        "a mapping of names to objects with `state_dict` and `load_state_dict`", _are_stateful, may_be_none=True
    ),
    "tuning": Kind("Tuning(…) or None", a(Tuning), may_be_none=True),
    "chunk": Kind(f"a multiple of {CHUNK_MULTIPLE} elements, or None", _is_chunk, may_be_none=True),
    "batches": Kind("something to iterate over, such as a DataLoader", _are_batches),
    "rounds": COUNT,
    "weigh": Kind("a function of a batch", callable),
}
