"""Operations on large `fp32` payloads that read memory once: sum, mean, hash, norm and copy of a tile in the cache.

`average`, `publish` and `prefetch` call this for codecs whose payload is the values themselves; other payloads are
small. With the fused kernels compiled code does it, otherwise numpy and xxhash do; sums and means have the bits of
`reduce` either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import local
from typing import NoReturn, Protocol

import numpy as np

from atoll.kernels import aligned, fused, quiet
from atoll.kernels.fused import FROM_SOCKET, FusedKernels, Hash, Mixture, Source
from atoll.kernels.native import writable_address
from atoll.rounds.codecs.base import F32, Opened, as_bytes
from atoll.rounds.reduce import Accumulator, Coefficients
from atoll.stores.base import Buffer

TILE = 1 << 17
"""Values in a tile: few enough to stay in the caches, and enough to make the interpreter's time negligible."""
LEAST_COMPILED = 1 << 12
"""For fewer values a call to compiled code does not pay. Its hash needs more than 60 values."""
_SMALL_TILE = 1 << 15
"""Values that compiled code reads at a time when no source is a socket."""
_ROW = 4096
"""Values summed in float32 before the sum continues in float64: short enough to keep four digits of a norm."""


class TileBuffer:
    """Memory for one tile."""

    def __init__(self, values: F32) -> None:
        self.address = writable_address(values, np.float32)
        self._bytes = as_bytes(values)

    def bytes_of(self, count: int) -> memoryview:
        """The bytes of the first `count` values."""
        return self._bytes if count == TILE else self._bytes[: 4 * count]


class _Buffers(local):
    """Three tiles of memory for each thread: fresh memory costs more than the work that is done in it."""

    def __init__(self) -> None:
        self.values: F32 = aligned(3 * TILE)
        self.tiles = tuple(TileBuffer(self.values[at : at + TILE]) for at in range(0, 3 * TILE, TILE))


_buffers = _Buffers()


class HashedPayload(Opened, Protocol):
    """An `fp32` payload that is read once, from its beginning to its end, and hashed on the way.

    Either `read` hashes it, or, after `hash_with`, compiled code that gets it by `tile` or `source`.
    """

    @property
    def check(self) -> str:
        """XXH3-64 of what has been read."""
        ...

    def hash_with(self, kernels: FusedKernels) -> Hash | None:
        """The hash that compiled code has to fill; None if the checksum is known already."""
        ...

    def tile(self, start: int, count: int, buffer: TileBuffer) -> int:
        """The address of the next values: in `buffer`, or where they are in memory."""
        ...

    def source(self, count: int) -> Source | None:
        """The next `count` values as a source that compiled code can read; None if it cannot."""
        ...

    def was_read(self, source: Source, count: int) -> None:
        """Compiled code has read `count` values from the source."""
        ...

    def was_cut(self, number: int) -> NoReturn:
        """Compiled code failed to read: `number` is the `errno`, or 0 if the payload ended early. Raises."""
        ...


class InMemory:
    """The `HashedPayload` of bytes in memory; not hashed if its checksum is `known`."""

    def __init__(self, payload: Buffer, known: str = "") -> None:
        self._floats = np.frombuffer(payload, dtype="<f4")
        self._address: int = self._floats.__array_interface__["data"][0]
        self._known, self._hash = known, Hash()

    @property
    def check(self) -> str:
        return self._known or self._hash.hexdigest()

    def read(self, start: int, out: F32) -> F32:
        values = self._floats[start : start + out.size]
        if not self._known:
            self._hash.update(as_bytes(values))
        return values.astype(np.float32, copy=False)

    def hash_with(self, kernels: FusedKernels) -> Hash | None:
        if self._known:
            return None
        self._hash = Hash(kernels)
        return self._hash

    def tile(self, start: int, count: int, buffer: TileBuffer) -> int:  # noqa: ARG002 - the values need no buffer
        assert start + count <= self._floats.size
        return self._address + 4 * start

    def source(self, count: int) -> Source | None:
        assert count <= self._floats.size
        return Source.in_memory(self._address, self._hash)

    def was_read(self, source: Source, count: int) -> None: ...

    def was_cut(self, number: int) -> NoReturn:
        raise AssertionError(f"reading memory failed with error {number}")


@dataclass(frozen=True)
class Averaged:
    """The checksum of each payload as it was added, that of the mean, and whether every value of it is finite."""

    checks: tuple[str, ...]
    check: str
    is_finite: bool


def average_and_check(
    parts: Sequence[HashedPayload],
    coefficients: Coefficients,
    out: F32,
    *,
    is_hashed: bool = True,
    is_surely_finite: bool = False,
) -> Averaged:
    """Write the mean of payloads, given in rank order, to `out`: the bits of `Accumulator`, in one pass over memory."""
    kernels, is_finite = fused.current(), True
    if len(parts) < 2 or out.size < LEAST_COMPILED:
        kernels = None
    result = Hash(kernels) if is_hashed else None

    def on_tile(tile: F32) -> None:
        nonlocal is_finite
        if result is not None:
            result.update(as_bytes(tile))
        is_finite = is_finite and (is_surely_finite or math.isfinite(sum_of_squares(tile)))

    if kernels is None:
        Accumulator(out.size, coefficients, out).add_opened(parts, TILE, on_tile)
    else:
        _average_compiled(kernels, parts, coefficients, out, result, None if is_surely_finite else on_tile)
    return Averaged(tuple(part.check for part in parts), "" if result is None else result.hexdigest(), is_finite)


