"""The outer step as training code says it: `Nesterov(lr, momentum)`, `Average()`, and the state such a step has.

The arithmetic itself is `atoll.rounds.outer`, in numpy, so that `atoll verify` computes the same bits again.

When fragments are exchanged and how a result that comes late meets weights that have moved on.

With F fragments, one of them begins its exchange every `inner_steps / F` optimizer steps, in turn, so that each is
exchanged every `inner_steps`. `delay` steps later its result is merged; until then training goes on.

`alpha` is that of the Streaming DiLoCo paper and of torchft's `fragment_update_alpha`: the part of the live weights
that is kept, `live = (1 - alpha) * agreed + alpha * live`. 0 takes the agreed weights and drops what was trained
during the delay; 1 keeps the live ones, and the agreed ones only count in the next update.

Eager: the moment an exchange begins, the own update stands in for the mean, `live = outer step(own update)`. When the
true mean comes, the difference it makes is added to the live weights; all that was trained meanwhile is kept.
Whatever the settings, the agreed state moves by agreed means only, and is the same bits on every replica.
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
    """Whether the step is no more than a mean."""
    return rule.kind == "average" or (rule.lr == 1.0 and rule.momentum == 0.0)


def default_codec(rule: OuterRule) -> str:
    """A mean of weights needs every bit of them; for a step along a mean update a byte for each value is enough."""
    return EXACT_CODEC if is_averaging(rule) else DEFAULT_CODEC


def agreed_rule(rule: OuterRule, codec_name: str) -> OuterRule:
    """The rule as replicas carry it out.

    Averaging exchanges the weights themselves where the codec keeps all bits, because `start - (start - now)` is not
    always `now`. A codec that rounds does less harm to the small differences than to the weights.
    """
    if is_averaging(rule):
        return OuterRule("average", 1.0, 0.0) if codec(codec_name).is_exact else _PLAIN
    return OuterRule(rule.kind, float(rule.lr), float(rule.momentum))


class OuterState:
    """The weights all replicas agree on, as one float32 vector, and the momentum of the outer step.

    Each fragment has its own outer step. From `averaged_from` on, a fragment holds buffers such as running statistics:
    they are averaged plainly.
    """

    def __init__(self, rule: OuterRule, values: F32, fragments: Sequence[slice], averaged_from: Sequence[int]) -> None:
        self.rule, self.values = rule, values
        self.momentum: F32 | None = np.zeros_like(values) if rule.kind == "nesterov" and rule.momentum > 0 else None
        self.started = [False] * len(fragments)
        """Whether a mean was ever applied to each fragment."""
        self._fragments, self._averaged_from = list(fragments), list(averaged_from)

    @property
    def digest(self) -> str:
        """Names the state; equal on every replica, or something is wrong."""
        return state_digest(self.values, self.momentum)

    def fragment(self, number: int) -> F32:
        """The values of one fragment."""
        return self.values[self._fragments[number]]

    def apply(self, number: int, mean: F32) -> None:
        """Take one outer step with one fragment."""
        for span, rule, buffer in self._halves(number):
            begins = span.start - self._fragments[number].start
            part = mean[begins : begins + span.stop - span.start]
            outer_step(rule, self.values[span], buffer, part, is_first=not self.started[number])
        self.started[number] = True

    def foresee(self, number: int, mean: F32, out: F32) -> None:
        """The values one fragment would have after `apply`; changes nothing."""
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
        """Become what `sections` gave."""
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
        """The weights of a fragment and its buffers, each with the step it takes and the momentum it has."""
        whole, middle = self._fragments[number], self._averaged_from[number]
        head, tail = slice(whole.start, middle), slice(middle, whole.stop)
        plain = self.rule if self.rule.kind == "average" else _PLAIN
        return [(head, self.rule, None if self.momentum is None else self.momentum[head]), (tail, plain, None)]


DEFAULT_ALPHA = 0.5
"""With a delay: half of each, as in the paper."""


@dataclass(frozen=True)
class Stream:
    """How exchanges overlap with training; agreed between replicas."""

    stride: int
    """Optimizer steps from the beginning of one exchange to that of the next."""
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
        """From the settings as given; None is what fits the others. Raises `InvalidSpec` with all that is wrong."""
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
        found.append(f"delay={delay}: a whole number from 0 to {most}, because one round is under way at a time")
    if alpha is not None and not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
        found.append(f"alpha={alpha}: from 0 (take the agreed weights) to 1 (keep the own)")
    if alpha == 0 and delay == inner_steps and fragments == 1 and not eager:
        found.append(f"alpha=0: with delay={delay}, all of inner_steps, whatever is trained would be dropped again")
    if eager and delay == 0:
        found.append("eager: with delay=0 nothing has to stand in for the mean")
    if eager and alpha is not None:
        found.append(f"alpha={alpha}: eager keeps all that was trained meanwhile, so there is nothing to mix")
    return found


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
