"""The Codec port: how the float32 values of a chunk become bytes. `codec(name)` gives a codec by name.

A codec is pure: equal values give equal bytes on every machine, so every replica can recompute a chunk. State such as
an error-feedback residual belongs to the caller, which adds it before and subtracts `decode(encode(x))` after.
A new codec is one module with a `CODEC` and one row in `codecs.CODECS`. No other code names a codec: the rest of the
package asks for the abilities below.
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
    """A payload of the right length, read piece by piece."""

    def read(self, start: int, out: F32) -> F32:
        """The next `out.size` values from `start`: written to `out`, or as a view of the payload.

        `start` and the size of `out` are multiples of 2048, except at the end of the payload. At most `TILE` values.
        """
        ...


class Addable(Opened, Protocol):
    """A payload that can be added while it is decoded."""

    def add(self, start: int, total: F32, factor: np.float32 | None) -> None:
        """Add the values from `start` on to `total`, as `Codec.add_into` does."""
        ...


@runtime_checkable
class Codec(Protocol):
    """One encoding of the values of a chunk."""

    name: str
    tile: int
    """How many values to process at a time for the best speed."""
    largest: float
    """The largest magnitude that can be encoded; a larger one becomes a value that is not finite."""
    is_exact: bool
    """Decoding returns every finite value bit for bit."""
    payload_is_values: bool
    """The payload is the values as little-endian float32: one pass can hash, add and copy large chunks."""
    needs_feedback: bool
    """By default, training adds the rounding error of an update to the next update."""

    def encoded_bytes(self, count: int) -> int:
        """The size of the payload of `count` values."""
        ...

    def encode(self, values: F32) -> list[Buffer]:
        """The values as little-endian buffers; may be views of `values`."""
        ...

    def encode_into(self, values: F32, out: Buffer) -> None:
        """Write what `encode` gives into a writable buffer of exactly `encoded_bytes(values.size)` bytes."""
        ...

    def decode(self, payload: Buffer, count: int) -> F32:
        """`count` values; may be a read-only view of `payload`.

        A payload that no finite values encode to raises `CorruptUpdate`, or decodes to values that are not finite.
        """
        ...

    def decode_into(self, payload: Buffer, out: F32) -> None:
        """Write the `out.size` values of the payload into a contiguous array. Raises as `decode` does."""
        ...

    def open(self, payload: Buffer, count: int) -> Opened:
        """Open the payload to read it piece by piece. Raises as `decode` does."""
        ...

    def add_into(self, payload: Buffer, total: F32, factor: np.float32 | None = None) -> None:
        """`total += decode(payload)`, or `total += factor * decode(payload)` with both operations rounded.

        After `CorruptUpdate` the content of `total` is undefined.
        """
        ...

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        """The largest error of `decode(encode(values))`, for each value. Holds for finite values up to `largest`."""
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
    """The payload as flat bytes, or `CorruptUpdate` if the codec writes another length."""
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
    """The bytes of a contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
