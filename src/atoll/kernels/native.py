"""The compiled kernels of `_native.c`: the bits of numpy's kernels, at the speed of memory.

`kernels.current` loads them when arithmetic is first needed. A library is used only if it was built from the source
beside it, and only if it computes what numpy computes on difficult values; `codecs.blocks` compares the block codecs on
the same samples. `ATOLL_PURE=1` switches every library off. ctypes releases the interpreter lock during each call.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
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

log = logging.getLogger("atoll.kernels")

Functions: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Function name → the type of its result, then those of its arguments."""


class NotUsable(Exception):
    """Why a library is not used."""


class NotBuilt(NotUsable):
    """No library fits this machine and this source; installing Atoll again may build one."""


def open_library(library: Path, source: Path, functions: Functions) -> CDLL:
    """The library with these functions, or `NotUsable`."""
    if os.environ.get("ATOLL_PURE", "") not in ("", "0"):
        raise NotUsable("ATOLL_PURE is set")
    if sys.byteorder != "little":
        raise NotUsable("the library is for little-endian machines")
    if not library.is_file():
        raise NotBuilt(f"there is no {library.name}: Atoll was installed without a C compiler")
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
    """The address of a contiguous array. Checks the type, because C does not."""
    assert array.flags.c_contiguous and array.dtype == dtype  # noqa: PT018
    if array.flags.writeable and array.size:
        # Takes a quarter of the time, but works only for writable arrays.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    address: int = array.__array_interface__["data"][0]
    return address


def writable_address(array: NDArray[Any], dtype: type[Any]) -> int:
    """The address of a contiguous array that C writes to."""
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
    """The functions of a block codec, and the block sizes that are built into them."""

    write: Callable[..., None]
    read: Callable[..., None]
    block: int
    code_bits: int

    @classmethod
    def of(cls, library: CDLL, name: str, block: int, code_bits: int) -> _Blocks:
        return cls(getattr(library, f"atoll_{name}_write"), getattr(library, f"atoll_{name}_read"), block, code_bits)


class NativeBlocks:
    """The `BlockKernel` of one payload. Addresses are found once: numpy takes longer for that than C for a block."""

    def __init__(self, how: _Blocks, scales: U16, codes: U8) -> None:
        self._how, self._scales, self._codes = how, scales, codes
        self._scales_at, self._codes_at = address_of(scales, np.uint16), address_of(codes, np.uint8)

    def write(self, start: int, values: F32) -> None:
        assert self._scales.flags.writeable and self._codes.flags.writeable  # noqa: PT018
        self._how.write(address_of(values, np.float32), values.size, *self._part(start, values.size))

    def read(self, start: int, out: F32) -> None:
        self._how.read(_SET, 0.0, *self._part(start, out.size), out.size, writable_address(out, np.float32))

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        self._how.read(*_added(factor), *self._part(start, total.size), total.size, writable_address(total, np.float32))

    def _part(self, start: int, count: int) -> tuple[int, int]:
        """The addresses of the scales and codes of these values."""
        block, code_bits, end = self._how.block, self._how.code_bits, start + count
        assert start % _GROUP == 0
        assert -(-end // block) <= self._scales.size
        assert -(-end * code_bits // 8) <= self._codes.size
        return self._scales_at + 2 * (start // block), self._codes_at + start * code_bits // 8


class NativeKernels(NumpyKernels):
    """The functions of the library; numpy computes the rest."""

    name = "native"
    tile = 1 << 40  # no limit: C makes one pass over memory of any size

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._has_fma = bool(library.atoll_has_fma())
        self._blocks = {"int8": _Blocks.of(library, "int8", 256, 8), "int4": _Blocks.of(library, "int4", 128, 4)}

    def to_bf16(self, values: F32, out: U16) -> None:
        assert values.size == out.size
        self._library.atoll_bf16_write(address_of(values, np.float32), values.size, writable_address(out, np.uint16))

    def from_bf16(self, bits: U16, out: F32) -> None:
        assert bits.size == out.size
        self._library.atoll_bf16_read(
            _SET, 0.0, address_of(bits, np.uint16), bits.size, writable_address(out, np.float32)
        )

    def add_bf16(self, bits: U16, total: F32, factor: np.float32 | None = None) -> None:
        assert bits.size == total.size
        self._library.atoll_bf16_read(
            *_added(factor), address_of(bits, np.uint16), bits.size, writable_address(total, np.float32)
        )

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        if not self._has_fma:
            super().fma(a, b, c, out)
            return
        assert a.size == c.size == out.size
        self._library.atoll_fma(
            address_of(a, np.float32), float(b), address_of(c, np.float32), a.size, writable_address(out, np.float32)
        )

    def blocks(self, codec: str, scales: U16, codes: U8) -> NativeBlocks | None:
        how = self._blocks.get(codec)
        return None if how is None else NativeBlocks(how, scales, codes)


def load(library: Path = LIBRARY, source: Path = SOURCE) -> NativeKernels:
    """The compiled kernels, compared with numpy, or `NotUsable`."""
    kernels = NativeKernels(open_library(library, source, _FUNCTIONS))
    if (wrong := disagreement(kernels)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy computes: {wrong}")
    return kernels


def _added(factor: np.float32 | None) -> tuple[int, float]:
    return (_ADD, 0.0) if factor is None else (_ADD_TIMES, float(factor))


_SIZES = (33, 2048 + 259)  # less than a block; a group, whole blocks and less than a block
FACTORS = (None, np.float32(0.3))
_HARD = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0xBF807FFF, 0x7F7FFFFF,
     0x7F7F7FFF, 0x7F7F8000, 0x7F7FFC00, 0x7F7F8001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF],
    np.uint32,
).view(np.float32)  # fmt: skip


def disagreement(theirs: Kernels) -> str | None:
    """The first operation whose bits differ from numpy's, or None."""
    with kernels.quiet():
        for values in samples():
            for name, is_same in (("bf16", _same_bf16), ("fma", _same_fma)):
                if not is_same(theirs, values):
                    return f"{name} of {values.size} values"
    return None


def samples() -> Iterator[F32]:
    """Arrays of normal numbers, ties, tiny numbers, random bits, and normal numbers with special values among them."""
    rng = np.random.default_rng(0)
    for size in _SIZES:
        normal = rng.standard_normal(size, dtype=np.float32)
        yield normal
        yield np.round(normal * 8) * np.float32(0.5)
        yield normal * np.float32(2.0**-112)
        yield rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
        normal[:: max(1, size // 5)] = rng.choice(_HARD, normal[:: max(1, size // 5)].size)
        yield normal


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
    """The numbers to add to; equal for equal sizes."""
    return np.random.default_rng(size).standard_normal(size, dtype=np.float32)


def same_numbers(ours: F32, theirs: F32) -> bool:
    """Equal bits, or NaN in both: the processor chooses which NaN an operation gives."""
    alike = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    return bool(alike.all())
