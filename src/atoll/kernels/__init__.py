"""Arithmetic on large float32 arrays, for codecs, sums and outer steps.

`current()` is the fastest implementation: `native` where a C compiler was present when Atoll was installed, else
numpy, in tiles that fit the cache. `training.kernels` gives torch's implementation to `use`. All of them compute the
same bits.
"""

from __future__ import annotations

from threading import local
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
U16: TypeAlias = NDArray[np.uint16]
U8: TypeAlias = NDArray[np.uint8]

TILE = 1 << 18
"""Values in a tile; a multiple of every codec's block."""

_PAGE = 4096
_TAIL = np.uint64((1 << 29) - 1)  # the bits of a float64 below the last bit of a float32
_TIE = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126
_FMA_TILE = 1 << 15  # small, because fma has many float64 intermediates


class BlockKernel(Protocol):
    """Writes and reads one payload of a block codec: scales (bfloat16 bits) and codes. See `codecs.blocks`.

    `start` and the number of values are multiples of 2048, except that the last values may be fewer.
    """

    def write(self, start: int, values: F32) -> None: ...

    def read(self, start: int, out: F32) -> None: ...

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        """As `Codec.add_into`."""
        ...


class Kernels(Protocol):
    """The operations that have several implementations. Arrays are contiguous and of any length."""

    name: str
    tile: int
    """How many values to pass in one call for the best speed."""

    def to_bf16(self, values: F32, out: U16) -> None:
        """The bfloat16 bit patterns nearest to the values, ties to even. A NaN becomes a NaN."""
        ...

    def from_bf16(self, bits: U16, out: F32) -> None:
        """The float32 values of bfloat16 bit patterns; exact."""
        ...

    def add_bf16(self, bits: U16, total: F32, factor: np.float32 | None = None) -> None:
        """`total += values`, or `total += factor * values` with both operations rounded."""
        ...

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        """`out = a * b + c` rounded once. `out` may be `a` or `c`."""
        ...

    def blocks(self, codec: str, scales: U16, codes: U8) -> BlockKernel | None:
        """A kernel that is faster than the codec's own numpy code, or None."""
        ...


class NumpyKernels:
    """Every operation with numpy alone."""

    name = "numpy"
    tile = TILE

    def to_bf16(self, values: F32, out: U16) -> None:
        for start in range(0, values.size, TILE):
            _to_bf16_tile(values[start : start + TILE], out[start : start + TILE])

    def from_bf16(self, bits: U16, out: F32) -> None:
        from_bf16(bits, out)

    def add_bf16(self, bits: U16, total: F32, factor: np.float32 | None = None) -> None:
        for start in range(0, total.size, TILE):
            part = total[start : start + TILE]
            values = scratch.values[: part.size]
            from_bf16(bits[start : start + TILE], values)
            add(part, values, factor)

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        for start in range(0, a.size, _FMA_TILE):
            tile = slice(start, start + _FMA_TILE)
            out[tile] = _fma_tile(a[tile], b, c[tile])

    def blocks(self, codec: str, scales: U16, codes: U8) -> BlockKernel | None:  # noqa: ARG002
        return None


def aligned(count: int, dtype: type[Any] = np.float32) -> NDArray[Any]:
    """An array that begins at a page: the kernel copies to it twice as fast as to malloc's usual address."""
    item_bytes = np.dtype(dtype).itemsize
    memory = np.empty(count * item_bytes + _PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + count * item_bytes].view(dtype)


class _Scratch(local):
    """Two tiles of memory for each thread: `values` for callers, `more` for this module."""

    def __init__(self) -> None:
        self.values: F32 = aligned(TILE)
        self.more: F32 = aligned(TILE)


scratch = _Scratch()
NUMPY = NumpyKernels()
_current: Kernels | None = None


def current() -> Kernels:
    """The kernels in use: those given to `use`, otherwise the fastest without torch."""
    global _current
    if _current is None:
        _current = _fastest()
    return _current


def use(kernels: Kernels) -> None:
    """Compute with these kernels from now on, in every thread."""
    global _current
    _current = kernels


def _fastest() -> Kernels:
    from atoll.kernels import native  # here and not above: `native` imports this module

    try:
        return native.load()
    except native.NotUsable as exc:
        native.log.info("compiled kernels are not used, numpy computes instead: %s", exc)
        return NUMPY


def quiet() -> np.errstate:
    """Silence numpy's warnings: callers check the results for overflow and NaN."""
    return np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore")


def add(total: F32, values: F32, factor: np.float32 | None = None) -> None:
    """`total += values`, or `total += factor * values` with both operations rounded."""
    with quiet():
        if factor is None:
            np.add(total, values, out=total)
            return
        for start in range(0, total.size, TILE):
            part = total[start : start + TILE]
            product = np.multiply(values[start : start + TILE], factor, out=scratch.more[: part.size])
            np.add(part, product, out=part)


def from_bf16(bits: U16, out: F32) -> None:
    """The float32 values of bfloat16 bit patterns; exact."""
    wide = out.view(np.uint32)
    np.copyto(wide, bits)
    np.left_shift(wide, 16, out=wide)


def _to_bf16_tile(values: F32, out: U16) -> None:
    bits = values.view(np.uint32)
    rounded = scratch.more[: bits.size].view(np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)  # wraps only for NaN, which is corrected below
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    if bits.size and np.isnan(values.max()):
        nan = np.isnan(values)
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)


def _fma_tile(a: F32, b: np.float32, c: F32) -> F32:
    with quiet():
        wide = np.multiply(a, np.float64(b), dtype=np.float64)  # exact: 24 + 24 bits fit in 53
        total = wide + c
        result: F32 = total.astype(np.float32)
        # Rounding twice is wrong only where the first rounding made a tie, or where the result is subnormal.
        doubtful = ((total.view(np.uint64) & _TAIL) == _TIE) | (np.abs(total) < _SMALLEST_NORMAL)
        if doubtful.any():
            odd = _rounded_to_odd(wide[doubtful], c[doubtful].astype(np.float64), total[doubtful])
            result[doubtful] = odd.astype(np.float32)
    return result


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
