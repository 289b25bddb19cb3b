"""The kernels of `_native.c`, for whoever has them: the same bits as numpy's, at the speed of memory.

`kernels.current` asks for them when arithmetic is first needed. The library is used only if it was built from the
source that lies beside it, and computes what numpy computes on hard values. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from ctypes import CDLL, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.rounds.kernels import F32, U8, U16, NumpyKernels

LIBRARY = Path(__file__).with_name("_native.so")
SOURCE = Path(__file__).with_name("_native.c")

_SET, _ADD, _ADD_TIMES = range(3)
_WRITE_BLOCKS = (None, c_void_p, c_int64, c_void_p, c_void_p)
_READ_BLOCKS = (None, c_int, c_float, c_void_p, c_void_p, c_int64, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what each gives, then what it takes
    "atoll_source": (c_char_p,),
    "atoll_has_fma": (c_int,),
    "atoll_fma": (None, c_void_p, c_float, c_void_p, c_int64, c_void_p),
    "atoll_bf16_write": (None, c_void_p, c_int64, c_void_p),
    "atoll_bf16_read": (None, c_int, c_float, c_void_p, c_int64, c_void_p),
    "atoll_int8_write": _WRITE_BLOCKS,
    "atoll_int8_read": _READ_BLOCKS,
    "atoll_int4_write": _WRITE_BLOCKS,
    "atoll_int4_read": _READ_BLOCKS,
}


class NotUsable(Exception):
    """Why numpy does the work instead."""


class NativeBlocks:
    """The `BlockKernel` of one codec."""

    def __init__(self, library: CDLL, name: str, block: int, code_bits: int) -> None:
        self._write, self._read = getattr(library, f"atoll_{name}_write"), getattr(library, f"atoll_{name}_read")
        self._block, self._code_bits = block, code_bits

    def write(self, values: F32, scales: U16, codes: U8) -> None:
        self._check(values.size, scales, codes)
        self._write(_at(values, np.float32), values.size, _room(scales, np.uint16), _room(codes, np.uint8))

    def read(self, scales: U16, codes: U8, out: F32) -> None:
        self._check(out.size, scales, codes)
        self._read(_SET, 0.0, _at(scales, np.uint16), _at(codes, np.uint8), out.size, _room(out, np.float32))

    def add(self, scales: U16, codes: U8, total: F32, factor: np.float32 | None) -> None:
        self._check(total.size, scales, codes)
        self._read(*_added(factor), _at(scales, np.uint16), _at(codes, np.uint8), total.size, _room(total, np.float32))

    def _check(self, count: int, scales: U16, codes: U8) -> None:
        assert scales.size == -(-count // self._block)
        assert codes.size == -(-count * self._code_bits // 8)


class NativeKernels(NumpyKernels):
    """What the library has; the rest is numpy's."""

    name = "native"

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._has_fma = bool(library.atoll_has_fma())
        self._blocks = {"int8": NativeBlocks(library, "int8", 256, 8), "int4": NativeBlocks(library, "int4", 128, 4)}

    def to_bf16(self, values: F32, out: U16) -> None:
        assert values.size == out.size
        self._library.atoll_bf16_write(_at(values, np.float32), values.size, _room(out, np.uint16))

    def from_bf16(self, bits: U16, out: F32) -> None:
        assert bits.size == out.size
        self._library.atoll_bf16_read(_SET, 0.0, _at(bits, np.uint16), bits.size, _room(out, np.float32))

    def add_bf16(self, bits: U16, total: F32, factor: np.float32 | None = None) -> None:
        assert bits.size == total.size
        self._library.atoll_bf16_read(*_added(factor), _at(bits, np.uint16), bits.size, _room(total, np.float32))

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        if not self._has_fma:
            super().fma(a, b, c, out)
            return
        assert a.size == c.size == out.size
        self._library.atoll_fma(_at(a, np.float32), float(b), _at(c, np.float32), a.size, _room(out, np.float32))

    def blocks(self, codec: str) -> NativeBlocks | None:
        return self._blocks.get(codec)


def load(library: Path = LIBRARY, source: Path = SOURCE) -> NativeKernels:
    """The compiled kernels, proven, or `NotUsable`."""
    from atoll.rounds.native_proof import disagreement

    if os.environ.get("ATOLL_PURE", "") not in ("", "0"):
        raise NotUsable("ATOLL_PURE is set")
    if sys.byteorder != "little":
        raise NotUsable("the library is for little-endian machines")
    kernels = NativeKernels(_opened(library, source))
    if (wrong := disagreement(kernels)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy computes: {wrong}")
    return kernels


def _opened(path: Path, source: Path) -> CDLL:
    try:
        wanted = hashlib.sha256(source.read_bytes()).hexdigest()
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as exc:
        raise NotUsable(f"{path.name}: {exc}") from exc
    if library.atoll_source().decode(errors="replace") != wanted:
        raise NotUsable(f"{path.name} was built from another {source.name}")
    return library


def _added(factor: np.float32 | None) -> tuple[int, float]:
    return (_ADD, 0.0) if factor is None else (_ADD_TIMES, float(factor))


def _at(array: NDArray[Any], dtype: type[Any]) -> int:
    """Where a contiguous array begins. C would not ask what it is."""
    assert array.flags.c_contiguous and array.dtype == dtype  # noqa: PT018
    address: int = array.__array_interface__["data"][0]
    return address


def _room(array: NDArray[Any], dtype: type[Any]) -> int:
    """The same of one that is written to."""
    assert array.flags.writeable
    return _at(array, dtype)
