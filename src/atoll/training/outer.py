"""The outer step for training code: `Nesterov(lr, momentum)`, `Average()`, the state of the step, and its schedule.

The arithmetic is in `atoll.rounds.outer`, in numpy, so that `atoll verify` computes the same bits.

With F fragments, the exchange of one begins every `inner_steps / F` optimizer steps, in turn, so that each fragment is
exchanged every `inner_steps`. `delay` steps later its result is merged into the live weights; training goes on until
then. `alpha` is that of the Streaming DiLoCo paper and of torchft's `fragment_update_alpha`: the share of the live
weights that is kept, `live = (1 - alpha) * agreed + alpha * live`. With `eager`, the replica's own update replaces the
mean until the mean arrives: `live = outer step(own update)`; then the difference is added to the live weights, and all
training of the delay is kept. With any settings, only agreed means change the agreed state: it has the same bits on
every replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.errors import CorruptUpdate, InvalidSpec
from atoll.rounds.codecs import DEFAULT_CODEC, EXACT_CODEC
from atoll.rounds.codecs.base import F32, as_bytes, codec
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.stores.base import Buffer

_PLAIN = OuterRule("nesterov", 1.0, 0.0)
_TILE = 1 << 16


@dataclass(frozen=True)
class Nesterov(OuterRule):
    """SGD with Nesterov momentum on the mean update, as `torch.optim.SGD(nesterov=True)`. `momentum=0` is plain SGD."""

    kind: str = field(default="nesterov", init=False)
    lr: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Average(OuterRule):
    """The new weights are the mean of the replicas' weights: local SGD, FedAvg."""

    kind: str = field(default="average", init=False)
    lr: float = field(default=1.0, init=False)
    momentum: float = field(default=0.0, init=False)


def is_averaging(rule: OuterRule) -> bool:
    """Whether the outer step is a plain mean."""
    return rule.kind == "average" or (rule.lr == 1.0 and rule.momentum == 0.0)


def default_codec(rule: OuterRule) -> str:
    """The exact codec for a mean of weights; for a step along a mean update one byte for each value is enough."""
    return EXACT_CODEC if is_averaging(rule) else DEFAULT_CODEC


def agreed_rule(rule: OuterRule, codec_name: str) -> OuterRule:
    """The rule that the replicas agree on.

    With an exact codec, averaging exchanges the weights themselves, because `start - (start - now)` is not always
    `now`. With a rounding codec it exchanges differences: they are small, and so is their rounding error.
    """
    if is_averaging(rule):
        return OuterRule("average", 1.0, 0.0) if codec(codec_name).is_exact else _PLAIN
    return OuterRule(rule.kind, float(rule.lr), float(rule.momentum))


class OuterState:
    """The weights all replicas agree on, as one float32 vector, and the momentum of the outer step.

    Each fragment has its own outer step. From `averaged_from` on, a fragment has buffers such as running statistics,
    which are averaged plainly.
    """

    def __init__(self, rule: OuterRule, values: F32, fragments: Sequence[slice], averaged_from: Sequence[int]) -> None:
        self.rule, self.values = rule, values
        self.momentum: F32 | None = np.zeros_like(values) if rule.kind == "nesterov" and rule.momentum > 0 else None
        self.started = [False] * len(fragments)
        """For each fragment, whether a mean has been applied to it."""
        self._fragments, self._averaged_from = list(fragments), list(averaged_from)

    @property
    def digest(self) -> str:
        """The digest of the state; equal on every replica."""
        return state_digest(self.values, self.momentum)

    def fragment(self, number: int) -> F32:
        """The values of one fragment."""
        return self.values[self._fragments[number]]

    def apply(self, number: int, mean: F32) -> None:
        """Take one outer step of a fragment."""
        for span, rule, buffer in self._halves(number):
            begins = span.start - self._fragments[number].start
            part = mean[begins : begins + span.stop - span.start]
            outer_step(rule, self.values[span], buffer, part, is_first=not self.started[number])
        self.started[number] = True

    def predict(self, number: int, mean: F32, out: F32) -> None:
        """Write to `out` the values that a fragment would have after `apply`; the state does not change."""
        out[:] = self.fragment(number)
        for span, rule, buffer in self._halves(number):
            origin = self._fragments[number].start
            for start in range(span.start, span.stop, _TILE):
                tile = slice(start - origin, min(start + _TILE, span.stop) - origin)
                moved = None if buffer is None else buffer[start - span.start :][: tile.stop - tile.start].copy()
                outer_step(rule, out[tile], moved, mean[tile], is_first=not self.started[number])

    def sections(self) -> dict[str, Buffer]:
        """The state as named buffers for a snapshot; no copies."""
        named = {"values": self.values, "momentum": self.momentum}
        return {name: as_bytes(array) for name, array in named.items() if array is not None}

    def load(self, sections: Mapping[str, Buffer], started: Sequence[Any]) -> None:
        """Replace the state by what `sections` returned."""
        if len(started) != len(self.started):
            raise CorruptUpdate(f"{len(started)} fragments, not {len(self.started)}", check="layout")
        for name, array in (("values", self.values), ("momentum", self.momentum)):
            if array is None:
                continue
            found = np.frombuffer(sections.get(name, b""), dtype="<f4")
            if found.size != array.size:
                raise CorruptUpdate(f"`{name}` has {found.size} elements, not {array.size}", check="layout")
            array[:] = found
        self.started = [bool(flag) for flag in started]

    def _halves(self, number: int) -> list[tuple[slice, OuterRule, F32 | None]]:
        """The weights of a fragment and its buffers, each with its outer rule and its momentum."""
        whole, middle = self._fragments[number], self._averaged_from[number]
        head, tail = slice(whole.start, middle), slice(middle, whole.stop)
        plain = self.rule if self.rule.kind == "average" else _PLAIN
        return [(head, self.rule, None if self.momentum is None else self.momentum[head]), (tail, plain, None)]


