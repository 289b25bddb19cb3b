"""The outer step as training code says it: `Nesterov(lr, momentum)`, `Average()`, and the state such a step has.

The arithmetic itself is `atoll.rounds.outer`, in numpy, so that `atoll verify` computes the same bits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.errors import CorruptUpdate
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
