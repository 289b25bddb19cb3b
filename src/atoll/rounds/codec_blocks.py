"""Whole multiples of a scale, one scale for each block of values: what `int8` and `int4` have in common.

A payload is the scales of all blocks, bfloat16 little-endian, and then the codes; the last block may be shorter.
A block's scale is its largest magnitude over `levels`, rounded to bfloat16; a value's code is the nearest multiple.
bfloat16 is fine enough that the largest magnitude becomes ±levels exactly, and coarse enough that multiples are exact
in float32: nothing is clipped, the error is half a scale, and encoding what was decoded gives the same bytes again.

A scale below 2^-118 is written as 0 and so is its block: so far down some processors flush numbers to zero and others
do not. A block with a value that is not finite or above `largest` gets NaN for a scale, and codes 0.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptUpdate
from atoll.rounds import kernels
from atoll.rounds.codec import F32
from atoll.rounds.codec_bf16 import from_bf16_bits
from atoll.rounds.codec_tiles import TiledCodec
from atoll.rounds.kernels import U16

_WIRE = np.dtype("<u2")
_NAN = 0x7FC0
_INFINITE = 0x7F80
_SMALLEST = 0x0480  # 2^-118
_MAGIC = 1.5 * 2.0**23  # float32 has no fractions here: adding it rounds, and leaves the whole number in the low bits
_HALF = 0.5 * (1 + 2.0**-15)  # a code is found by two rounded operations


class BlockCodec(TiledCodec):
    """A codec whose codes are whole numbers from -levels to levels."""

    block: ClassVar[int]
    levels: ClassVar[int]
    offset: ClassVar[int] = 0
    """What is added to codes before `pack` gets them."""
    unit: ClassVar[float] = 1.0
    """A power of two: what `unpack` gives, times this, is a code."""
    top: ClassVar[float]
    """The largest scale: `levels` times this is `largest`, and the next scale would not fit float32."""

    @abstractmethod
    def code_bytes(self, count: int) -> int: ...

    @abstractmethod
    def pack(self, codes: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        """The low bits of each code plus `offset` into bytes. `codes` may be destroyed."""

    @abstractmethod
    def unpack(self, packed: NDArray[np.uint8], out: F32) -> None: ...

    def blocks(self, count: int) -> int:
        return -(-count // self.block)

    def encoded_bytes(self, count: int) -> int:
        return 2 * self.blocks(count) + self.code_bytes(count)

    def lay(self, payload: memoryview, count: int) -> _Scaled:
        return _Scaled(self, payload, count)

    def rows(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """The whole blocks as one matrix, and the shorter one at the end as another."""
        whole = values.size // self.block * self.block
        both = [values[:whole].reshape(-1, self.block), values[whole:].reshape(1, -1)]
        return [matrix for matrix in both if matrix.size]

    def scales(self, peaks: F32) -> U16:
        """From the largest magnitude of each block to its scale, as bfloat16 bits."""
        bits = np.empty(peaks.size, dtype=np.uint16)
        kernels.NUMPY.to_bf16(peaks / np.float32(self.levels), bits)
        bits[bits < _SMALLEST] = 0
        bits[~(peaks <= self.largest)] = _NAN
        return bits

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        flat = np.ascontiguousarray(values).reshape(-1)
        bound = np.abs(flat.astype(np.float64))  # where the block is written as zeros
        for rows, bounds in zip(self.rows(flat), self.rows(bound), strict=True):
            scales = self.scales(np.abs(rows).max(axis=1))
            steps = from_bf16_bits(scales).astype(np.float64)
            bounds[scales != 0] = _HALF * steps[scales != 0, None]
        return bound.reshape(values.shape)


class _Scaled:
    """A payload as scales and codes."""

    def __init__(self, how: BlockCodec, payload: memoryview, count: int) -> None:
        self._how = how
        split = 2 * how.blocks(count)
        self._scales = np.frombuffer(payload[:split], dtype=_WIRE)
        self._codes = np.frombuffer(payload[split:], dtype=np.uint8)

    def check(self) -> None:
        scales, top = self._scales, _bits(self._how.top)
        is_bad = (scales > top) | ((scales < _SMALLEST) & (scales != 0))
        if is_bad.any():
            is_finite = bool(((scales & 0x7FFF) < _INFINITE).all())
            what = "out of range" if is_finite else "not finite"
            message = f"a scale of {np.count_nonzero(is_bad)} blocks of an {self._how.name} payload is {what}"
            raise CorruptUpdate(message, check="scale" if is_finite else "finite")

    def write(self, start: int, values: F32) -> None:
        room = kernels.scratch.values[: values.size]
        first = start // self._how.block
        for rows, multiples in zip(self._how.rows(values), self._how.rows(room), strict=True):
            self._scales[first : first + len(rows)] = self._multiples(rows, multiples)
            first += len(rows)
        self._how.pack(room.view(np.int32), self._part(start, values.size))

    def read(self, start: int, room: F32) -> F32:
        self._how.unpack(self._part(start, room.size), room)
        first = start // self._how.block
        for rows in self._how.rows(room):
            steps = from_bf16_bits(self._scales[first : first + len(rows)])
            steps *= np.float32(self._how.unit)
            np.multiply(rows, steps[:, None], out=rows)
            first += len(rows)
        return room

    def _multiples(self, rows: F32, out: F32) -> U16:
        """Fill `out` with floats that have the codes in their low bits; the scales come back."""
        magnitudes = np.bitwise_and(rows.view(np.int32), 0x7FFFFFFF, out=out.view(np.int32))
        peaks = np.maximum.reduce(magnitudes, axis=1).view(np.float32)  # bits of magnitudes are ordered as they are
        scales = self._how.scales(peaks)
        steps = from_bf16_bits(scales)
        inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
        np.multiply(rows, inverse[:, None], out=out)
        magic = np.float32(_MAGIC + self._how.offset)
        np.add(out, magic, out=out)
        if (is_bad := scales == _NAN).any():
            out[is_bad] = magic
        return scales

    def _part(self, start: int, count: int) -> NDArray[np.uint8]:
        first = self._how.code_bytes(start)
        return self._codes[first : first + self._how.code_bytes(count)]


def _bits(scale: float) -> int:
    return int(np.float32(scale).view(np.uint32)) >> 16
