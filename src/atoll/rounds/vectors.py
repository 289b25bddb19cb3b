"""Where the values of an update come from and where the mean goes, chunk by chunk, without flattening a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.rounds.codec import F32


@runtime_checkable
class Source(Protocol):
    """The flat float32 vector of an update. Called from several threads, for ranges that do not overlap.

    Must give the same values for the same range until the round is over.
    """

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> F32:
        """The elements `[start, stop)`: a view or a fresh array."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Takes the mean. Called from several threads, once for each range; a failed round may have filled only some."""

    def write(self, start: int, values: F32) -> None: ...


@runtime_checkable
class Room(Protocol):
    """A sink that can be written to where it lies."""

    def room(self, start: int, stop: int) -> F32 | None:
        """The place of the elements `[start, stop)` as one writable array, or None if it is not in one piece."""
        ...


class Parts:
    """Several arrays as one flat vector: both a source and a sink. Arrays must be contiguous and float32."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array in arrays:
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise TypeError("an update is made of contiguous float32 arrays")
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

    def room(self, start: int, stop: int) -> F32 | None:
        found = self._pieces(start, stop)
        return found[0][0][found[0][1] : found[0][2]] if len(found) == 1 else None

    def shares_memory(self, other: Parts) -> bool:
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
    """An array is read as it lies; anything else must be a `Source`."""
    return Parts([np.ascontiguousarray(update, dtype=np.float32)]) if isinstance(update, np.ndarray) else update


def are_separate(source: Source, sink: Sink) -> bool:
    """Whether writing to the sink surely leaves the source as it is."""
    return isinstance(source, Parts) and isinstance(sink, Parts) and not source.shares_memory(sink)
