"""`bf16`: the upper half of each float32, rounded to nearest, ties to even. Half the bytes of `fp32`.

Error: at most 2^-8 of a normal value, and 2^-134 for a smaller one.
numpy has no bfloat16, so bits are handled as uint16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.kernels import U16
from atoll.rounds.codecs.base import F32
from atoll.rounds.codecs.tiles import Laid, TiledCodec

_WIRE = np.dtype("<u2")


def to_bf16_bits(values: F32) -> U16:
    """The bfloat16 bit patterns nearest to the values. NaN stays NaN."""
    bits = np.empty(values.size, dtype=np.uint16)
    kernels.current().to_bf16(np.ascontiguousarray(values, dtype=np.float32), bits)
    return bits


def from_bf16_bits(bits: U16) -> F32:
    """The float32 values of bfloat16 bit patterns; exact."""
    values = np.empty(bits.size, dtype=np.float32)
    kernels.from_bf16(bits, values)
    return values


class _Halves(Laid):
    def __init__(self, payload: memoryview) -> None:
        self._bits = np.frombuffer(payload, dtype=_WIRE)
        self.at_once = kernels.current().tile

    def check(self) -> None:
        pass

    def write(self, start: int, values: F32) -> None:
        out = self._bits[start : start + values.size]
        native = out if out.dtype.isnative else np.empty(out.size, dtype=np.uint16)
        kernels.current().to_bf16(values, native)
        if native is not out:
            out[:] = native

    def read(self, start: int, room: F32) -> F32:
        kernels.current().from_bf16(self._bits[start : start + room.size], room)
        return room

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        kernels.current().add_bf16(self._bits[start : start + total.size], total, factor)


class Bf16(TiledCodec):
    """Two bytes for each value."""

    name = "bf16"
    largest = float.fromhex("0x1.fep+127")  # one half step above this rounds to infinity

    def lay(self, payload: memoryview, count: int) -> _Halves:  # noqa: ARG002
        return _Halves(payload)

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)


CODEC = Bf16()