DEFAULT_ALPHA = 0.5
"""The default with a delay: half agreed, half live weights, as in the paper."""


@dataclass(frozen=True)
class Stream:
    """How exchanges overlap with training; the same on every replica."""

    stride: int
    """Optimizer steps from the beginning of one exchange to the beginning of the next."""
    fragments: int
    delay: int
    alpha: float
    is_eager: bool

    @classmethod
    def of(
        cls,
        inner_steps: int,
        fragments: int = 1,
        delay: int | None = None,
        alpha: float | None = None,
        eager: bool = False,
    ) -> Stream:
        """From the user's settings; None stands for a default that fits the others. Raises `InvalidSpec`."""
        problems = list(_problems(inner_steps, fragments, delay, alpha, eager))
        if problems:
            raise InvalidSpec("DiLoCo", problems)
        stride = inner_steps // fragments
        wait = (stride if eager else 0) if delay is None else delay
        return cls(stride, fragments, wait, _alpha(alpha, wait, eager), eager)

    @property
    def is_settled(self) -> bool:
        """Whether the live weights are the agreed ones after every round."""
        return self.fragments == 1 and self.delay == 0 and self.alpha == 0

    def to_json(self) -> dict[str, Any]:
        return {"delay": self.delay, "alpha": self.alpha, "eager": self.is_eager}


def _alpha(alpha: float | None, delay: int, eager: bool) -> float:
    if alpha is not None:
        return float(alpha)
    return DEFAULT_ALPHA if delay and not eager else 0.0


def _problems(inner_steps: int, fragments: int, delay: int | None, alpha: float | None, eager: bool) -> list[str]:
    if not _is_whole(inner_steps, 1):
        return [f"inner_steps={inner_steps!r}: a whole number from 1"]
    if not _is_whole(fragments, 1):
        return [f"fragments={fragments!r}: a whole number from 1"]
    found = []
    stride, rest = divmod(inner_steps, fragments)
    if rest or not stride:
        found.append(f"fragments={fragments}: inner_steps={inner_steps} is not a multiple of it")
    elif delay is not None and not (_is_whole(delay, 0) and delay <= stride):
        most = f"inner_steps / fragments = {stride}"
        found.append(f"delay={delay}: a whole number from 0 to {most}, because one round is in progress at a time")
    if alpha is not None and not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
        found.append(f"alpha={alpha}: from 0 (take the agreed weights) to 1 (keep the live ones)")
    if alpha == 0 and delay == inner_steps and fragments == 1 and not eager:
        found.append(f"alpha=0: with delay={delay}, all of inner_steps, all training would be discarded")
    if eager and delay == 0:
        found.append("eager: needs a delay above 0, because without one the mean is applied at once")
    if eager and alpha is not None:
        found.append(f"alpha={alpha}: eager keeps all training of the delay, so alpha has no effect")
    return found


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
