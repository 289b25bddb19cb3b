"""Several things done to a large array while each tile of it is in the cache: memory is read once, not once for each.

All of it is for `fp32`, whose payload is the values themselves; the payloads of other codecs are small, and are gone
through once more. Nothing here changes a bit: sums and means are those of `reduce`.

`fp32` payloads by the compiled passes: added up, divided and hashed in one go, the bits of `reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import local
from typing import NoReturn, Protocol

import numpy as np
import xxhash

from atoll.kernels import aligned, fused, quiet
from atoll.kernels.fused import FROM_SOCKET, FusedKernels, Hash, Mixture, Source
from atoll.kernels.native import room_of
from atoll.rounds.codecs.base import F32, Opened, as_bytes
from atoll.rounds.reduce import Accumulator, Coefficients
from atoll.stores.base import Buffer

TILE = 1 << 17
"""Values: few enough to stay in the caches until they are added, and enough for the interpreter not to be noticed."""
_NEAR = 1 << 15
"""What compiled code reads at a time if it need not wait for it."""


class Room:
    """Memory for a tile, and where that is."""

    def __init__(self, values: F32) -> None:
        self.address = room_of(values, np.float32)
        self._bytes = as_bytes(values)

    def bytes_of(self, count: int) -> memoryview:
        return self._bytes if count == TILE else self._bytes[: 4 * count]


class _Rooms(local):
    """Of the calling thread only: memory that is new costs more than what is done in it."""

    def __init__(self) -> None:
        self.values: F32 = aligned(3 * TILE)
        self.all = tuple(Room(self.values[at : at + TILE]) for at in range(0, 3 * TILE, TILE))


_rooms = _Rooms()


class Tiled(Protocol):
    """A payload whose values come tile by tile, from its beginning to its end."""

    def hashed_by(self, passes: FusedKernels) -> Hash | None:
        """Leave hashing to whoever takes the tiles; None if its hash is known."""
        ...

    def tile(self, start: int, count: int, room: Room) -> int:
        """Where the next values are: in the room, if they have no other place."""
        ...

    def source(self, count: int) -> Source | None:
        """So many values, if compiled code can get at them; hashed already, or by `hashed_by`."""
        ...

    def was_read(self, source: Source, count: int) -> None:
        """Compiled code has got so many values from there."""
        ...

    def was_cut(self, number: int) -> NoReturn:
        """It could not, and has the system's number for why, or 0 if there was no more. Raises what is the matter."""
        ...


def compiled_mean(
    passes: FusedKernels,
    parts: Sequence[Tiled],
    coefficients: Coefficients,
    out: F32,
    result: Hash | None,
    done: Callable[[F32], None] | None,
) -> None:
    """Fill `out` with the mean of at least two parts, none of which lies there. `done` gets it piece by piece."""
    hashes = [part.hashed_by(passes) for part in parts]
    sources = [source for part in parts if (source := part.source(out.size)) is not None]
    steps = _steps(coefficients)
    if len(sources) == len(parts):
        _at_once(passes, parts, sources, steps, out, result)
        if done is not None:
            done(out)
        return
    first, *others = zip(parts, hashes, strict=True)
    first_room, room_for_others, sums = _rooms.all
    out_at = room_of(out, np.float32)
    for start in range(0, out.size, TILE):
        count = min(TILE, out.size - start)
        total, of_total = first[0].tile(start, count, first_room), first[1]
        for (part, hashed), step in zip(others, steps, strict=True):
            values = part.tile(start, count, room_for_others)
            is_last = step is steps[-1]
            room, of_room = (out_at + 4 * start, result) if is_last else (sums.address, None)
            passes.mix(step, (total, of_total), (values, hashed), (room, of_room), count, is_done=is_last)
            total, of_total = room, None
        if done is not None:
            done(out[start : start + count])


def place_compiled(passes: FusedKernels, payload: Tiled, hashed: Hash, out: F32) -> None:
    """Fill `out` with a payload that is received where its last tile was: near, not far."""
    source = payload.source(out.size)
    if source is not None:
        _at_once(passes, [payload], [source], [], out, None)
        return
    room = _rooms.all[0]
    for start in range(0, out.size, TILE):
        tile = out[start : start + TILE]
        passes.place(payload.tile(start, tile.size, room), tile, hashed)


def _at_once(
    passes: FusedKernels,
    parts: Sequence[Tiled],
    sources: list[Source],
    steps: list[Mixture],
    out: F32,
    result: Hash | None,
) -> None:
    """Let compiled code get all there is by itself."""
    tile = TILE if any(source.kind == FROM_SOCKET for source in sources) else _NEAR
    given = (Source * len(sources))(*sources)
    failed = passes.read(given, steps, out, result, _rooms.values[: 3 * tile])
    if failed is not None:
        parts[failed[0]].was_cut(failed[1])
    for part, source in zip(parts, given, strict=True):
        part.was_read(source, out.size)


def _steps(coefficients: Coefficients) -> list[Mixture]:
    """How each part but the first is added to what came before it."""
    count, factors = coefficients.count, coefficients.factors
    if factors is None:
        return [Mixture.of(divisor=count if turn == count - 1 else 1) for turn in range(1, count)]
    return [Mixture.of(float(factors[0]) if turn == 1 else 1.0, float(factors[turn])) for turn in range(1, count)]


"""Elements: small enough for the caches, large enough for the interpreter not to be noticed."""
LEAST_COMPILED = 1 << 12
"""Fewer values are not worth a call to compiled code, and the shortest have another hash there."""
_ROW = 4096
"""Values summed up in float32 before the sum goes on in float64: short enough to keep four digits of a norm."""


def squares_and_check(values: F32) -> tuple[float, str]:
    """The sum of squares of the values, and the XXH3-64 of their bytes."""
    passes = fused.current()
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

    def hashed_by(self, passes: FusedKernels) -> Hash | None:
        if self._known:
            return None
        self._state = Hash(passes)
        return self._state

    def tile(self, start: int, count: int, room: Room) -> int:  # noqa: ARG002 - it has its place
        assert start + count <= self._floats.size
        return self._address + 4 * start

    def source(self, count: int) -> Source | None:
        assert count <= self._floats.size
        return Source.in_memory(self._address, self._state if isinstance(self._state, Hash) else None)

    def was_read(self, source: Source, count: int) -> None:
        """It was there."""

    def was_cut(self, number: int) -> NoReturn:  # noqa: ARG002 - there is no such case
        raise AssertionError("memory is always whole")


class Hashed(Opened, Tiled, Protocol):
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
    passes = fused.current()
    if passes is not None and out.size >= LEAST_COMPILED and (hashed := payload.hashed_by(passes)) is not None:
        place_compiled(passes, payload, hashed, out)
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
    passes, is_good = fused.current(), True
    result: xxhash.xxh3_64 | Hash | None = None

    def done(tile: F32) -> None:
        nonlocal is_good
        if isinstance(result, xxhash.xxh3_64):
            result.update(as_bytes(tile))
        is_good = is_good and (is_surely_finite or math.isfinite(sum_of_squares(tile)))

    if passes is not None and len(parts) > 1 and out.size >= LEAST_COMPILED:
        result = Hash(passes) if is_hashed else None
        compiled_mean(passes, parts, coefficients, out, result, None if is_surely_finite else done)
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
