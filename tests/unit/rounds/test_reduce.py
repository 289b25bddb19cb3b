from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptUpdate
from atoll.rounds.codecs.base import codec, codec_names
from atoll.rounds.reduce import Accumulator, Coefficients, is_finite, weighted_mean

pytestmark = pytest.mark.usefixtures("each_kernel")

counts = st.integers(1, 9)


def contributions(seed: int, count: int, size: int = 257) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(size) * 10.0 ** rng.integers(-6, 3)).astype(np.float32) for _ in range(count)]


@given(st.integers(0, 1000), counts, st.booleans())
def test_the_mean_is_that_of_float64_within_float32_noise(seed: int, count: int, is_weighted: bool) -> None:
    each = contributions(seed, count)
    weights = (
        [float(w) for w in np.random.default_rng(seed).integers(1, 10**6, count)] if is_weighted else [3.0] * count
    )
    exact = sum(w * x.astype(np.float64) for w, x in zip(weights, each, strict=True)) / sum(weights)
    scale = sum(np.abs(x.astype(np.float64)) for x in each)
    assert np.all(np.abs(weighted_mean(each, weights) - exact) <= (count + 2) * 2.0**-24 * scale + 1e-38)


@given(counts)
def test_equal_weights_are_a_plain_sum_divided_once(count: int) -> None:
    each = contributions(7, count)
    total = each[0].copy()
    for values in each[1:]:
        total = total + values
    wanted = total / np.float32(count) if count > 1 else total
    assert weighted_mean(each, [81920.0] * count).tobytes() == wanted.tobytes()


def test_one_contribution_comes_back_bit_for_bit() -> None:
    values = contributions(3, 1)[0]
    assert weighted_mean([values], [17.0]).tobytes() == values.tobytes()


def test_two_equal_halves_are_what_sum_and_half_give() -> None:
    a, b = contributions(5, 2)
    assert weighted_mean([a, b], [1.0, 1.0]).tobytes() == ((a + b) * np.float32(0.5)).tobytes()


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_weights_that_cannot_be_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(CorruptUpdate):
        Coefficients.of(bad)


def test_a_missing_contribution_is_a_bug_that_shows() -> None:
    accumulator = Accumulator(3, Coefficients.of([1.0, 2.0]))
    accumulator.add(np.ones(3, np.float32))
    with pytest.raises(AssertionError):
        accumulator.mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
def test_what_is_not_finite_in_one_contribution_shows_in_the_mean(bad: float, weights: list[float]) -> None:
    for who in range(3):
        each = contributions(1, 3)
        each[who][100] = bad
        assert not is_finite(weighted_mean(each, weights))
    assert is_finite(weighted_mean(contributions(1, 3), weights))
    assert is_finite(np.empty(0, np.float32))


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("size", [0, 1, 257, 70_001])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [5.0]])
def test_adding_while_decoding_gives_the_same_bits(name: str, size: int, weights: list[float]) -> None:
    how, coefficients = codec(name), Coefficients.of(weights)
    room = np.full(size, np.nan, np.float32)
    plain, direct = Accumulator(size, coefficients), Accumulator(size, coefficients, room)
    for values in contributions(size, len(weights), size):
        payload = b"".join(how.encode(values))
        plain.add(how.decode(payload, size))
        direct.add_encoded(how, payload)
    assert direct.mean() is room
    plain.mean()  # asking twice divides once
    assert room.tobytes() == plain.mean().tobytes()


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("size", [0, 1, 2049, 300_001])
@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], [5.0]])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_of_contributions_give_the_same_bits(name: str, size: int, weights: list[float], window: int) -> None:
    how, coefficients = codec(name), Coefficients.of(weights)
    payloads = [b"".join(how.encode(values)) for values in contributions(size, len(weights), size)]
    one_by_one, in_windows = Accumulator(size, coefficients), Accumulator(size, coefficients)
    for payload in payloads:
        one_by_one.add_encoded(how, payload)
    for first in range(0, len(payloads), window):
        in_windows.add_all(how, payloads[first : first + window])
    wanted = one_by_one.mean().tobytes()
    assert in_windows.mean().tobytes() == wanted
    assert in_windows.mean().tobytes() == wanted, "asking twice divides once"


@pytest.mark.parametrize("name", codec_names())
def test_a_mix_of_ways_to_add_gives_the_same_bits(name: str) -> None:
    how, coefficients = codec(name), Coefficients.of([1.0] * 4)
    payloads = [b"".join(how.encode(values)) for values in contributions(9, 4, 70_001)]
    wanted, mixed = Accumulator(70_001, coefficients), Accumulator(70_001, coefficients)
    for payload in payloads:
        wanted.add_encoded(how, payload)
    mixed.add(how.decode(payloads[0], 70_001))
    mixed.add_all(how, payloads[1:3])
    mixed.add_encoded(how, payloads[3])
    assert mixed.mean().tobytes() == wanted.mean().tobytes()


def test_a_payload_of_the_wrong_length_is_refused_in_a_window() -> None:
    how = codec("fp32")
    accumulator = Accumulator(10, Coefficients.of([1.0, 1.0]))
    with pytest.raises(CorruptUpdate) as caught:
        accumulator.add_all(how, [bytes(40), bytes(36)])
    assert caught.value.check == "length"
