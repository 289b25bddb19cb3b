"""The outer step: what every replica does with the mean of a round. Pure, the same bits on every machine.

`nesterov` has the operations of `torch.optim.SGD(nesterov=True)` on CPU, in their order and with their rounding:

    buffer = momentum * buffer + mean        two roundings; the first time, buffer = mean
    step   = fma(buffer, momentum, mean)     one rounding: torch's `add(alpha=…)` is a fused multiply-add
    values = fma(step, -lr, values)          one rounding

with every operand float32, lr and momentum rounded to float32 first. Written with separate roundings instead, about
3 % of the values would differ from torch's in the last bit. `average` takes the mean itself as the new values: it is
for rounds that exchange weights, where no subtraction has lost anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from atoll import kernels
from atoll.rounds.codecs.base import F32, as_bytes
from atoll.rounds.frames import digest
from atoll.validation import Kind, check_fields, is_number, one_of

_TILE = 1 << 17  # elements worked on at once: what one operation leaves in the cache is there for the next


_KINDS = {
    "kind": Kind("`nesterov` or `average`", one_of("nesterov", "average")),
    "lr": Kind("a number above 0", lambda value: is_number(value) and value > 0),
    "momentum": Kind("a number from 0 to below 1", lambda value: is_number(value) and 0 <= value < 1),
}


@dataclass(frozen=True)
class OuterRule:
    """Which outer step, and with what numbers. Part of what replicas agree on."""

    kind: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OuterRule:
        return cls(str(data["kind"]), float(data["lr"]), float(data["momentum"]))


def outer_step(rule: OuterRule, values: F32, buffer: F32 | None, mean: F32, *, is_first: bool) -> None:
    """Apply one mean to `values` and `buffer`, in place. All are flat; `buffer` may be None without momentum.

    `is_first`: no mean was applied to these values before, so the buffer has nothing in it yet.
    """
    for start in range(0, values.size, _TILE):
        tile = slice(start, start + _TILE)
        _step_tile(rule, values[tile], None if buffer is None else buffer[tile], mean[tile], is_first)


def state_digest(values: F32, buffer: F32 | None) -> str:
    """XXH3-128 of the values and then of the momentum buffer, as little-endian float32: what an offer calls `base`."""
    parts = [values] if buffer is None else [values, buffer]
    return digest(*(as_bytes(np.ascontiguousarray(part, dtype="<f4")) for part in parts))


def _step_tile(rule: OuterRule, values: F32, buffer: F32 | None, mean: F32, is_first: bool) -> None:
    if rule.kind == "average":
        values[:] = mean
        return
    step = mean
    with kernels.quiet():
        if rule.momentum and buffer is not None:
            momentum = np.float32(rule.momentum)
            if is_first:
                buffer[:] = mean
            else:
                np.multiply(buffer, momentum, out=buffer)
                np.add(buffer, mean, out=buffer)
            step = kernels.scratch.values[: mean.size]
            kernels.current().fma(buffer, momentum, mean, step)
        kernels.current().fma(step, np.float32(-np.float32(rule.lr)), values, values)
