"""numpy, torch and the compiled kernels compute the same bits: every codec, sums, outer steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll import kernels
from atoll.kernels import NUMPY, Kernels
from atoll.rounds.codecs.base import codec, codec_names
from atoll.rounds.outer import OuterRule, outer_step
from atoll.training.kernels import TorchKernels, install

EDGES = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F808000, 0x3F818000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x3F7FFFFF, 0x33800000, 0x00008000, 0x00018000], np.uint32,
).view(np.float32)  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = kernels.current()
    yield
    kernels.use(before)


@pytest.fixture(scope="module", params=["torch", "native"])
def other(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else request.getfixturevalue("native_kernels")


def any_finite(seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, size, dtype=np.uint32)
    bits[::5] &= np.uint32(0xFFFF8000)
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = 1
    values[::7] = rng.choice(EDGES, values[::7].size)
    return values


sizes = st.one_of(st.integers(0, 70), st.sampled_from([31743, 31744, 31745, 70_001]))


@given(seed=st.integers(0, 10**6), size=sizes)
def test_rounding_to_bf16_is_the_same(other: Kernels, seed: int, size: int) -> None:
    values, each = any_finite(seed, size), np.zeros((2, size), np.uint16)
    NUMPY.to_bf16(values, each[0])
    other.to_bf16(values, each[1])
    assert np.array_equal(*each)


@given(seed=st.integers(0, 10**6), size=sizes, b=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_fused_multiply_add_is_the_same(other: Kernels, seed: int, size: int, b: float) -> None:
    a, c, each = any_finite(seed, size), any_finite(seed + 1, size), np.zeros((2, size), np.float32)
    c[::2] = a[::2]
    NUMPY.fma(a, np.float32(b), c, each[0])
    other.fma(a, np.float32(b), c, each[1])
    assert each[0].tobytes() == each[1].tobytes()


def test_what_is_not_finite_stays_so_in_both(other: Kernels) -> None:
    every = np.arange(1 << 16, dtype=np.uint32)
    values = np.concatenate([(every << 16) | low for low in (0, 1, 0x8000, 0xFFFF)]).view(np.float32)
    values = values[~np.isfinite(values)]
    for kernel in (NUMPY, other):
        bits, back = np.empty(values.size, np.uint16), np.empty(values.size, np.float32)
        kernel.to_bf16(values, bits)
        kernels.from_bf16(bits, back)
        assert not np.isfinite(back).any()


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("size", [0, 1, 999, 300_001])
@pytest.mark.parametrize("factor", [None, np.float32(0.3)])
def test_codecs_and_sums_do_not_tell_who_computed(
    other: Kernels, name: str, size: int, factor: np.float32 | None
) -> None:
    how = codec(name)
    values = np.clip(any_finite(size, size), -how.largest, how.largest)
    small = (np.random.default_rng(size).standard_normal(size) * 1e-3).astype(np.float32)
    seen = []
    for kernel in (NUMPY, other):
        kernels.use(kernel)
        payloads = [b"".join(how.encode(each)) for each in (values, small)]
        total = how.decode(payloads[0], size).copy()
        how.add_into(payloads[1], total, factor)
        seen.append((payloads, total.tobytes()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("is_read_only", [False, True])
def test_outer_steps_do_not_tell_who_computed(other: Kernels, momentum: float, is_read_only: bool) -> None:
    seen = []
    for kernel in (NUMPY, other):
        kernels.use(kernel)
        rng = np.random.default_rng(5)
        values = rng.standard_normal(300_001).astype(np.float32)
        buffer = np.zeros_like(values)
        for step in range(3):
            mean = (rng.standard_normal(values.size) * 1e-2).astype(np.float32)
            mean.flags.writeable = not is_read_only
            outer_step(OuterRule(momentum=momentum), values, buffer, mean, is_first=step == 0)
        seen.append((values.tobytes(), buffer.tobytes()))
    assert seen[0] == seen[1]


def test_torch_is_used_once_it_is_installed_and_its_threads_are_left_alone() -> None:
    kernels.use(NUMPY)
    threads = torch.get_num_threads()
    assert install()
    assert kernels.current().name == "torch"
    assert torch.get_num_threads() == threads


def test_torch_does_not_take_the_place_of_compiled_kernels(native_kernels: Kernels) -> None:
    kernels.use(native_kernels)
    assert not install()
    assert kernels.current() is native_kernels


def test_a_torch_that_rounds_twice_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.training import kernels as ours

    def plain(self: object, a: np.ndarray, b: np.float32, c: np.ndarray, out: np.ndarray) -> None:
        with kernels.quiet():
            out[:] = a * b + c

    kernels.use(NUMPY)
    monkeypatch.setattr(TorchKernels, "fma", plain)
    ours._agrees_with_numpy.cache_clear()
    assert not install()
    assert kernels.current() is NUMPY
    ours._agrees_with_numpy.cache_clear()