def copy_hashed(payload: HashedPayload, out: F32) -> None:
    """Read a whole payload into `out`; its `check` is complete then."""
    kernels = fused.current()
    hashed = None if kernels is None or out.size < LEAST_COMPILED else payload.hash_with(kernels)
    if kernels is None or hashed is None:
        for start in range(0, out.size, TILE):
            payload.read(start, out[start : start + TILE])
    elif (source := payload.source(out.size)) is not None:
        _read_compiled(kernels, [payload], [source], [], out, None)
    else:
        buffer = _buffers.tiles[0]  # the same memory for each tile, so that it stays in the cache
        for start in range(0, out.size, TILE):
            tile = out[start : start + TILE]
            kernels.copy_hashed(payload.tile(start, tile.size, buffer), tile, hashed)


def squares_and_check(values: F32) -> tuple[float, str]:
    """The sum of squares of the values, and the XXH3-64 of their bytes."""
    kernels = fused.current() if values.size >= LEAST_COMPILED else None
    hashed = Hash(kernels)
    if kernels is not None:
        return reliable_squares(kernels.hash_and_norm(values, hashed), values), hashed.hexdigest()
    total, raw = 0.0, as_bytes(values)
    for start in range(0, values.size, TILE):
        hashed.update(raw[4 * start : 4 * (start + TILE)])
        total += sum_of_squares(values[start : start + TILE])
    return total, hashed.hexdigest()


def sum_of_squares(values: F32) -> float:
    """The sum of squares with the precision of a norm, in one pass. Not finite if a value is not finite."""
    split, total = values.size // _ROW * _ROW, 0.0
    with quiet():
        if split:
            rows = values[:split].reshape(-1, _ROW)
            # `vecdot` of numpy 2 is faster; rows are so short that its BLAS uses one thread.
            dots = np.vecdot(rows, rows) if hasattr(np, "vecdot") else np.einsum("ij,ij->i", rows, rows)
            total += float(dots.sum(dtype=np.float64))
        if split < values.size:
            total += float(np.einsum("i,i->", values[split:], values[split:]))
    return reliable_squares(total, values)


def reliable_squares(total: float, values: F32) -> float:
    """The sum of squares `total`, computed again in float64 if float32 squares may have over- or underflowed."""
    if math.isfinite(total) and total >= 1e-30:
        return total
    with quiet():
        return float(np.square(values, dtype=np.float64).sum())


def _average_compiled(
    kernels: FusedKernels,
    parts: Sequence[HashedPayload],
    coefficients: Coefficients,
    out: F32,
    result: Hash | None,
    on_tile: Callable[[F32], None] | None,
) -> None:
    """Write the mean of two or more parts to `out`, which overlaps none of them. `on_tile` gets each finished piece."""
    hashes = [part.hash_with(kernels) for part in parts]
    sources = [source for part in parts if (source := part.source(out.size)) is not None]
    steps = _steps(coefficients)
    if len(sources) == len(parts):
        _read_compiled(kernels, parts, sources, steps, out, result)
        if on_tile is not None:
            on_tile(out)
        return
    first, *others = zip(parts, hashes, strict=True)
    first_buffer, other_buffer, sums = _buffers.tiles
    out_address = writable_address(out, np.float32)
    for start in range(0, out.size, TILE):
        count = min(TILE, out.size - start)
        total = first[0].tile(start, count, first_buffer), first[1]
        for (part, hashed), step in zip(others, steps, strict=True):
            values = part.tile(start, count, other_buffer), hashed
            is_last = step is steps[-1]
            target = (out_address + 4 * start, result) if is_last else (sums.address, None)
            kernels.accumulate(step, total, values, target, count, is_done=is_last)
            total = target[0], None
        if on_tile is not None:
            on_tile(out[start : start + count])


def _read_compiled(
    kernels: FusedKernels,
    parts: Sequence[HashedPayload],
    sources: list[Source],
    steps: list[Mixture],
    out: F32,
    result: Hash | None,
) -> None:
    """Let compiled code read every source and write the mean to `out`, in one call."""
    tile = TILE if any(source.kind == FROM_SOCKET for source in sources) else _SMALL_TILE
    array = (Source * len(sources))(*sources)
    failed = kernels.read(array, steps, out, result, _buffers.values[: 3 * tile])
    if failed is not None:
        parts[failed[0]].was_cut(failed[1])
    for part, source in zip(parts, array, strict=True):
        part.was_read(source, out.size)


def _steps(coefficients: Coefficients) -> list[Mixture]:
    """How each part but the first is added to the sum of the parts before it."""
    count, factors = coefficients.count, coefficients.factors
    if factors is None:
        return [Mixture.of(divisor=count if i == count - 1 else 1) for i in range(1, count)]
    return [Mixture.of(float(factors[0]) if i == 1 else 1.0, float(factors[i])) for i in range(1, count)]
