"""What codecs have in common: a payload is written and read tile by tile, in scratch memory that each thread keeps.

A codec lays arrays over the bytes of a payload (`lay`), whose size its row in `codec_sizes` gives; the rest is here.
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


class Laid(Addable, Protocol):
    """A payload as arrays, to be written or read. Codecs inherit it, and `add` if they have no better one."""

    at_once: int = TILE
    """How many values may be written, read or added in one call."""

    def check(self) -> None:
        """Raise `CorruptUpdate` if no finite values are written like this."""
        ...

    def write(self, start: int, values: F32) -> None: ...

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        with kernels.quiet():
            values = self.read(start, kernels.scratch.values[: total.size])
        kernels.add(total, values, factor)


class TiledCodec(ABC):
    """A `Codec` made of tiles."""

    name: str
    largest: float
    tile = TILE
    is_exact = False
    payload_is_values = False
    needs_feedback = False

    def encoded_bytes(self, count: int) -> int:
        return codecs.encoded_bytes(self.name, count)

    @abstractmethod
    def lay(self, payload: memoryview, count: int) -> Laid:
        """Arrays over the bytes of a payload of the right length."""

    @abstractmethod
    def error_bound(self, values: F32) -> NDArray[np.float64]: ...

    def open(self, payload: Buffer, count: int) -> Laid:
        """A payload from elsewhere, checked."""
        laid = self.lay(check_length(self.name, payload, self.encoded_bytes(count)), count)
        laid.check()
        return laid

    def encode(self, values: F32) -> list[Buffer]:
        out = np.empty(self.encoded_bytes(values.size), dtype=np.uint8).data
        self.encode_into(values, out)
        return [out]

    def encode_into(self, values: F32, out: Buffer) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        laid = self.lay(writable(self.name, out, self.encoded_bytes(values.size)), values.size)
        with kernels.quiet():
            for start in range(0, values.size, laid.at_once):
                laid.write(start, values[start : start + laid.at_once])

    def decode(self, payload: Buffer, count: int) -> F32:
        out = np.empty(count, dtype=np.float32)
        self.decode_into(payload, out)
        return out

    def decode_into(self, payload: Buffer, out: F32) -> None:
        laid = self.open(payload, out.size)
        with kernels.quiet():
            for start in range(0, out.size, laid.at_once):
                room = out[start : start + laid.at_once]
                if (values := laid.read(start, room)) is not room:
                    np.copyto(room, values)

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        laid = self.open(payload, total.size)
        for start in range(0, total.size, laid.at_once):
            laid.add(start, total[start : start + laid.at_once], factor)
