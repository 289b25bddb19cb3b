"""The outer step as training code says it: `Nesterov(lr, momentum)`, `Average()`, and the state such a step has.

The arithmetic itself is `atoll.rounds.outer`, in numpy, so that `atoll verify` computes the same bits again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from atoll.errors import CorruptUpdate
from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.stores.base import Buffer

_PLAIN = OuterRule("nesterov", 1.0, 0.0)


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
    """A mean of weights needs every bit of them; for a step along a mean update half the bits are enough."""
    return "fp32" if is_averaging(rule) else "bf16"


def agreed_rule(rule: OuterRule, codec: str) -> OuterRule:
    """The rule as replicas carry it out.

    Averaging exchanges the weights themselves where the codec keeps all bits, because `start - (start - now)` is not
    always `now`. A codec that rounds does less harm to the small differences than to the weights.
    """
    if is_averaging(rule):
        return OuterRule("average", 1.0, 0.0) if codec == "fp32" else _PLAIN
    return OuterRule(rule.kind, float(rule.lr), float(rule.momentum))


class OuterState:
    """The weights all replicas agree on, as one float32 vector, and the momentum of the outer step.

    From element `averaged_from` on the vector holds buffers such as running statistics: they are averaged plainly.
    """

    def __init__(self, rule: OuterRule, values: F32, averaged_from: int) -> None:
        self.rule, self.values = rule, values
        self.averaged_from = averaged_from
        self.momentum: F32 | None = np.zeros_like(values) if rule.kind == "nesterov" and rule.momentum > 0 else None
        self.has_stepped = False

    @property
    def digest(self) -> str:
        """Names the state; equal on every replica, or something is wrong."""
        return state_digest(self.values, self.momentum)

    def apply(self, mean: F32) -> None:
        """Take one outer step."""
        head, tail = slice(None, self.averaged_from), slice(self.averaged_from, None)
        momentum = None if self.momentum is None else self.momentum[head]
        outer_step(self.rule, self.values[head], momentum, mean[head], is_first=not self.has_stepped)
        rule = self.rule if self.rule.kind == "average" else _PLAIN
        outer_step(rule, self.values[tail], None, mean[tail], is_first=not self.has_stepped)
        self.has_stepped = True

    def sections(self) -> dict[str, Buffer]:
        """The state as named buffers for a snapshot; no copies."""
        named = {"values": self.values, "momentum": self.momentum}
        return {name: as_bytes(array) for name, array in named.items() if array is not None}

    def load(self, sections: Mapping[str, Buffer], *, has_stepped: bool) -> None:
        """Become what `sections` gave."""
        for name, array in (("values", self.values), ("momentum", self.momentum)):
            if array is None:
                continue
            found = np.frombuffer(sections.get(name, b""), dtype="<f4")
            if found.size != array.size:
                raise CorruptUpdate(f"`{name}` has {found.size} elements, not {array.size}", check="layout")
            array[:] = found
        self.has_stepped = has_stepped
