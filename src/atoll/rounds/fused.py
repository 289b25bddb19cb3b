"""Several things done to a large array while each tile of it is in the cache: memory is read once, not once for each.

All of it is for `fp32`, whose payload is the values themselves; the payloads of other codecs are small, and are gone
through once more. Nothing here changes a bit: sums and means are those of `reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import xxhash

from atoll import _passes
from atoll._passes import Hash, Passes, Source
from atoll.rounds import mixed
from atoll.rounds.codec import F32, Opened, as_bytes
from atoll.rounds.kernels import quiet
from atoll.rounds.reduce import Accumulator, Coefficients
from atoll.stores.base import Buffer

TILE = 1 << 17
"""Elements: small enough for the caches, large enough for the interpreter not to be noticed."""
LEAST_COMPILED = 1 << 12
"""Fewer values are not worth a call to compiled code, and the shortest have another hash there."""
_ROW = 4096
"""Values summed up in float32 before the sum goes on in float64: short enough to keep four digits of a norm."""


def squares_and_check(values: F32) -> tuple[float, str]:
    """The sum of squares of the values, and the XXH3-64 of their bytes."""
    passes = _passes.current()
    if passes is not None and values.size >= LEAST_COMPILED:
        hashed = Hash(passes)
        return sound(passes.look(values, hashed), values), hashed.hexdigest()
    state, total, raw = xxhash.xxh3_64(), 0.0, as_bytes(values)
    for start in range(0, values.size, TILE):
        state.update(raw[4 * start : 4 * (start + TILE)])
        total += sum_of_squares(values[start : start + TILE])
    return total, state.hexdigest()


class InMemory:
    """A payload of `fp32` that lies in memory, hashed as it is read unless its checksum is `known`."""

    def __init__(self, payload: Buffer, known: str = "") -> None:
        self._floats = np.frombuffer(payload, dtype="<f4")
        self._address: int = self._floats.__array_interface__["data"][0]
        self._known = known
        self._state: xxhash.xxh3_64 | Hash = xxhash.xxh3_64()

    @property
    def check(self) -> str:
        return self._known or self._state.hexdigest()

    def read(self, start: int, room: F32) -> F32:
        values = self._floats[start : start + room.size]
        if not self._known and isinstance(self._state, xxhash.xxh3_64):
            self._state.update(as_bytes(values))
        return values.astype(np.float32, copy=False)

    def hashed_by(self, passes: Passes) -> Hash | None:
        if self._known:
            return None
        self._state = Hash(passes)
        return self._state

    def tile(self, start: int, count: int, room: mixed.Room) -> int:  # noqa: ARG002 - it has its place
        assert start + count <= self._floats.size
        return self._address + 4 * start

    def source(self, count: int) -> Source | None:
        assert count <= self._floats.size
        return Source.in_memory(self._address, self._state if isinstance(self._state, Hash) else None)

    def was_read(self, source: Source, count: int) -> None:
        """It was there."""

    def was_cut(self, number: int) -> NoReturn:  # noqa: ARG002 - there is no such case
        raise AssertionError("memory is always whole")


class Hashed(Opened, mixed.Tiled, Protocol):
    """A payload of `fp32` that is hashed as it is read, once and in order."""

    @property
    def check(self) -> str: ...


@dataclass(frozen=True)
class Averaged:
    """A mean of payloads: the checksum of each as it was added, that of the result, and whether all of it is finite."""

    checks: tuple[str, ...]
    check: str
    is_finite: bool


def place(payload: Hashed, out: F32) -> None:
    """Read a whole payload of `fp32` to where its values belong; its `check` is known then."""
    passes = _passes.current()
    if passes is not None and out.size >= LEAST_COMPILED and (hashed := payload.hashed_by(passes)) is not None:
        mixed.place(passes, payload, hashed, out)
        return
    for start in range(0, out.size, TILE):
        payload.read(start, out[start : start + TILE])


def average_and_check(
    parts: Sequence[Hashed],
    coefficients: Coefficients,
    out: F32,
    *,
    is_hashed: bool = True,
    is_surely_finite: bool = False,
) -> Averaged:
    """The mean of `fp32` payloads in rank order, in `out`: the bits of `Accumulator`, in one pass over memory."""
    passes, is_good = _passes.current(), True
    result: xxhash.xxh3_64 | Hash | None = None

    def done(tile: F32) -> None:
        nonlocal is_good
        if isinstance(result, xxhash.xxh3_64):
            result.update(as_bytes(tile))
        is_good = is_good and (is_surely_finite or math.isfinite(sum_of_squares(tile)))

    if passes is not None and len(parts) > 1 and out.size >= LEAST_COMPILED:
        result = Hash(passes) if is_hashed else None
        mixed.mean(passes, parts, coefficients, out, result, None if is_surely_finite else done)
    else:
        result = xxhash.xxh3_64() if is_hashed else None
        Accumulator(out.size, coefficients, out).add_opened(parts, TILE, done)
    return Averaged(tuple(part.check for part in parts), result.hexdigest() if result else "", is_good)


def _rows_dot(rows: F32) -> F32:
    """Each row times itself. numpy 2 has the faster way; rows are short enough for its BLAS to stay in one thread."""
    found: F32 = np.vecdot(rows, rows) if hasattr(np, "vecdot") else np.einsum("ij,ij->i", rows, rows)
    return found


def sum_of_squares(values: F32) -> float:
    """Not finite if a value is not finite. Exact enough for a norm, and one pass at the speed of memory."""
    split, total = values.size // _ROW * _ROW, 0.0
    with quiet():
        if split:
            total += float(_rows_dot(values[:split].reshape(-1, _ROW)).sum(dtype=np.float64))
        if split < values.size:
            total += float(np.einsum("i,i->", values[split:], values[split:]))
    return sound(total, values)


def sound(total: float, values: F32) -> float:
    """A sum of squares, once more in float64 if squares of large or small values did not fit in float32."""
    if math.isfinite(total) and total >= 1e-30:
        return total
    with quiet():
        return float(np.square(values, dtype=np.float64).sum())
