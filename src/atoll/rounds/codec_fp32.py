"""`fp32`: the values as they are. Exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.rounds import kernels
from atoll.rounds.codec import F32, as_bytes, check_length, writable
from atoll.stores.base import Buffer

_WIRE = np.dtype("<f4")


class Fp32:
    """Four bytes for each value, no error."""

    name = "fp32"
    largest = float(np.finfo(np.float32).max)

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: F32) -> list[Buffer]:
        return [as_bytes(np.ascontiguousarray(values, dtype=_WIRE))]

    def encode_into(self, values: F32, out: Buffer) -> None:
        np.frombuffer(writable(self.name, out, 4 * values.size), dtype=_WIRE)[:] = values

    def decode(self, payload: Buffer, count: int) -> F32:
        view = check_length(self.name, payload, 4 * count)
        return np.frombuffer(view, dtype=_WIRE).astype(np.float32, copy=False)

    def decode_into(self, payload: Buffer, out: F32) -> None:
        out[:] = self.decode(payload, out.size)

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        kernels.add(total, self.decode(payload, total.size), factor)

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        return np.zeros(values.shape, dtype=np.float64)


CODEC = Fp32()
