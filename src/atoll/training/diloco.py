"""DiLoCo for any torch training loop: train alone for `inner_steps` optimizer steps, then meet the others in a round.

    with atoll.DiLoCo(model, inner, ctx, inner_steps=50) as outer:
        for batch in outer.steps(batches, rounds=100):
            loss = model(batch).loss; loss.backward(); inner.step(); inner.zero_grad()
            outer.log(loss=loss.item())

Without `steps`, call `outer.step()` at the end of every pass of your own loop. A round is held there, at a clean
boundary, never inside the optimizer: a hook only counts its steps, so gradient accumulation needs no setting.

After a round the live weights are the same bits on every replica. A replica that restarts takes up its checkpoint; in
a strict run it trains again what it had not saved and ends with the very bits of a run without the interruption.

The rules for the arguments of `atoll.DiLoCo`, which are checked before any of them is used.

What all replicas of a run must have in common, and which numbers make sense at all.

What a replica says about itself while it trains, for the live views: metrics, bytes, waiting, what was rejected.
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
from atoll.context import ReplicaContext, current, numbers
from atoll.errors import ConfigError, InvalidSpec
from atoll.rounds.client import RoundClient
from atoll.rounds.context import Tuning
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.io import Counters
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum, at_least
from atoll.rounds.tuning import CHUNK_MULTIPLE
from atoll.training import checkpoint, feedback
from atoll.training import model as buffer_policy
from atoll.training.checkpoint import Checkpoint, Checkpoints, load_outer, outer_state
from atoll.training.inner import Feed, InnerOptimizers, Stateful, StepCounter, elements
from atoll.training.loop import OuterLoop, StoppableClock
from atoll.training.model import BufferPolicy, ModelVector, refuse_strangers
from atoll.training.outer import Average, Nesterov, Stream, agreed_rule, default_codec
from atoll.validation import COUNT, SWITCH, Kind, a, is_count, is_number, is_whole, one_of


def check_arguments(called: str, given: Mapping[str, Any]) -> SimpleNamespace:
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
    "ctx": Kind("the `ctx` that your function is given, or None", a(ReplicaContext), may_be_none=True),
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
        "a mapping of names to things with `state_dict` and `load_state_dict`", _are_stateful, may_be_none=True
    ),
    "tuning": Kind("Tuning(…) or None", a(Tuning), may_be_none=True),
    "chunk": Kind(f"a multiple of {CHUNK_MULTIPLE} elements, or None", _is_chunk, may_be_none=True),
    "batches": Kind("something to iterate over, such as a DataLoader", _are_batches),
    "rounds": COUNT,
    "weigh": Kind("a function of a batch", callable),
}


log = logging.getLogger("atoll.training")
_STEP = "call `step()` of the optimizer that DiLoCo was given"
_HOLD = "iterate over `outer.steps(batches, rounds=…)`, or call `outer.step()` in your loop"


def agreed_settings(
    rule: OuterRule, inner_steps: int, stream: Stream, vector: ModelVector, quorum: Quorum
) -> dict[str, Any]:
    """What must be equal on every replica besides the layout."""
    settings: dict[str, Any] = {"outer": rule.to_json(), "inner_steps": inner_steps, "least": quorum.least}
    if not stream.is_settled:
        settings["stream"] = stream.to_json()
    places = list(zip(vector.averaged_from, vector.fragments, strict=True))
    if any(middle < whole.stop for middle, whole in places):
        tails = [middle - whole.start for middle, whole in places]
        settings["averaged_from"] = tails[0] if len(tails) == 1 else tails
    if frozen := vector.frozen_digest():
        settings["frozen_parameters"] = frozen
    return settings


def check_held(steps: int, inner_steps: int) -> None:
    """Raise `ConfigError` if training has gone on for so long that nobody can be holding rounds."""
    if steps >= 10 * inner_steps:
        raise ConfigError(f"{steps} optimizer steps without a round, inner_steps={inner_steps}", hint=_HOLD)


def check_trained(idle: int, inner_steps: int) -> None:
    """Raise `ConfigError` if so many passes of the loop had no optimizer step that it cannot be to add up gradients."""
    if idle >= max(1000, 10 * inner_steps):
        raise ConfigError(f"{idle} passes of the training loop without an optimizer step: no round is due", hint=_STEP)


def warn_of_no_round(begun: int, steps: int, stride: int) -> None:
    """A replica that leaves with what it trained, and never met the others, is told so."""
    if begun or not steps:
        return
    few = f"a round is due after {stride}" if steps < stride else _HOLD
    log.warning("%d optimizer steps and no round: no other replica has any of what was trained here; %s", steps, few)


_EVERY_S = 0.2


class Progress:
    """Collects metrics and passes them on now and then; always at the end of a round."""

    def __init__(self, ctx: ReplicaContext, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ctx, self._clock = ctx, clock
        self._began = clock.monotonic()
        self._waited_s = 0.0
        self._told_at = -_EVERY_S
        self.metrics: dict[str, float] = {}

    @property
    def wait_share(self) -> float:
        """The part of the time so far that went into rounds instead of training."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    def note(self, round_no: int, metrics: dict[str, float]) -> None:
        """New values; names that are not given keep theirs."""
        if "round_no" in metrics:
            raise InvalidSpec("log", ["round_no: a name that is taken: the round is told with every metric"])
        self.metrics.update(numbers(metrics))
        if self._clock.monotonic() - self._told_at >= _EVERY_S:
            self._tell(round_no)

    def waited(self, seconds: float) -> None:
        """So much time went into rounds instead of training."""
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
        self._tell(round_no)

    def _tell(self, round_no: int) -> None:
        self._told_at = self._clock.monotonic()
        self._ctx.log(round_no=round_no, **self.metrics)


