from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.errors import InvalidSpec
from atoll.kernels import NUMPY
from atoll.rounds.outer import OuterRule, outer_step, state_digest

single = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded_once(exact: Fraction) -> float:
    """The float32 nearest to an exact number, ties to even, by whole-number arithmetic."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator)) if size else 0
    while Fraction(2) ** exponent > size:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    steps, rest = divmod(size, unit)
    steps += 2 * rest > unit or (2 * rest == unit and steps % 2 == 1)
    value = float(steps * unit)
    return math.copysign(math.inf if value > float(np.finfo(np.float32).max) else value, exact)


@settings(max_examples=500)
@given(single, single, single)
@example(2.0**-24, 1.0, 1.0)
@example(1.0 + 2.0**-23, 2.0**-24, 1.0)
@example(2.0**-12 * (1 + 2.0**-23), 2.0**-12, 1.0)
@example(2.0**-100, 2.0**-40, 2.0**-149)
@example(2.0**-75, -(2.0**-75), 2.0**-149)
def test_the_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    got = np.float32([c])
    NUMPY.fma(np.float32([a]), np.float32(b), got, got)
    assert float(got[0]) == rounded_once(Fraction(a) * Fraction(b) + Fraction(c))


@pytest.mark.training
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.0), (0.1, 0.99)])
def test_the_step_is_that_of_torch_bit_for_bit(lr: float, momentum: float) -> None:
    import torch

    rule = OuterRule(lr=lr, momentum=momentum)
    for size in (1, 3, 8, 17, 33, 1000, 70_001):
        rng = np.random.default_rng(size)
        values = rng.standard_normal(size).astype(np.float32)
        buffer = np.zeros_like(values)
        parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
        optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0, foreach=False)
        for step in range(5):
            mean = (rng.standard_normal(size) * 0.01).astype(np.float32)
            parameter.grad = torch.from_numpy(mean.copy())
            optimizer.step()
            outer_step(rule, values, buffer, mean, is_first=step == 0)
        assert values.tobytes() == parameter.detach().numpy().tobytes()
        if momentum:
            assert buffer.tobytes() == optimizer.state[parameter]["momentum_buffer"].numpy().tobytes()


def test_separate_roundings_would_not_be_torchs() -> None:
    """Why the fused form is worth its trouble: the plain one differs."""
    rng = np.random.default_rng(0)
    values, mean = (rng.standard_normal(10_000).astype(np.float32) * np.float32(scale) for scale in (1, 0.01))
    plain = values - np.float32(0.7) * (mean + np.float32(0.9) * mean)
    fused, buffer = values.copy(), np.zeros_like(values)
    outer_step(OuterRule(), fused, buffer, mean, is_first=True)
    assert 0 < np.count_nonzero(plain != fused) < 1000


def test_averaging_takes_the_mean_as_it_is() -> None:
    values, mean = np.zeros(5, np.float32), np.float32([1, 2, 3, 4, 5])
    outer_step(OuterRule(kind="average", lr=1.0, momentum=0.0), values, None, mean, is_first=False)
    assert values.tobytes() == mean.tobytes()


def test_the_digest_of_a_state_tells_values_and_momentum_apart() -> None:
    a, b = np.float32([1, 2]), np.float32([3, 4])
    assert len({state_digest(a, b), state_digest(b, a), state_digest(a, None), state_digest(a, a)}) == 4


@pytest.mark.parametrize("bad", [{"kind": "adam"}, {"lr": 0.0}, {"lr": math.nan}, {"momentum": 1.0}])
def test_a_rule_that_makes_no_sense_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidSpec):
        OuterRule(**bad)


def test_a_rule_survives_json() -> None:
    assert OuterRule.from_json(OuterRule(lr=0.5).to_json()) == OuterRule(lr=0.5)
