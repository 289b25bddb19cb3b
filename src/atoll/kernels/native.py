"""The kernels of `_native.c`, for whoever has them: the same bits as numpy's, at the speed of memory.

`kernels.current` asks for them when arithmetic is first needed. The library is used only if it computes what numpy
computes on hard values. ctypes lets other threads run meanwhile.

Libraries that were compiled when Atoll was installed, if there was a compiler, and what C needs to know of an array.

A library is used only if it was built from the source that lies beside it. `ATOLL_PURE=1` does without.

Compare the compiled kernels with numpy, bit by bit, before the first of them is used. Pure.

`codec_blocks` compares the block codecs with the same samples.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import CDLL, addressof, c_char, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from atoll import kernels
from atoll.kernels import F32, NUMPY, U8, U16, Kernels, NumpyKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

Functions: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By name: what each gives, then what it takes."""


class NotUsable(Exception):
    """Why a library is done without."""


class NotBuilt(NotUsable):
    """There is none that fits this machine and this source: installing Atoll again may bring one."""


def opened(library: Path, source: Path, functions: Functions) -> CDLL:
    """The library with these functions, or `NotUsable`."""
    if os.environ.get("ATOLL_PURE", "") not in ("", "0"):
        raise NotUsable("ATOLL_PURE is set")
    if sys.byteorder != "little":
        raise NotUsable("the library is for little-endian machines")
    if not library.is_file():
        raise NotBuilt(f"there is no {library.name}: no C compiler built it when Atoll was installed")
    try:
        wanted = hashlib.sha256(source.read_bytes()).hexdigest()
        found = ctypes.CDLL(str(library))
        for name, (result, *arguments) in {"atoll_source": (c_char_p,), **functions}.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as exc:
        raise NotBuilt(f"{library.name} does not load here: {exc}") from exc
    if found.atoll_source().decode(errors="replace") != wanted:
        raise NotBuilt(f"{library.name} was built from another {source.name}")
    return found


def address_of(array: NDArray[Any], dtype: type[Any]) -> int:
    """Where a contiguous array begins. C would not ask what it is."""
    assert array.flags.c_contiguous and array.dtype == dtype  # noqa: PT018
    if array.flags.writeable and array.size:
        # A quarter of the time, but only of what can be written.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    address: int = array.__array_interface__["data"][0]
    return address


def room_of(array: NDArray[Any], dtype: type[Any]) -> int:
    """The same of one that is written to."""
    assert array.flags.writeable
    return address_of(array, dtype)


LIBRARY = Path(__file__).with_name("_native.so")
SOURCE = Path(__file__).with_name("_native.c")

_GROUP = 2048
_SET, _ADD, _ADD_TIMES = range(3)
_WRITE_BLOCKS = (None, c_void_p, c_int64, c_void_p, c_void_p)
_READ_BLOCKS = (None, c_int, c_float, c_void_p, c_void_p, c_int64, c_void_p)
_FUNCTIONS: Functions = {
    "atoll_has_fma": (c_int,),
    "atoll_fma": (None, c_void_p, c_float, c_void_p, c_int64, c_void_p),
    "atoll_bf16_write": (None, c_void_p, c_int64, c_void_p),
    "atoll_bf16_read": (None, c_int, c_float, c_void_p, c_int64, c_void_p),
    "atoll_int8_write": _WRITE_BLOCKS,
    "atoll_int8_read": _READ_BLOCKS,
    "atoll_int4_write": _WRITE_BLOCKS,
    "atoll_int4_read": _READ_BLOCKS,
}


@dataclass(frozen=True)
class _Blocks:
    """The functions of a codec, and what they take for granted."""

    write: Callable[..., None]
    read: Callable[..., None]
    block: int
    code_bits: int

    @classmethod
    def of(cls, library: CDLL, name: str, block: int, code_bits: int) -> _Blocks:
        return cls(getattr(library, f"atoll_{name}_write"), getattr(library, f"atoll_{name}_read"), block, code_bits)


class NativeBlocks:
    """The `BlockKernel` of one payload. Where it lies is asked once: numpy takes longer for that than C for a block."""

    def __init__(self, how: _Blocks, scales: U16, codes: U8) -> None:
        self._how, self._scales, self._codes = how, scales, codes
        self._scales_at, self._codes_at = address_of(scales, np.uint16), address_of(codes, np.uint8)

    def write(self, start: int, values: F32) -> None:
        assert self._scales.flags.writeable and self._codes.flags.writeable  # noqa: PT018
        self._how.write(address_of(values, np.float32), values.size, *self._part(start, values.size))

    def read(self, start: int, out: F32) -> None:
        self._how.read(_SET, 0.0, *self._part(start, out.size), out.size, room_of(out, np.float32))

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        self._how.read(*_added(factor), *self._part(start, total.size), total.size, room_of(total, np.float32))

    def _part(self, start: int, count: int) -> tuple[int, int]:
        """Where the scales and codes of these values are."""
        block, code_bits, end = self._how.block, self._how.code_bits, start + count
        assert start % _GROUP == 0
        assert -(-end // block) <= self._scales.size
        assert -(-end * code_bits // 8) <= self._codes.size
        return self._scales_at + 2 * (start // block), self._codes_at + start * code_bits // 8


class NativeKernels(NumpyKernels):
    """What the library has; the rest is numpy's."""

    name = "native"
    tile = 1 << 40  # one pass over memory, however much there is

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._has_fma = bool(library.atoll_has_fma())
        self._blocks = {"int8": _Blocks.of(library, "int8", 256, 8), "int4": _Blocks.of(library, "int4", 128, 4)}

    def to_bf16(self, values: F32, out: U16) -> None:
        assert values.size == out.size
        self._library.atoll_bf16_write(address_of(values, np.float32), values.size, room_of(out, np.uint16))

    def from_bf16(self, bits: U16, out: F32) -> None:
        assert bits.size == out.size
        self._library.atoll_bf16_read(_SET, 0.0, address_of(bits, np.uint16), bits.size, room_of(out, np.float32))

    def add_bf16(self, bits: U16, total: F32, factor: np.float32 | None = None) -> None:
        assert bits.size == total.size
        self._library.atoll_bf16_read(
            *_added(factor), address_of(bits, np.uint16), bits.size, room_of(total, np.float32)
        )

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        if not self._has_fma:
            super().fma(a, b, c, out)
            return
        assert a.size == c.size == out.size
        self._library.atoll_fma(
            address_of(a, np.float32), float(b), address_of(c, np.float32), a.size, room_of(out, np.float32)
        )

    def blocks(self, codec: str, scales: U16, codes: U8) -> NativeBlocks | None:
        how = self._blocks.get(codec)
        return None if how is None else NativeBlocks(how, scales, codes)


def load(library: Path = LIBRARY, source: Path = SOURCE) -> NativeKernels:
    """The compiled kernels, proven, or `NotUsable`."""

    kernels = NativeKernels(opened(library, source, _FUNCTIONS))
    if (wrong := disagreement(kernels)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy computes: {wrong}")
    return kernels


def _added(factor: np.float32 | None) -> tuple[int, float]:
    return (_ADD, 0.0) if factor is None else (_ADD_TIMES, float(factor))


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
