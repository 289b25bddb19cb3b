"""`bf16`: the upper half of each float32, rounded to nearest, ties to even. Half the bytes of `fp32`.

Error: at most 2^-8 of a normal value, and 2^-134 for a smaller one.
numpy has no bfloat16, so bits are handled as uint16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.rounds import kernels
from atoll.rounds.codec import F32, as_bytes, check_length, writable
from atoll.stores.base import Buffer

_WIRE = np.dtype("<u2")


def to_bf16_bits(values: F32) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns nearest to the values. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # wraps only for NaN, which is put right below
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    return result


def from_bf16_bits(bits: NDArray[np.uint16]) -> F32:
    """The float32 values of bfloat16 bit patterns; exact."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


class Bf16:
    """Two bytes for each value."""

    name = "bf16"
    largest = float.fromhex("0x1.fep+127")  # one half step above this rounds to infinity

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: F32) -> list[Buffer]:
        return [as_bytes(to_bf16_bits(values).astype(_WIRE, copy=False))]

    def encode_into(self, values: F32, out: Buffer) -> None:
        np.frombuffer(writable(self.name, out, 2 * values.size), dtype=_WIRE)[:] = to_bf16_bits(values)

    def decode(self, payload: Buffer, count: int) -> F32:
        view = check_length(self.name, payload, 2 * count)
        return from_bf16_bits(np.frombuffer(view, dtype=_WIRE).astype(np.uint16, copy=False))

    def decode_into(self, payload: Buffer, out: F32) -> None:
        bits = np.frombuffer(check_length(self.name, payload, 2 * out.size), dtype=_WIRE)
        wide = out.view(np.uint32)
        wide[:] = bits
        wide <<= np.uint32(16)

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        bits = np.frombuffer(check_length(self.name, payload, 2 * total.size), dtype=_WIRE)
        for start in range(0, total.size, kernels.TILE):
            part = total[start : start + kernels.TILE]
            wide = kernels.scratch.values[: part.size].view(np.uint32)
            wide[:] = bits[start : start + part.size]
            wide <<= np.uint32(16)
            values = wide.view(np.float32)
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                if factor is not None:
                    values *= factor
                np.add(part, values, out=part)

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)


CODEC = Bf16()
