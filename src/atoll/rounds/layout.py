"""What a vector is made of, and how it is cut: the layout of named tensors, and the fixed chunk grid over it.

All replicas must have equal layouts; the hash is agreed before the first round and stands in every update.
The grid depends on the layout and the agreed chunk size only, never on who takes part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from atoll.errors import CorruptUpdate, InvalidSpec
from atoll.rounds.seal import canonical

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
CHUNK_MULTIPLE = 1024
"""A chunk holds a multiple of this many elements, so that the blocks of a codec never straddle two chunks."""
_MIB_ELEMENTS = (1 << 20) // 4


@dataclass(frozen=True)
class Tensor:
    """One named part of the vector. `dtype` is a name of `ITEM_BYTES`; numpy has no bfloat16, so bits travel."""

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
    """Named tensors in a fixed order: together they are one flat vector of `size` elements."""

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
        """How `other` differs from this layout, in words; the first few are enough."""
        lines = [
            f"tensor {i}: {_words(a)} here, {_words(b)} there"
            for i, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=False))
            if a != b
        ]
        if len(self.tensors) != len(other.tensors):
            lines.append(f"{len(self.tensors)} tensors here, {len(other.tensors)} there")
        return lines[:5]


@dataclass(frozen=True)
class Grid:
    """Chunk i covers the elements `[i * chunk, (i + 1) * chunk)` of a vector of `size`."""

    size: int
    chunk: int

    def __post_init__(self) -> None:
        is_whole = isinstance(self.chunk, int)
        if self.size < 0 or not is_whole or self.chunk <= 0 or self.chunk % CHUNK_MULTIPLE:
            raise InvalidSpec("chunk grid", [f"chunk={self.chunk!r}: a multiple of {CHUNK_MULTIPLE} above 0"])

    def __len__(self) -> int:
        return (self.size + self.chunk - 1) // self.chunk

    def span(self, index: int) -> tuple[int, int]:
        """The first element of a chunk, and the one after its last."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index * self.chunk, min(self.size, (index + 1) * self.chunk)

    def count(self, index: int) -> int:
        start, stop = self.span(index)
        return stop - start


def default_chunk(size: int, parts: int = 16) -> int:
    """Elements per chunk: small vectors stay whole, others make about `parts` chunks, of 1 to 64 MiB of float32.

    Enough chunks to share the work and overlap it, few enough that requests cost little beside bytes.
    """
    wanted = max(min(max(size // parts, 1 * _MIB_ELEMENTS), 16 * _MIB_ELEMENTS), min(size // 128, 64 * _MIB_ELEMENTS))
    return -(-wanted // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy type that holds the bits of `name`."""
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


def _words(t: Tensor) -> str:
    return f"`{t.name}` {list(t.shape)} {t.dtype}"
