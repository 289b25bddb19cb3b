"""`fp32`: the values as they are. Exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.rounds.codecs.base import F32, as_bytes, check_length
from atoll.rounds.codecs.tiles import Laid, TiledCodec
from atoll.stores.base import Buffer

_WIRE = np.dtype("<f4")


class _Floats(Laid):
    def __init__(self, payload: memoryview) -> None:
        self._floats = np.frombuffer(payload, dtype=_WIRE)

    def check(self) -> None:
        pass

    def write(self, start: int, values: F32) -> None:
        self._floats[start : start + values.size] = values

    def read(self, start: int, room: F32) -> F32:
        return self._floats[start : start + room.size].astype(np.float32, copy=False)

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        values = self.read(start, total)
        if factor is None:
            np.add(total, values, total)
        else:
            kernels.add(total, values, factor)


class Fp32(TiledCodec):
    """Four bytes for each value, no error. Nothing is copied."""

    name = "fp32"
    largest = float(np.finfo(np.float32).max)
    is_exact = True
    payload_is_values = True
    tile = 1 << 15  # there is nothing to do but to add: what is added to had better stay in the nearest cache

    def lay(self, payload: memoryview, count: int) -> _Floats:  # noqa: ARG002
        return _Floats(payload)

    def encode(self, values: F32) -> list[Buffer]:
        return [as_bytes(np.ascontiguousarray(values, dtype=_WIRE))]

    def decode(self, payload: Buffer, count: int) -> F32:
        view = check_length(self.name, payload, 4 * count)
        return np.frombuffer(view, dtype=_WIRE).astype(np.float32, copy=False)

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        kernels.add(total, self.decode(payload, total.size), factor)

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        return np.zeros(values.shape, dtype=np.float64)


CODEC = Fp32()