Batch = TypeVar("Batch")
T = TypeVar("T")


class DiLoCo:
    """One replica's outer optimizer. Joins the run when it is made: the model has the agreed weights from then on.

    `inner_optimizer`: any torch optimizer, or a list of them that step together.
    `outer`: `Nesterov(lr, momentum)` or `Average()`.
    `codec`: how updates travel; by default `int8`, and `fp32` for plain averaging. `mean_codec`: how their mean does.
    `error_feedback`: whether what the codec rounds away is added to the next update; by default with `int4`.
    `fragments`, `delay`, `alpha`, `eager`: exchange a part of the model at a time, behind training; see
    `atoll.training.outer`.
    `quorum`: None for every replica in every round, a number of replicas, or a `Quorum`.
    `buffers`: `average` or `local`, see `atoll.training.model`.
    `checkpoint`: every so many rounds this replica saves everything it needs to go on; None for never.
    `snapshot`: every so many rounds one replica publishes the agreed state for those who come late.
    `stateful`: more to save with a checkpoint, such as `{"scheduler": scheduler}`.
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
        given = check_arguments(type(self).__name__, locals())
        self._stream = Stream.of(given.inner_steps, given.fragments, given.delay, given.alpha, given.eager)
        self._model, self._buffers = model, buffers
        self._inner = InnerOptimizers(inner_optimizer)
        refuse_strangers(model, self._inner)
        self.ctx = ctx or current()
        self.inner_steps = given.inner_steps
        self._quorum = at_least(given.quorum) if isinstance(given.quorum, int) else given.quorum or Quorum()
        self._every, self._snapshot_every = given.checkpoint, given.snapshot
        self._stateful = dict(stateful or {})
        self._clock = StoppableClock()
        self._pace = StepCounter(given.fragments)
        self._last_round: int | None = None
        self._feed: Feed[Any] | None = None
        self._saved: dict[str, Any] = {}
        self._checkpoints = Checkpoints(self.ctx.store, self.ctx.run_id, self.ctx.rank)
        self._progress = Progress(self.ctx)
        self._start(outer or Nesterov(), codec, error_feedback, mean_codec=mean_codec, tuning=tuning, chunk=given.chunk)

    def _start(self, rule: OuterRule, codec: str | None, error_feedback: bool | None, **options: Any) -> None:
        vector = ModelVector(self._model, self._buffers, self._stream.fragments)
        codec = codec or default_codec(rule)
        rule = agreed_rule(rule, codec)
        self._client = RoundClient(
            self.ctx.store, self.ctx.run_id, self.ctx.rank, self.ctx.world_size,
            layouts=vector.layouts, attempt=self.ctx.attempt, codec_name=codec, quorum=self._quorum, clock=self._clock,
            settings=agreed_settings(rule, self.inner_steps, self._stream, vector, self._quorum), **options,
        )  # fmt: skip
        is_fed_back = feedback.is_wanted(error_feedback, codec)
        owed = feedback.ErrorFeedback(codec, vector.fragments) if is_fed_back else None
        try:
            self._loop = OuterLoop(vector, rule, self._client, self._stream, owed, self._clock, rank=self.ctx.rank)
            self._resume()
        except BaseException:
            self._client.close()
            raise
        self._inner.on_step(self._count_step)
        self._training_since = self._held_since = self._clock.monotonic()

    # ---- what training code calls

    @property
    def round(self) -> int:
        """The round that is being trained for, or is under way, from 0; also the number of rounds that are over."""
        return self._loop.round_no

    @property
    def inner_step(self) -> int:
        """Optimizer steps since the start of the run, as every replica counts them: for learning-rate schedules."""
        return self._loop.begun * self._stream.stride + self._pace.since

    @property
    def digest(self) -> str:
        """Names the agreed state; the same on every replica after the same round."""
        return self._loop.digest

    @property
    def counters(self) -> Counters:
        """Requests, bytes and seconds of the rounds so far."""
        return self._client.counters

    @property
    def wait_share(self) -> float:
        """The part of the time so far that went into rounds instead of training."""
        return self._progress.wait_share

    @property
    def hidden_share(self) -> float:
        """The part of the time of all exchanges so far during which this replica trained."""
        return self._client.hidden_share

    def steps(
        self, batches: Iterable[Batch], *, rounds: int, weigh: Callable[[Batch], float] = elements
    ) -> Iterator[Batch]:
        """Batches until `rounds` rounds are over, counted from the start of the run; holds each round when it is due.

        `batches` is gone through again when it ends. `weigh` says what a batch counts in the weighted mean, its tokens
        for instance; by default the elements of its first tensor. At the end the model has the agreed weights.
        """
        given = check_arguments(f"{type(self).__name__}.steps", locals())
        return self._steps(batches, given.rounds, weigh)

    def _steps(self, batches: Iterable[Batch], rounds: int, weigh: Callable[[Batch], float]) -> Iterator[Batch]:
        self._last_round = rounds
        if self._loop.begun < rounds:
            self._feed = Feed(batches, self._saved.pop("data", None))
            if "rng" in self._saved:  # finding the place in the data drew random numbers
                checkpoint.restore(self._saved.pop("rng"))
        self._training_since = self._clock.monotonic()
        while self._loop.begun < rounds:
            assert self._feed is not None
            batch = next(self._feed)
            yield batch
            self.step(weigh(batch))
        self._drain()

    def step(self, weight: float | None = None) -> RoundOutcome | None:
        """The end of one pass of the training loop: begins a round and takes in its result when they are due.

        Returns the round that was taken in, if one was. `weight`, summed over what was trained of a fragment, is what
        this replica counts in the mean; without any, its optimizer steps. An error of a round in the background is
        raised here.
        """
        self._held_since = self._clock.monotonic()
        self._client.mark("compute", self._training_since, self._held_since)
        self._pace.boundary(weight or 0.0)
        check_trained(self._pace.idle, self.inner_steps)
        try:
            return self._boundary()
        finally:
            self._progress.waited(self._held_s())
            self._training_since = self._held_since

    def log(self, **metrics: float) -> None:
        """Say how it is going: shown by `atoll status`, `top` and the live table, with round, bytes and waiting."""
        self._progress.note(self.round, metrics)

    def save(self) -> None:
        """Write a checkpoint now. Only between rounds: after `step` has held one, before the next optimizer step."""
        if self._loop.flight is not None:
            message = "a checkpoint is made between rounds, and one is under way"
            raise ConfigError(message, reason="mid_round", hint="see `checkpoint=`")
        if self._pace.loose or (self._stream.is_settled and self._pace.since):
            raise ConfigError("a checkpoint is made between rounds, not in the middle of one", reason="mid_round")
        self._loop.rest()
        oldest = self._checkpoints.write(Checkpoint(self.round, self._client.position, self._state()))
        # The older of the two must stay usable, so rounds are kept from there on.
        self._client.acknowledge(oldest)

    def close(self, *, leave: bool = True) -> None:
        """Let go of the optimizer and the store. With `leave`, the others do not wait for this replica any more.

        A round under way is first brought to its end, and the model to the agreed weights; else it is given up.
        """
        self._inner.release()
        try:
            if leave:
                warn_of_no_round(self._loop.begun, self._pace.since, self._stream.stride)
                self._drain()
                self._loop.rest()
                self._client.leave()
        finally:
            self._loop.stop()
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error this replica may be started again, and is waited for.
        self.close(leave=kind is None)

    # ---- rounds

    def _count_step(self) -> None:
        self._pace.count()
        check_held(self._pace.since, self.inner_steps)

    def _boundary(self) -> RoundOutcome | None:
        self._or_undone(self._loop.check)
        outcome = None
        if self._loop.flight is not None and self._pace.since >= self._stream.delay:
            outcome = self._land()
        if self._begin_if_due() and (self._stream.delay == 0 or self._loop.begun == self._last_round):
            outcome = self._land()
        return outcome

    def _begin_if_due(self) -> bool:
        if self._pace.since < self._stream.stride:
            return False
        fragment = self._loop.fragment
        self._loop.begin(self._pace.weight(fragment))
        self._pace.begin(fragment)
        return True

    def _land(self) -> RoundOutcome | None:
        """Take in the round under way, and do all that is due after it."""
        outcome = self._or_undone(self._loop.land)
        self._heed(outcome)
        if self.round == self._last_round:
            self._loop.settle()
        self._tidy(outcome)
        self._progress.round_over(self.round, self._held_s(), self._client)
        return outcome

    def _or_undone(self, part: Callable[[], T]) -> T:
        """Do it; a round that fails on the way is due again."""
        begun = self._loop.begun
        try:
            return part()
        except Exception:
            if self._loop.begun < begun:
                self._pace.undo()
            raise

    def _held_s(self) -> float:
        """How long training was held up, told once."""
        began, self._held_since = self._held_since, self._clock.monotonic()
        return self._held_since - began

    def _drain(self) -> None:
        """Bring the round under way to its end, and the model to the agreed weights."""
        self._held_since = self._clock.monotonic()
        if self._loop.flight is not None:
            self._land()
        if not self._stream.is_settled:
            self._loop.settle()

    def _heed(self, outcome: RoundOutcome | None) -> None:
        """What it means for this replica that its update did or did not count."""
        if outcome is not None and outcome.is_included:
            return
        self._pace.forget(self._stream.stride)
        if outcome is None:
            return
        refused = next((r for r in outcome.commit.rejected if r.rank == self.ctx.rank), None)
        if refused is not None:
            log.warning("round %d went on without this replica: %s", outcome.round_no, refused.detail)
            if refused.check == "finite":
                self._inner.forget()
        elif not self._quorum.is_strict:
            log.warning("round %d went on without this replica: it came late", outcome.round_no)
            self._loop.catch_up()

    def _tidy(self, outcome: RoundOutcome | None) -> None:
        """Save, publish and delete what is due after a round."""
        is_last = self.round == self._last_round
        if self._every is not None and (is_last or self.round % self._every == 0):
            self.save()
        if not is_last and self.round % self._snapshot_every:
            return
        if self._every is None:
            self._loop.rest()
            self._client.acknowledge(self.round)
        # One of those who took part, another one each time; if it fails, the next snapshot is not far.
        ranks = outcome.ranks if outcome is not None else ()
        if ranks and ranks[self.round // self._snapshot_every % len(ranks)] == self.ctx.rank:
            self._loop.publish(then=self._client.retire)

    # ---- saving and going on

    def _state(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        return {
            **outer_state(self._loop),
            "pace": self._pace.state_dict(),
            "inner": self._inner.state_dicts(),
            "buffers": buffer_policy.local_buffers(self._model, self._buffers),
            "rng": checkpoint.capture(),
            "data": None if self._feed is None else self._feed.state_dict(),
            "stateful": {name: thing.state_dict() for name, thing in self._stateful.items()},
        }

    def _resume(self) -> None:
        """Go to where this replica, or the others, have come to."""
        saved = None if self._every is None else self._checkpoints.newest()
        if saved is not None:
            self._restore(saved)
            log.info("rank %d goes on from its checkpoint of round %d", self.ctx.rank, saved.round_no)
        if not self._can_train_again(saved):
            self._catch_up()
        # With a delay of the whole stride a checkpoint is made just before the next round begins.
        self._begin_if_due()

    def _catch_up(self) -> None:
        before = self.round
        self._loop.catch_up()
        if self.round > before:
            self._pace.restart()

    def _can_train_again(self, saved: Checkpoint | None) -> bool:
        """Whether the rounds since the checkpoint, or the start, are few and all there.

        A strict run has gone on by no more than what we did not save, and training that again gives the same bits.
        """
        if self._every is None or not self._quorum.is_strict:
            return False
        return saved is not None or self._client.latest().next_round <= self._every

    def _restore(self, saved: Checkpoint) -> None:
        state = saved.state
        if set(state["stateful"]) != set(self._stateful):
            raise ConfigError(f"the checkpoint has stateful={sorted(state['stateful'])}, here it is {self._stateful}")
        load_outer(self._loop, saved)
        self._pace.load_state_dict(state["pace"])
        self._inner.load_state_dicts(state["inner"])
        buffer_policy.restore(self._model, state["buffers"])
        for name, thing in self._stateful.items():
            thing.load_state_dict(state["stateful"][name])
        checkpoint.restore(state["rng"])
        self._saved = {"rng": state["rng"], **({} if state["data"] is None else {"data": state["data"]})}


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
