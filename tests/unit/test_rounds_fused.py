"""What is done tile by tile in one pass gives the bits of what is done plainly, one thing after the other."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.rounds import fused
from atoll.rounds.reduce import Coefficients, weighted_mean
from atoll.rounds.seal import checksum

SIZES = [1, 5, 4095, 4096, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 777]


def values_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([size, seed]).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", [(1.0,), (2.0, 2.0, 2.0), (1000.0, 1017.0, 3.5)])
def test_a_mean_in_one_pass_has_the_bits_and_checksums_of_the_plain_one(size: int, weights: tuple[float, ...]) -> None:
    parts = [values_of(size, seed) for seed in range(len(weights))]
    out = np.full(size, np.nan, np.float32)
    done = fused.average_and_check([part.data.cast("B") for part in parts], Coefficients.of(weights), out)
    plain = weighted_mean(parts, weights)
    assert out.tobytes() == plain.tobytes()
    assert done.checks == tuple(checksum(part.data.cast("B")) for part in parts)
    assert done.check == checksum(plain.data.cast("B"))
    assert done.is_finite


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 70_000, 99_999])
def test_one_value_that_is_not_finite_is_seen(bad: float, at: int) -> None:
    values = values_of(100_000)
    values[at] = bad
    out = np.empty_like(values)
    assert not fused.average_and_check([values.data.cast("B")], Coefficients.of([1.0]), out).is_finite
    assert not np.isfinite(fused.squares_and_check(values)[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e25])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_squares_keeps_four_digits_at_any_scale(size: int, scale: float) -> None:
    values = values_of(size) * np.float32(scale)
    square, check = fused.squares_and_check(values)
    assert square == pytest.approx(float(np.square(values.astype(np.float64)).sum()), rel=1e-4)
    assert check == checksum(values.data.cast("B"))


def test_what_is_copied_is_what_is_hashed() -> None:
    values = values_of(200_000)
    out = np.empty_like(values)
    assert fused.copy_and_check(values, out) == checksum(values.data.cast("B"))
    assert out.tobytes() == values.tobytes()
