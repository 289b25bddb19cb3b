"""The arithmetic on large arrays that codecs, sums and outer steps are made of, and the place to plug in a faster one.

`native` has all of it compiled, where a compiler was at hand when Atoll was installed. numpy does it otherwise, in
tiles that stay in the cache; code that has torch gives torch's for what numpy has no instruction for to `use`. Whoever
computes, the bits are the same.
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
"""Elements worked on at once; a multiple of every codec's block."""

_PAGE = 4096
_TAIL = np.uint64((1 << 29) - 1)  # what float64 has below the last bit of float32
_TIE = np.uint64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126
_FMA_TILE = 1 << 15  # its float64 intermediates are many


class BlockKernel(Protocol):
    """The scales (bfloat16 bits) and codes of one payload of whole multiples; `codec_blocks` says what they are.

    `start` is a multiple of 2048; so is the number of values, unless they are the last.
    """

    def write(self, start: int, values: F32) -> None: ...

    def read(self, start: int, out: F32) -> None: ...

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        """As `Codec.add_into`."""
        ...


class Kernels(Protocol):
    """What may be done by something faster than numpy. Arrays are contiguous and any length; nothing is allocated."""

    name: str
    tile: int
    """How many values are best given to them at once."""

    def to_bf16(self, values: F32, out: U16) -> None:
        """The bfloat16 bit patterns nearest to the values, ties to even. NaN becomes some NaN."""
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
        """What is faster than the codec's own numpy, if there is something."""
        ...


class NumpyKernels:
    """Needs nothing but numpy."""

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
    """Memory that begins with a page; 16 bytes later, where malloc likes to begin, the kernel copies half as fast."""
    item_bytes = np.dtype(dtype).itemsize
    room = np.empty(count * item_bytes + _PAGE, dtype=np.uint8)
    start = -room.ctypes.data % _PAGE
    return room[start : start + count * item_bytes].view(dtype)


class _Scratch(local):
    """Memory of one tile for the calling thread only: `values` for callers, `more` for this module."""

    def __init__(self) -> None:
        self.values: F32 = aligned(TILE)
        self.more: F32 = aligned(TILE)


scratch = _Scratch()
NUMPY = NumpyKernels()
_current: Kernels | None = None


def current() -> Kernels:
    """Those in use: the ones of `use`, or from the first call on the fastest there are without torch."""
    global _current
    if _current is None:
        _current = _fastest()
    return _current


def use(kernels: Kernels) -> None:
    """Compute with these from now on, in every thread."""
    global _current
    _current = kernels


def _fastest() -> Kernels:
    from atoll.kernels import native  # here and not above: `import atoll` loads no library
    from atoll.kernels.native import NotUsable

    try:
        return native.load()
    except NotUsable:
        return NUMPY


def quiet() -> np.errstate:
    """Overflow and NaN are found by looking at results, not by warnings on the way."""
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
    np.add(rounded, bits, out=rounded)  # wraps only for NaN, which is put right below
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
        # Rounding twice is wrong only where the first rounding made a tie, or float32 has fewer bits to begin with.
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
