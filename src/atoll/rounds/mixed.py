"""`fp32` payloads by the compiled passes: added up, divided and hashed in one go, the bits of `reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local
from typing import NoReturn, Protocol

import numpy as np

from atoll._compiled import room_of
from atoll._passes import FROM_SOCKET, Hash, Mixture, Passes, Source
from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.kernels import aligned
from atoll.rounds.reduce import Coefficients

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

    def hashed_by(self, passes: Passes) -> Hash | None:
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


def mean(
    passes: Passes,
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


def place(passes: Passes, payload: Tiled, hashed: Hash, out: F32) -> None:
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
    passes: Passes, parts: Sequence[Tiled], sources: list[Source], steps: list[Mixture], out: F32, result: Hash | None
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
