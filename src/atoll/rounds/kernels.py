"""The arithmetic on large arrays that codecs, sums and outer steps are made of.

Every function works tile by tile in scratch memory that its thread keeps, so nothing large is allocated.
"""

from __future__ import annotations

from threading import local

import numpy as np

from atoll.rounds.codec import F32

TILE = 1 << 15  # elements; a few tiles of float32 stay in the second-level cache


class Scratch(local):
    """Arrays of one tile, for the calling thread only."""

    def __init__(self) -> None:
        self.values: F32 = np.empty(TILE, dtype=np.float32)


scratch = Scratch()


def add(total: F32, values: F32, factor: np.float32 | None = None) -> None:
    """`total += values`, or `total += factor * values` with both operations rounded."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if factor is None:
            np.add(total, values, out=total)
            return
        for start in range(0, total.size, TILE):
            part = total[start : start + TILE]
            product = np.multiply(values[start : start + TILE], factor, out=scratch.values[: part.size])
            np.add(part, product, out=part)
