"""How the float32 values of a chunk become bytes: the Codec port, and the codecs by name.

A codec is pure: equal values give equal bytes on every machine, so every replica can recompute a chunk. State such as
an error-feedback residual belongs to the caller, who adds it before and subtracts `decode(encode(x))` after.
A new codec is one module with a `CODEC` and one row in `codec_sizes.CODECS`. No other code names a codec: the rest of
the package asks for the abilities below.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptUpdate
from atoll.kernels import F32 as F32
from atoll.rounds.codecs import CODECS, row_of
from atoll.stores.base import Buffer


class Opened(Protocol):
    """A payload that is known to be of the right length, read piece by piece."""

    def read(self, start: int, room: F32) -> F32:
        """The next `room.size` values from `start`: in `room`, or where they lie.

        `start` is a multiple of 2048; so is the size of `room`, unless it ends with the payload. At most `TILE` values.
        """
        ...


class Addable(Opened, Protocol):
    """One that can be added while it is decoded."""

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        """Add the values from `start` on to a tile, as `Codec.add_into` does."""
        ...


@runtime_checkable
class Codec(Protocol):
    """One way to write a chunk down."""

    name: str
    tile: int
    """How many values are best worked on at once."""
    largest: float
    """Magnitudes above this do not survive; an update that has one is not finite on the wire."""
    is_exact: bool
    """Decoding gives every finite value back, bit for bit."""
    payload_is_values: bool
    """The payload is the values as little-endian float32: one pass can hash, add up and copy large chunks."""
    needs_feedback: bool
    """Training adds what the codec rounded away to the next update, unless the caller chooses otherwise."""

    def encoded_bytes(self, count: int) -> int:
        """Bytes that `count` values take: always the same for a count."""
        ...

    def encode(self, values: F32) -> list[Buffer]:
        """The values as little-endian buffers; may be views of `values`."""
        ...

    def encode_into(self, values: F32, out: Buffer) -> None:
        """Write what `encode` gives into a writable buffer of exactly `encoded_bytes(values.size)` bytes."""
        ...

    def decode(self, payload: Buffer, count: int) -> F32:
        """`count` values; may be a read-only view of `payload`.

        What no finite values give raises `CorruptUpdate`, or comes back as values that are not finite.
        """
        ...

    def decode_into(self, payload: Buffer, out: F32) -> None:
        """Write the `out.size` values of the payload into a contiguous array. Raises as `decode` does."""
        ...

    def open(self, payload: Buffer, count: int) -> Opened:
        """The payload, to be read piece by piece. Raises as `decode` does."""
        ...

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        """`total += decode(payload)`, or `total += factor * decode(payload)` with both operations rounded.

        After `CorruptUpdate` the total is of no use.
        """
        ...

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        """For each value, how far `decode(encode(values))` may be from it. Holds for finite values up to `largest`."""
        ...


@cache
def codec(name: str) -> Codec:
    """The codec of this name, or `UnknownName`."""
    found: Any = import_module(row_of(name).module).CODEC
    assert isinstance(found, Codec)
    return found


def codec_names() -> list[str]:
    return list(CODECS)


def check_length(name: str, payload: Buffer, wanted_bytes: int) -> memoryview:
    """The payload as flat bytes, or `CorruptUpdate` when its length is not what the codec writes."""
    view = memoryview(payload).cast("B")
    if len(view) != wanted_bytes:
        raise CorruptUpdate(f"a {name} payload has {len(view)} bytes, not {wanted_bytes}", check="length")
    return view


def writable(name: str, out: Buffer, wanted_bytes: int) -> memoryview:
    """The buffer to encode into, as flat bytes."""
    view = memoryview(out).cast("B")
    assert not view.readonly, "encoding needs a buffer that can be written"
    assert len(view) == wanted_bytes, f"{name} needs {wanted_bytes} bytes, not {len(view)}"
    return view


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, where they lie."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
