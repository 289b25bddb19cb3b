"""Compare the compiled kernels with numpy, bit by bit, before the first of them is used. Pure.

`codec_blocks` compares the block codecs with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from atoll.rounds import kernels
from atoll.rounds.kernels import F32, NUMPY, Kernels

_SIZES = (33, 2048 + 259)  # a part of a block; a group, whole blocks and a part
FACTORS = (None, np.float32(0.3))
_HARD = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0xBF807FFF, 0x7F7FFFFF,
     0x7F7F7FFF, 0x7F7F8000, 0x7F7FFC00, 0x7F7F8001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF],
    np.uint32,
).view(np.float32)  # fmt: skip


def disagreement(theirs: Kernels) -> str | None:
    """The first operation that gives other bits than numpy's, or None."""
    with kernels.quiet():
        for values in samples():
            for name, is_same in _operations(theirs, values):
                if not is_same():
                    return f"{name} of {values.size} values"
    return None


def samples() -> Iterator[F32]:
    """Numbers of one size and of all sizes, ties, the smallest and the largest; then what is not finite among them."""
    rng = np.random.default_rng(0)
    for size in _SIZES:
        normal = rng.standard_normal(size, dtype=np.float32)
        yield normal
        yield np.round(normal * 8) * np.float32(0.5)
        yield normal * np.float32(2.0**-112)
        yield rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
        normal[:: max(1, size // 5)] = rng.choice(_HARD, normal[:: max(1, size // 5)].size)
        yield normal


def _operations(theirs: Kernels, values: F32) -> Iterator[tuple[str, Callable[[], bool]]]:
    yield "bf16", lambda: _same_bf16(theirs, values)
    yield "fma", lambda: _same_fma(theirs, values)


def _same_bf16(theirs: Kernels, values: F32) -> bool:
    bits, back = np.zeros((2, values.size), np.uint16), np.zeros((2, values.size), np.float32)
    sums = [addends(values.size) for _ in range(2)]
    for one, total, kernel in zip(range(2), sums, (theirs, NUMPY), strict=True):
        kernel.to_bf16(values, bits[one])
        kernel.from_bf16(bits[one], back[one])
        for factor in FACTORS:
            kernel.add_bf16(bits[one], total, factor)
    return bool(np.array_equal(*bits)) and same_numbers(*back) and same_numbers(*sums)


def _same_fma(theirs: Kernels, values: F32) -> bool:
    sums = [addends(values.size) for _ in range(2)]
    for total, kernel in zip(sums, (theirs, NUMPY), strict=True):
        kernel.fma(values, np.float32(0.9), total, total)
    return same_numbers(*sums)


def addends(size: int) -> F32:
    """Return the numbers to add to; the same for each call."""
    return np.random.default_rng(size).standard_normal(size, dtype=np.float32)


def same_numbers(ours: F32, theirs: F32) -> bool:
    """The same bits, where they are numbers: which NaN comes of two is for the processor to choose."""
    alike = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    return bool(alike.all())
