"""How a vector is cut: the fixed chunk grid over it. Without numpy, because planning needs it too.

The grid depends on the size of the vector and the agreed chunk size only, never on who takes part.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import InvalidSpec

CHUNK_MULTIPLE = 1024
"""A chunk holds a multiple of this many elements, so that the blocks of a codec never straddle two chunks."""
_MIB_ELEMENTS = (1 << 20) // 4


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
