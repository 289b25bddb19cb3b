"""Layouts of named tensors, and the sources and sinks of their values.

All replicas must have equal layouts: they agree on the hash before the first round, and every update contains it.
The rounds read an update and write the mean chunk by chunk, without flattening the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptUpdate, InvalidSpec
from atoll.rounds.codecs.base import F32
from atoll.rounds.frames import canonical

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One named tensor of the vector. `dtype` is a key of `ITEM_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Named tensors in a fixed order, which form one flat vector of `size` elements."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        problems = list(_problems(self.tensors))
        if problems:
            raise InvalidSpec("layout", problems)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Iterable[int], str]]) -> Layout:
        """From (name, shape, dtype) triples."""
        return cls(tuple(Tensor(name, tuple(int(n) for n in shape), dtype) for name, shape, dtype in tensors))

    @cached_property
    def size(self) -> int:
        return sum(t.size for t in self.tensors)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the tensors in their own dtypes."""
        return sum(t.size_bytes for t in self.tensors)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of the layout."""
        return hashlib.sha256(canonical(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        try:
            return cls.of((str(name), shape, str(dtype)) for name, shape, dtype in data["tensors"])
        except (KeyError, TypeError, ValueError, InvalidSpec) as exc:
            raise CorruptUpdate(f"not a layout: {exc}", check="layout") from exc

    def differences(self, other: Layout) -> list[str]:
        """The first five differences between this layout and `other`, as text."""
        lines = [
            f"tensor {i}: {_text(a)} here, {_text(b)} there"
            for i, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=False))
            if a != b
        ]
        if len(self.tensors) != len(other.tensors):
            lines.append(f"{len(self.tensors)} tensors here, {len(other.tensors)} there")
        return lines[:5]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy type that holds the bits of `name`; uint16 for bfloat16, which numpy lacks."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def _problems(tensors: tuple[Tensor, ...]) -> Iterable[str]:
    seen: set[str] = set()
    for t in tensors:
        if t.dtype not in ITEM_BYTES:
            yield f"{t.name}: dtype `{t.dtype}` is not one of {', '.join(ITEM_BYTES)}"
        if any(n < 0 for n in t.shape):
            yield f"{t.name}: shape {t.shape} has a negative side"
        if t.name in seen:
            yield f"{t.name}: named twice"
        seen.add(t.name)


def _text(t: Tensor) -> str:
    return f"`{t.name}` {list(t.shape)} {t.dtype}"


@runtime_checkable
class Source(Protocol):
    """The flat float32 vector of an update. Several threads call it, for ranges that do not overlap.

    It must return the same values for the same range until the round ends.
    """

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> F32:
        """The elements `[start, stop)`: a view or a fresh array."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Receives the mean. Several threads call it, once for each range. A failed round may have written some ranges."""

    def write(self, start: int, values: F32) -> None: ...


@runtime_checkable
class BufferSink(Protocol):
    """A sink whose memory can be written directly."""

    def buffer(self, start: int, stop: int) -> F32 | None:
        """The elements `[start, stop)` as one writable array, or None if they are in several arrays."""
        ...


class ArrayVector:
    """Several contiguous float32 arrays as one flat vector: a source and a sink."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array in arrays:
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise TypeError("an update consists of contiguous float32 arrays")
        self._flat: list[F32] = [array.reshape(-1) for array in arrays]
        self._ends = list(accumulate(part.size for part in self._flat))

    @property
    def size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> F32:
        views = [part[a:b] for part, a, b in self._pieces(start, stop)]
        return views[0] if len(views) == 1 else np.concatenate(views) if views else np.empty(0, np.float32)

    def write(self, start: int, values: F32) -> None:
        taken = 0
        for part, a, b in self._pieces(start, start + values.size):
            part[a:b] = values[taken : taken + b - a]
            taken += b - a

    def buffer(self, start: int, stop: int) -> F32 | None:
        found = self._pieces(start, stop)
        return found[0][0][found[0][1] : found[0][2]] if len(found) == 1 else None

    def shares_memory(self, other: ArrayVector) -> bool:
        return any(np.may_share_memory(a, b) for a in self._flat for b in other._flat)

    def _pieces(self, start: int, stop: int) -> list[tuple[F32, int, int]]:
        found = []
        for part, end in zip(self._flat, self._ends, strict=True):
            begin = end - part.size
            a, b = max(start, begin), min(stop, end)
            if a < b:
                found.append((part, a - begin, b - begin))
        return found


def as_source(update: Source | NDArray[Any]) -> Source:
    """An array as a source; a `Source` as it is."""
    return ArrayVector([np.ascontiguousarray(update, dtype=np.float32)]) if isinstance(update, np.ndarray) else update


def are_separate(source: Source, sink: Sink) -> bool:
    """Whether writing to the sink certainly does not change the source."""
    return isinstance(source, ArrayVector) and isinstance(sink, ArrayVector) and not source.shares_memory(sink)
