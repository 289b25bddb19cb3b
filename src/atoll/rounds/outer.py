"""The outer step: what every replica does with the mean of a round. Pure numpy, the same bits on every machine.

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
from numpy.typing import NDArray

from atoll.errors import InvalidSpec
from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.seal import digest

_TILE = 1 << 16  # elements worked on at once: the float64 tiles stay in the cache
_TAIL = np.uint64((1 << 29) - 1)  # what float64 has below the last bit of float32
_TIE = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class OuterRule:
    """Which outer step, and with what numbers. Part of what replicas agree on."""

    kind: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("nesterov", "average"):
            problems.append(f"kind={self.kind!r}: `nesterov` or `average`")
        if not (np.isfinite(self.lr) and self.lr > 0):
            problems.append(f"lr={self.lr}: above 0")
        if not 0 <= self.momentum < 1:
            problems.append(f"momentum={self.momentum}: from 0 to below 1")
        if problems:
            raise InvalidSpec("outer step", problems)

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


def fma(a: F32, b: np.float32, c: F32) -> F32:
    """`a * b + c` rounded once to float32, exactly as a fused multiply-add does."""
    wide = np.multiply(a, np.float64(b), dtype=np.float64)  # exact: 24 + 24 bits fit in 53
    total = wide + c
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result: F32 = total.astype(np.float32)
    # Rounding twice is wrong only where the first rounding made a tie, or where float32 has fewer bits to begin with.
    doubtful = ((total.view(np.uint64) & _TAIL) == _TIE) | (np.abs(total) < _SMALLEST_NORMAL)
    if doubtful.any():
        odd = _rounded_to_odd(wide[doubtful], c[doubtful].astype(np.float64), total[doubtful])
        with np.errstate(under="ignore"):
            result[doubtful] = odd.astype(np.float32)
    return result


def _step_tile(rule: OuterRule, values: F32, buffer: F32 | None, mean: F32, is_first: bool) -> None:
    if rule.kind == "average":
        values[:] = mean
        return
    step = mean
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if rule.momentum and buffer is not None:
            momentum = np.float32(rule.momentum)
            if is_first:
                buffer[:] = mean
            else:
                np.multiply(buffer, momentum, out=buffer)
                np.add(buffer, mean, out=buffer)
            step = fma(buffer, momentum, mean)
        values[:] = fma(step, np.float32(-np.float32(rule.lr)), values)


def _rounded_to_odd(
    product: NDArray[np.float64], addend: NDArray[np.float64], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The exact sum rounded to odd in float64: rounding that to float32 is rounding once."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64).copy()
    is_inexact_even = (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    bits += np.where(is_inexact_even, np.where(away_from_zero, 1, -1), 0)
    return bits.view(np.float64)
