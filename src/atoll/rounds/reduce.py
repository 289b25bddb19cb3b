"""The weighted mean of updates, bit for bit the same wherever and in whatever order they arrived. Pure.

Contributions are summed in rank order in float32, every operation rounded on its own (no fused multiply-add):
equal weights give `((x0 + x1) + …) / n`; others give `((c0*x0) + c1*x1) + …` with `c = float32(w / sum of w)`,
the quotient taken in float64. Powers of two for n make both forms agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll import kernels
from atoll.errors import CorruptUpdate
from atoll.rounds.codecs.base import F32, Codec, Opened
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Coefficients:
    """What each contribution is multiplied with, or None when the sum is divided by `count` instead."""

    count: int
    factors: tuple[np.float32, ...] | None

    @classmethod
    def of(cls, weights: Sequence[float]) -> Coefficients:
        """From weights in rank order; each is finite and above zero."""
        if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
            raise CorruptUpdate(f"weights must be finite and above 0: {list(weights)}", check="weight")
        if len(set(weights)) == 1:
            return cls(len(weights), None)
        total = 0.0
        for weight in weights:
            total += float(weight)
        return cls(len(weights), tuple(np.float32(float(w) / total) for w in weights))


class Accumulator:
    """Takes contributions in rank order, one after the other, so that memory does not grow with their number."""

    def __init__(self, size: int, coefficients: Coefficients, out: F32 | None = None) -> None:
        """`out`: a contiguous array to sum up in, which is then what `mean` gives; its content is of no matter."""
        assert out is None or (out.shape == (size,) and out.flags.c_contiguous)
        self._sum: F32 = np.empty(size, dtype=np.float32) if out is None else out
        self._coefficients = coefficients
        self._taken = 0
        self._is_mean = False

    def add(self, values: F32) -> None:
        """The next contribution in rank order."""
        if self._taken:
            kernels.add(self._sum, values, self._factor)
        else:
            np.copyto(self._sum, values)
            self._scale_first()
        self._taken += 1

    def add_encoded(self, how: Codec, payload: Buffer) -> None:
        """The next contribution in rank order, added while it is decoded: the same bits as `add(how.decode(…))`."""
        if self._taken:
            how.add_into(payload, self._sum, self._factor)
        else:
            how.decode_into(payload, self._sum)
            self._scale_first()
        self._taken += 1

    def add_all(self, how: Codec, payloads: Sequence[Buffer]) -> None:
        """The next contributions in rank order, in one pass over memory: the same bits as `add_encoded` of each."""
        self.add_opened([how.open(payload, self._sum.size) for payload in payloads], how.tile)

    def add_opened(self, opened: Sequence[Opened], tile: int, done: Callable[[F32], None] | None = None) -> None:
        """The next contributions in rank order, tile by tile.

        Each sum stays in the cache until all of them are in it, and is divided there if they are the last; then `done`
        gets it.
        """
        is_last = self._taken + len(opened) == self._coefficients.count
        with kernels.quiet():
            for start in range(0, self._sum.size, tile):
                part = self._sum[start : start + tile]
                self._add_tiles(opened, start, part)
                if is_last:
                    self._divide(part)
                if done is not None:
                    done(part)
        self._taken += len(opened)
        self._is_mean = is_last

    def mean(self) -> F32:
        """The result, once every contribution is in."""
        assert self._taken == self._coefficients.count, "every contribution is added exactly once"
        if not self._is_mean:
            with kernels.quiet():
                self._divide(self._sum)
            self._is_mean = True
        return self._sum

    def _add_tiles(self, opened: Sequence[Opened], start: int, part: F32) -> None:
        factors = self._coefficients.factors
        so_far: F32 | None = part if self._taken else None
        for turn, contribution in enumerate(opened, self._taken):
            if so_far is part and (add := getattr(contribution, "add", None)) is not None:
                add(start, part, None if factors is None else factors[turn])
                continue
            room = part if so_far is None else kernels.scratch.values[: part.size]
            values = contribution.read(start, room)
            if factors is not None:
                values = np.multiply(values, factors[turn], room)
            so_far = values if so_far is None else np.add(so_far, values, part)
        if so_far is not part and so_far is not None:
            np.copyto(part, so_far)

    def _divide(self, part: F32) -> None:
        count = self._coefficients.count
        if self._coefficients.factors is not None or count == 1:
            return
        if count & (count - 1):
            np.divide(part, np.float32(count), part)
        else:  # the same bits, sooner
            np.multiply(part, np.float32(1 / count), part)

    @property
    def _factor(self) -> np.float32 | None:
        factors = self._coefficients.factors
        return None if factors is None else factors[self._taken]

    def _scale_first(self) -> None:
        if self._factor is not None:
            with kernels.quiet():
                np.multiply(self._sum, self._factor, out=self._sum)


def weighted_mean(contributions: Iterable[F32], weights: Sequence[float]) -> F32:
    """The mean of contributions given in rank order."""
    accumulator: Accumulator | None = None
    coefficients = Coefficients.of(weights)
    for values in contributions:
        accumulator = accumulator or Accumulator(values.size, coefficients)
        accumulator.add(values)
    assert accumulator is not None
    return accumulator.mean()


def is_finite(values: F32) -> bool:
    """No NaN and no infinity. A sum with either in it has either in it, so checking the mean checks all of it."""
    if values.size == 0:
        return True
    return bool(np.isfinite(values.max()) and np.isfinite(values.min()))
