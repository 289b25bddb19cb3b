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
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.errors import CorruptUpdate
from atoll.kernels import U8, U16, BlockKernel, Kernels
from atoll.kernels.native import FACTORS, addends, same_numbers, samples
from atoll.rounds.codecs.base import F32
from atoll.rounds.codecs.bf16 import from_bf16_bits
from atoll.rounds.codecs.tiles import Laid, TiledCodec

_WIRE = np.dtype("<u2")
_NAN = 0x7FC0
_INFINITE = 0x7F80
_NEGATIVE = 0x8000
_SMALLEST = 0x0480  # 2^-118
_MAGIC = 1.5 * 2.0**23  # float32 has no fractions here: adding it rounds, and leaves the whole number in the low bits
_HALF = 0.5 * (1 + 2.0**-15)  # a code is found by two rounded operations


_PROVEN: dict[tuple[Kernels, BlockCodec], bool] = {}


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

    def lay(self, payload: memoryview, count: int) -> _Scaled:
        return _Scaled(self, payload, count)

    def peaks(self, magnitudes: F32) -> F32:
        """The largest of each block. Bits of magnitudes are ordered as the magnitudes are, and NaN comes last."""
        starts = np.arange(0, magnitudes.size, self.block)
        return np.maximum.reduceat(magnitudes.view(np.int32), starts).view(np.float32)

    def multiply(self, values: F32, factors: F32, out: F32) -> None:
        """Each value with the factor of its block."""
        whole = values.size // self.block
        split = whole * self.block
        shape = (whole, self.block)
        np.multiply(values[:split].reshape(shape), factors[:whole, None], out=out[:split].reshape(shape))
        np.multiply(values[split:], factors[whole:], out=out[split:])

    def scales(self, peaks: F32) -> U16:
        """From the largest magnitude of each block to its scale, as bfloat16 bits."""
        bits = np.empty(peaks.size, dtype=np.uint16)
        kernels.NUMPY.to_bf16(peaks / np.float32(self.levels), bits)
        bits[bits < _SMALLEST] = 0
        bits[~(peaks <= self.largest)] = _NAN
        return bits

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        magnitudes = np.abs(np.ascontiguousarray(values).reshape(-1))
        if not magnitudes.size:
            return np.zeros(values.shape, dtype=np.float64)
        scales = np.repeat(self.scales(self.peaks(magnitudes)), self.block)[: magnitudes.size]
        # A block whose scale is 0 is lost whole.
        bound = np.where(scales, _HALF * from_bf16_bits(scales).astype(np.float64), magnitudes)
        return bound.reshape(values.shape)


class PlainBlocks:
    """The `BlockKernel` of any such codec, with numpy alone. At most a tile at once."""

    def __init__(self, how: BlockCodec, scales: U16, codes: U8) -> None:
        self._how, self._scales, self._codes = how, scales, codes

    def write(self, start: int, values: F32) -> None:
        how, room = self._how, kernels.scratch.values[: values.size]
        np.bitwise_and(values.view(np.int32), 0x7FFFFFFF, out=room.view(np.int32))
        found = how.scales(how.peaks(room))
        scales, codes = self._part(start, values.size)
        scales[:] = found
        self._multiples(values, found, room)
        how.pack(room.view(np.int32), codes)

    def read(self, start: int, out: F32) -> None:
        scales, codes = self._part(start, out.size)
        self._how.unpack(codes, out)
        steps = from_bf16_bits(scales)
        steps *= np.float32(self._how.unit)
        self._how.multiply(out, steps, out)

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        values = kernels.scratch.values[: total.size]
        with kernels.quiet():
            self.read(start, values)
        kernels.add(total, values, factor)

    def _multiples(self, values: F32, scales: U16, out: F32) -> None:
        """Fill `out` with floats that have the codes in their low bits."""
        steps = from_bf16_bits(scales)
        inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
        self._how.multiply(values, inverse, out)
        magic = np.float32(_MAGIC + self._how.offset)
        np.add(out, magic, out=out)
        for bad in np.flatnonzero(scales == _NAN) * self._how.block:
            out[bad : bad + self._how.block] = magic

    def _part(self, start: int, count: int) -> tuple[U16, U8]:
        how = self._how
        block, code = start // how.block, how.code_bytes(start)
        return self._scales[block : block + how.blocks(count)], self._codes[code : code + how.code_bytes(count)]


class _Scaled(Laid):
    """A payload as scales and codes."""

    def __init__(self, how: BlockCodec, payload: memoryview, count: int) -> None:
        self._how = how
        split = 2 * how.blocks(count)
        self._scales = np.frombuffer(payload[:split], dtype=_WIRE)
        codes = np.frombuffer(payload[split:], dtype=np.uint8)
        assert codes.size == how.code_bytes(count), "the row of the codec gives another size"
        self._kernel: BlockKernel = PlainBlocks(how, self._scales, codes)
        compiled = kernels.current()
        if agrees_with_numpy(compiled, how) and (faster := compiled.blocks(how.name, self._scales, codes)) is not None:
            self._kernel, self.at_once = faster, compiled.tile

    def check(self) -> None:
        """NaN is let through: every value of its block is NaN then, and whoever looks for such values finds it."""
        scales = self._scales
        is_scale = (scales == 0) | ((scales >= _SMALLEST) & (scales <= _bits(self._how.top)))
        is_scale |= (scales >= _INFINITE) & (scales < _NEGATIVE)
        if not is_scale.all():
            message = f"an {self._how.name} payload has a scale that is out of range"
            raise CorruptUpdate(message, check="scale")

    def write(self, start: int, values: F32) -> None:
        self._kernel.write(start, values)

    def read(self, start: int, room: F32) -> F32:
        self._kernel.read(start, room)
        return room

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        self._kernel.add(start, total, factor)


def agrees_with_numpy(theirs: Kernels, how: BlockCodec) -> bool:
    """Whether these kernels give the bits of `PlainBlocks` for the codec; True if they have none for it."""
    if (theirs, how) not in _PROVEN:
        _PROVEN[theirs, how] = _compare(theirs, how)
    return _PROVEN[theirs, how]


def _compare(theirs: Kernels, how: BlockCodec) -> bool:
    with kernels.quiet():
        return all(_same_blocks(theirs, how, values) for values in samples())


def _same_blocks(theirs: Kernels, how: BlockCodec, values: F32) -> bool:
    size = values.size
    scales = np.zeros((2, how.blocks(size)), np.uint16)
    codes = np.zeros((2, how.code_bytes(size)), np.uint8)
    back = np.zeros((2, size), np.float32)
    sums = [addends(size) for _ in range(2)]
    fast, plain = theirs.blocks(how.name, scales[0], codes[0]), PlainBlocks(how, scales[1], codes[1])
    if fast is None:
        return True
    for one, total, kernel in zip(range(2), sums, (fast, plain), strict=True):
        kernel.write(0, values)
        kernel.read(0, back[one])
        for factor in FACTORS:
            kernel.add(0, total, factor)
    is_same = bool(np.array_equal(*scales) and np.array_equal(*codes))
    return is_same and same_numbers(*back) and same_numbers(*sums)


def _bits(scale: float) -> int:
    return int(np.float32(scale).view(np.uint32)) >> 16
