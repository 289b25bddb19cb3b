"""Several things done to a large array while each tile of it is in the cache: memory is read once, not once for each.

All of it is for `fp32`, whose payload is the values themselves; the payloads of other codecs are small, and are gone
through once more. Nothing here changes a bit: sums and means are those of `reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.kernels import add, quiet
from atoll.rounds.reduce import Coefficients
from atoll.stores.base import Buffer

_TILE = 1 << 18
"""Elements: a part and the sum it goes into stay in the cache, and threads hand the interpreter over seldom."""
_ROW = 4096
"""Values summed up in float32 before the sum goes on in float64: short enough to keep four digits of a norm."""


def squares_and_check(values: F32) -> tuple[float, str]:
    """The sum of squares of the values, and the XXH3-64 of their bytes."""
    state, total = xxhash.xxh3_64(), 0.0
    for start in range(0, values.size, _TILE):
        tile = values[start : start + _TILE]
        state.update(as_bytes(tile))
        total += sum_of_squares(tile)
    return total, state.hexdigest()


def copy_and_check(values: F32, out: F32) -> str:
    """Copy the values; the XXH3-64 of what is in `out` then."""
    state = xxhash.xxh3_64()
    for start in range(0, values.size, _TILE):
        tile = out[start : start + _TILE]
        np.copyto(tile, values[start : start + _TILE])
        state.update(as_bytes(tile))
    return state.hexdigest()


@dataclass(frozen=True)
class Averaged:
    """A mean of payloads: the checksum of each as it was added, that of the result, and whether all of it is finite."""

    checks: tuple[str, ...]
    check: str
    is_finite: bool


def average_and_check(
    payloads: Sequence[Buffer],
    coefficients: Coefficients,
    out: F32,
    *,
    known: Sequence[str] = (),
    is_hashed: bool = True,
    is_surely_finite: bool = False,
) -> Averaged:
    """The mean of `fp32` payloads in rank order, in `out`: the bits of `Accumulator`, in one pass over memory.

    `known` has the checksums of payloads that need not be hashed, and empty texts for the others.
    """
    parts = [np.frombuffer(payload, dtype="<f4") for payload in payloads]
    known = known or [""] * len(parts)
    states, result, is_good = [xxhash.xxh3_64() for _ in parts], xxhash.xxh3_64(), True
    factors = coefficients.factors or (None,) * len(parts)
    for start in range(0, out.size, _TILE):
        room = out[start : start + _TILE]
        for number, (part, state, factor) in enumerate(zip(parts, states, factors, strict=True)):
            tile = part[start : start + _TILE]
            if not known[number]:
                state.update(as_bytes(tile))
            _add(room, tile, factor, is_first=number == 0)
        if coefficients.factors is None and len(parts) > 1:
            with quiet():
                np.divide(room, np.float32(len(parts)), out=room)
        if is_hashed:
            result.update(as_bytes(room))
        is_good = is_good and (is_surely_finite or math.isfinite(sum_of_squares(room)))
    checks = tuple(told or state.hexdigest() for told, state in zip(known, states, strict=True))
    return Averaged(checks, result.hexdigest() if is_hashed else "", is_good)


def _add(room: F32, tile: F32, factor: np.float32 | None, *, is_first: bool) -> None:
    if not is_first:
        add(room, tile, factor)
    elif factor is None:
        np.copyto(room, tile)
    else:
        with quiet():
            np.multiply(tile, factor, out=room)


def sum_of_squares(values: F32) -> float:
    """Not finite if a value is not finite. Exact enough for a norm, and one pass at the speed of memory."""
    rows = values.size // _ROW
    head, tail = values[: rows * _ROW].reshape(rows, _ROW), values[rows * _ROW :]
    with quiet():
        total = float(np.einsum("ij,ij->i", head, head).sum(dtype=np.float64)) + float(np.einsum("i,i->", tail, tail))
        if not math.isfinite(total) or total < 1e-30:  # squares of large or small values do not fit in float32
            total = float(np.square(values, dtype=np.float64).sum())
    return total
