"""Block codecs, the base of `int8` and `int4`: values are whole multiples of a scale, one scale for each block.

A payload is the scales of all blocks, bfloat16 little-endian, and then the codes; the last block may be shorter.
A block's scale is its largest magnitude over `levels`, rounded to bfloat16; a value's code is the nearest multiple.
bfloat16 is fine enough that the largest magnitude becomes ±levels exactly, and coarse enough that multiples are exact
in float32: nothing is clipped, the error is half a scale, and encoding decoded values gives the same bytes again.

A scale below 2^-118 becomes 0, and so do the codes of its block, because some processors flush such small numbers to
zero. A block with a value that is not finite or above `largest` gets the scale NaN and codes 0.
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


_AGREES: dict[tuple[Kernels, BlockCodec], bool] = {}


class BlockCodec(TiledCodec):
    """A codec with one scale for each block, and codes from -levels to levels."""

    block: ClassVar[int]
    levels: ClassVar[int]
    offset: ClassVar[int] = 0
    """A number added to codes before `pack`."""
    unit: ClassVar[float] = 1.0
    """A power of two: a code is the result of `unpack` times this."""
    top: ClassVar[float]
    """The largest scale: `levels` times this is `largest`; with the next scale that product overflows float32."""

    @abstractmethod
    def code_bytes(self, count: int) -> int: ...

    @abstractmethod
    def pack(self, codes: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        """Pack the low bits of each code plus `offset` into bytes. May overwrite `codes`."""

    @abstractmethod
    def unpack(self, packed: NDArray[np.uint8], out: F32) -> None: ...

    def blocks(self, count: int) -> int:
        return -(-count // self.block)

    def lay(self, payload: memoryview, count: int) -> _Scaled:
        return _Scaled(self, payload, count)

    def peaks(self, magnitudes: F32) -> F32:
        """The largest magnitude of each block. Bits of magnitudes sort like the magnitudes, with NaN last."""
        starts = np.arange(0, magnitudes.size, self.block)
        return np.maximum.reduceat(magnitudes.view(np.int32), starts).view(np.float32)

    def multiply(self, values: F32, factors: F32, out: F32) -> None:
        """Multiply each value with the factor of its block."""
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
        # Every value of a block with scale 0 becomes 0.
        bound = np.where(scales, _HALF * from_bf16_bits(scales).astype(np.float64), magnitudes)
        return bound.reshape(values.shape)


class PlainBlocks:
    """The `BlockKernel` of any block codec, with numpy alone. At most a tile in one call."""

    def __init__(self, how: BlockCodec, scales: U16, codes: U8) -> None:
        self._how, self._scales, self._codes = how, scales, codes

    def write(self, start: int, values: F32) -> None:
        how, work = self._how, kernels.scratch.values[: values.size]
        np.bitwise_and(values.view(np.int32), 0x7FFFFFFF, out=work.view(np.int32))
        found = how.scales(how.peaks(work))
        scales, codes = self._part(start, values.size)
        scales[:] = found
        self._multiples(values, found, work)
        how.pack(work.view(np.int32), codes)

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
        """Fill `out` with floats whose low bits are the codes."""
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
        """A NaN scale passes: every value of its block decodes to NaN, and the checks of values reject the update."""
        scales = self._scales
        is_scale = (scales == 0) | ((scales >= _SMALLEST) & (scales <= _bits(self._how.top)))
        is_scale |= (scales >= _INFINITE) & (scales < _NEGATIVE)
        if not is_scale.all():
            message = f"an {self._how.name} payload has a scale that is out of range"
            raise CorruptUpdate(message, check="scale")

    def write(self, start: int, values: F32) -> None:
        self._kernel.write(start, values)

    def read(self, start: int, out: F32) -> F32:
        self._kernel.read(start, out)
        return out

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        self._kernel.add(start, total, factor)


def agrees_with_numpy(theirs: Kernels, how: BlockCodec) -> bool:
    """Whether these kernels give the bits of `PlainBlocks` for the codec; True if they have no kernel for it."""
    if (theirs, how) not in _AGREES:
        with kernels.quiet():
            _AGREES[theirs, how] = all(_same_blocks(theirs, how, values) for values in samples())
    return _AGREES[theirs, how]


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
