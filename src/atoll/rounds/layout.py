"""What a vector is made of: the layout of named tensors.

All replicas must have equal layouts; the hash is agreed before the first round and stands in every update.
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
