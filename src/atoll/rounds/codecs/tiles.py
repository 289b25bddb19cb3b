"""The part that codecs share: they write and read payloads tile by tile, in scratch memory of each thread.

A codec lays arrays over the bytes of a payload (`arrays_over`); its row in `codecs.CODECS` gives the payload size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.kernels import TILE
from atoll.rounds import codecs
from atoll.rounds.codecs.base import F32, Addable, check_length, writable
from atoll.stores.base import Buffer


class PayloadArrays(Addable, Protocol):
    """Arrays over the bytes of a payload, to write or read it. Codecs inherit this, and may have a faster `add`."""

    at_once: int = TILE
    """How many values may be written, read or added in one call."""

    def check(self) -> None:
        """Raise `CorruptUpdate` if no finite values encode to this payload."""
        ...

    def write(self, start: int, values: F32) -> None: ...

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        with kernels.quiet():
            values = self.read(start, kernels.scratch.values[: total.size])
        kernels.add(total, values, factor)


class TiledCodec(ABC):
    """A `Codec` that works tile by tile."""

    name: str
    largest: float
    tile = TILE
    is_exact = False
    payload_is_values = False
    needs_feedback = False

    def encoded_bytes(self, count: int) -> int:
        return codecs.encoded_bytes(self.name, count)

    @abstractmethod
    def arrays_over(self, payload: memoryview, count: int) -> PayloadArrays:
        """Arrays over the bytes of a payload of the right length."""

    @abstractmethod
    def error_bound(self, values: F32) -> NDArray[np.float64]: ...

    def open(self, payload: Buffer, count: int) -> PayloadArrays:
        """Check a payload, and lay arrays over it."""
        arrays = self.arrays_over(check_length(self.name, payload, self.encoded_bytes(count)), count)
        arrays.check()
        return arrays

    def encode(self, values: F32) -> list[Buffer]:
        out = np.empty(self.encoded_bytes(values.size), dtype=np.uint8).data
        self.encode_into(values, out)
        return [out]

    def encode_into(self, values: F32, out: Buffer) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        arrays = self.arrays_over(writable(self.name, out, self.encoded_bytes(values.size)), values.size)
        with kernels.quiet():
            for start in range(0, values.size, arrays.at_once):
                arrays.write(start, values[start : start + arrays.at_once])

    def decode(self, payload: Buffer, count: int) -> F32:
        out = np.empty(count, dtype=np.float32)
        self.decode_into(payload, out)
        return out

    def decode_into(self, payload: Buffer, out: F32) -> None:
        arrays = self.open(payload, out.size)
        with kernels.quiet():
            for start in range(0, out.size, arrays.at_once):
                tile = out[start : start + arrays.at_once]
                if (values := arrays.read(start, tile)) is not tile:
                    np.copyto(tile, values)

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        arrays = self.open(payload, total.size)
        for start in range(0, total.size, arrays.at_once):
            arrays.add(start, total[start : start + arrays.at_once], factor)
