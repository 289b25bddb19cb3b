"""Whether compiled kernels compute what numpy computes: asked once, before the first of them is used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from atoll.rounds import kernels
from atoll.rounds.codec import F32, codec
from atoll.rounds.codec_blocks import BlockCodec, PlainBlocks
from atoll.rounds.kernels import NUMPY, Kernels

_SIZES = (33, 2048 + 259)  # a part of a block; a group, whole blocks and a part
_FACTORS = (None, np.float32(0.3))
_HARD = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0xBF807FFF, 0x7F7FFFFF,
     0x7F7F7FFF, 0x7F7F8000, 0x7F7FFC00, 0x7F7F8001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF],
    np.uint32,
).view(np.float32)  # fmt: skip


def disagreement(theirs: Kernels) -> str | None:
    """The first operation that gives other bits than numpy's, or None."""
    with kernels.quiet():
        for values in _samples():
            for name, is_same in _operations(theirs, values):
                if not is_same():
                    return f"{name} of {values.size} values"
    return None


def _samples() -> Iterator[F32]:
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
    for name in ("int8", "int4"):
        how = codec(name)
        assert isinstance(how, BlockCodec)
        yield name, lambda how=how: _same_blocks(theirs, how, values)  # type: ignore[misc]


def _same_bf16(theirs: Kernels, values: F32) -> bool:
    bits, back = np.zeros((2, values.size), np.uint16), np.zeros((2, values.size), np.float32)
    sums = [_addends(values.size) for _ in range(2)]
    for one, total, kernel in zip(range(2), sums, (theirs, NUMPY), strict=True):
        kernel.to_bf16(values, bits[one])
        kernel.from_bf16(bits[one], back[one])
        for factor in _FACTORS:
            kernel.add_bf16(bits[one], total, factor)
    return bool(np.array_equal(*bits)) and _same(*back) and _same(*sums)


def _same_fma(theirs: Kernels, values: F32) -> bool:
    sums = [_addends(values.size) for _ in range(2)]
    for total, kernel in zip(sums, (theirs, NUMPY), strict=True):
        kernel.fma(values, np.float32(0.9), total, total)
    return _same(*sums)


def _same_blocks(theirs: Kernels, how: BlockCodec, values: F32) -> bool:
    size = values.size
    scales = np.zeros((2, how.blocks(size)), np.uint16)
    codes = np.zeros((2, how.code_bytes(size)), np.uint8)
    back = np.zeros((2, size), np.float32)
    sums = [_addends(size) for _ in range(2)]
    fast, plain = theirs.blocks(how.name, scales[0], codes[0]), PlainBlocks(how, scales[1], codes[1])
    assert fast is not None
    for one, total, kernel in zip(range(2), sums, (fast, plain), strict=True):
        kernel.write(0, values)
        kernel.read(0, back[one])
        for factor in _FACTORS:
            kernel.add(0, total, factor)
    return bool(np.array_equal(*scales) and np.array_equal(*codes)) and _same(*back) and _same(*sums)


def _addends(size: int) -> F32:
    return np.random.default_rng(size).standard_normal(size, dtype=np.float32)


def _same(ours: F32, theirs: F32) -> bool:
    """The same bits, where they are numbers: which NaN comes of two is for the processor to choose."""
    alike = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    return bool(alike.all())
