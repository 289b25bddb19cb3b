"""The kernels of `_native.c`, for whoever has them: the same bits as numpy's, at the speed of memory.

`kernels.current` asks for them when arithmetic is first needed. The library is used only if it computes what numpy
computes on hard values. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll._compiled import Functions, NotUsable, address_of, opened, room_of
from atoll.rounds.kernels import F32, U8, U16, NumpyKernels

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
    from atoll.rounds.native_proof import disagreement

    kernels = NativeKernels(opened(library, source, _FUNCTIONS))
    if (wrong := disagreement(kernels)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy computes: {wrong}")
    return kernels


def _added(factor: np.float32 | None) -> tuple[int, float]:
    return (_ADD, 0.0) if factor is None else (_ADD_TIMES, float(factor))
