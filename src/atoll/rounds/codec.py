"""How the float32 values of a chunk become bytes: the Codec port, and the register of codecs by name.

A codec is pure: equal values give equal bytes on every machine, so a chunk can be recomputed by anyone. State such as
an error-feedback residual belongs to the caller, who adds it before and subtracts `decode(encode(x))` after.
Adding a codec is one small file with a `CODEC`, and one row in `_MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptUpdate, UnknownName
from atoll.stores.base import Buffer

F32: TypeAlias = NDArray[np.float32]

_MODULES = {"fp32": "codec_fp32", "bf16": "codec_bf16"}
DEFAULT = "bf16"


@runtime_checkable
class Codec(Protocol):
    """One way to write a chunk down."""

    name: str
    largest: float
    """Magnitudes above this do not survive; an update that has one is not finite on the wire."""

    def encoded_bytes(self, count: int) -> int:
        """Bytes that `count` values take: always the same for a count."""
        ...

    def encode(self, values: F32) -> list[Buffer]:
        """The values as little-endian buffers; may be views of `values`."""
        ...

    def decode(self, payload: Buffer, count: int) -> F32:
        """`count` values; may be a read-only view of `payload`. Wrong length raises `CorruptUpdate`."""
        ...

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        """For each value, how far `decode(encode(values))` may be from it. Holds for finite values up to `largest`."""
        ...


def codec(name: str) -> Codec:
    """The codec of this name, or `UnknownName`."""
    if name not in _MODULES:
        raise UnknownName("codec", name, list(_MODULES))
    found: Any = import_module(f"atoll.rounds.{_MODULES[name]}").CODEC
    assert isinstance(found, Codec)
    return found


def codec_names() -> list[str]:
    return list(_MODULES)


def check_length(name: str, payload: Buffer, wanted_bytes: int) -> memoryview:
    """The payload as flat bytes, or `CorruptUpdate` when its length is not what the codec writes."""
    view = memoryview(payload).cast("B")
    if len(view) != wanted_bytes:
        raise CorruptUpdate(f"a {name} payload has {len(view)} bytes, not {wanted_bytes}", check="length")
    return view


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, where they lie."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
