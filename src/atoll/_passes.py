"""The passes of `_passes_native.c` over large memory, for whoever has them: all that is done to a byte is done at once.

Who has not does the same with numpy and xxhash, one thing after the other. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

from ctypes import (
    CDLL,
    POINTER,
    Array,
    Structure,
    addressof,
    byref,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_uint8,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll._compiled import Functions, NotUsable, address_of, opened, room_of

LIBRARY = Path(__file__).with_name("_passes_native.so")
SOURCE = Path(__file__).with_name("_passes_native.c")
TILE_BYTES = 1 << 17
"""What C reads of a file at a time."""
BLOCK = 256
"""Arrays come in pieces of a multiple of so many values, but for the last one."""


class _State(Structure):
    """What C keeps of a hash between two pieces."""

    _fields_ = (
        ("lanes", c_uint64 * 8),
        ("bytes", c_uint64),
        ("kept", c_uint64),
        ("before", c_uint8 * 64),
        ("last", c_uint8 * 1024),
    )


class Mixture(Structure):
    """`(a * of_a + b * of_b) / divisor`; a power of two is multiplied by its inverse, which is the same sooner."""

    _fields_ = (
        ("of_a", c_float), ("of_b", c_float), ("scale", c_float), ("divisor", c_float), ("is_divided", c_int),
    )  # fmt: skip

    @classmethod
    def of(cls, of_a: float = 1.0, of_b: float = 1.0, divisor: int = 1) -> Mixture:
        return cls(of_a, of_b, 1.0 / divisor, float(divisor), bool(divisor & (divisor - 1)))


class Source(Structure):
    """Values that C finds by itself: in memory, or from where a file has been read to. A file has no `values`."""

    _fields_ = (
        ("values", c_void_p), ("hashed", c_void_p), ("seconds", c_double), ("file", c_int64), ("is_mapped", c_int64),
        ("_window", c_uint64 * 4),
    )  # fmt: skip


_FUNCTIONS: Functions = {
    "atoll_usable": (c_int,),
    "atoll_hash_start": (None, c_void_p),
    "atoll_hash_end": (c_uint64, c_void_p),
    "atoll_copy": (None, c_void_p, c_int64, c_void_p),
    "atoll_place": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "atoll_look": (c_double, c_void_p, c_void_p, c_int64),
    "atoll_mix": (
        None, POINTER(Mixture), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int,
    ),
    "atoll_place_from": (c_int, POINTER(Source), c_int64, c_void_p, c_void_p),
    "atoll_mix_from": (c_int, POINTER(Source), c_int, POINTER(Mixture), c_int64, c_void_p, c_void_p, c_void_p),
}  # fmt: skip


class Hash:
    """The XXH3-64 of an array that comes in pieces. It has more than 60 values."""

    def __init__(self, passes: Passes) -> None:
        self._state = _State()
        self.address = addressof(self._state)
        self._end = passes.library.atoll_hash_end
        passes.library.atoll_hash_start(self.address)

    def hexdigest(self) -> str:
        return f"{self._end(self.address):016x}"


Place: TypeAlias = tuple[int, Hash | None]
"""Where values are, and what they are hashed with."""


class Passes:
    """What the library can do."""

    def __init__(self, library: CDLL) -> None:
        self.library, self._mix = library, library.atoll_mix

    def copy(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Copy what nobody will look at soon."""
        assert data.size == out.size
        self.library.atoll_copy(address_of(data, np.uint8), data.size, room_of(out, np.uint8))

    def place(self, data: int, out: NDArray[np.float32], hashed: Hash) -> None:
        """Copy values that have just been received to where nobody will look at them soon, and hash them."""
        self.library.atoll_place(hashed.address, data, 4 * out.size, room_of(out, np.float32))

    def place_from(self, source: Source, out: NDArray[np.float32], room: int) -> bool:
        """The same with all that a file still has; whether it came. The room is for a tile."""
        placed: int = self.library.atoll_place_from(byref(source), 4 * out.size, room_of(out, np.float32), room)
        return bool(placed)

    def look(self, values: NDArray[np.float32], hashed: Hash) -> float:
        """The sum of squares, as float32 has it: infinite where squares do not fit."""
        squares: float = self.library.atoll_look(hashed.address, address_of(values, np.float32), values.size)
        return squares

    def mix(self, how: Mixture, a: Place, b: Place, out: Place, count: int, *, is_done: bool) -> None:
        """Mix so many values of two places, and hash each that has a hash. `out` may be `a` if `a` has none."""
        hashes = [None if hashed is None else hashed.address for _, hashed in (a, b, out)]
        self._mix(byref(how), a[0], hashes[0], b[0], hashes[1], count, out[0], hashes[2], is_done)

    def mix_from(
        self, sources: Array[Source], steps: Array[Mixture], out: NDArray[np.float32], hashed: Hash | None, rooms: int
    ) -> int | None:
        """Mix the second source with the first, the third with that, and so on: which one did not come, if any.

        The rooms are for three tiles, one after the other.
        """
        of_out = None if hashed is None else hashed.address
        failed: int = self.library.atoll_mix_from(
            sources, len(sources), steps, 4 * out.size, room_of(out, np.float32), of_out, rooms
        )
        return None if failed < 0 else failed


def load(library: Path = LIBRARY, source: Path = SOURCE) -> Passes:
    """The passes, or `NotUsable`."""
    found = opened(library, source, _FUNCTIONS)
    if not found.atoll_usable():
        raise NotUsable("this processor has no AVX2")
    passes = Passes(found)
    if (wrong := _disagreement(passes)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy and xxhash compute: {wrong}")
    return passes


def _disagreement(passes: Passes) -> str | None:
    """The first pass that gives something else than the same done one after the other, or None."""
    try:
        import xxhash
    except ImportError:
        return "there is no xxhash to compare with"
    a, b = np.random.default_rng(0).standard_normal((2, 4 * BLOCK + 3), dtype=np.float32)
    of_a, of_b, of_out = (Hash(passes) for _ in range(3))
    out, copied = np.empty_like(a), np.empty_like(a)
    left, right, room = ((address_of(v, np.float32), h) for v, h in ((a, of_a), (b, of_b), (out, of_out)))
    passes.mix(Mixture.of(0.3, 0.7, 3), left, right, room, a.size, is_done=True)
    if out.tobytes() != ((a * np.float32(0.3) + b * np.float32(0.7)) / np.float32(3)).tobytes():
        return "mix"
    if any(h.hexdigest() != xxhash.xxh3_64_hexdigest(v) for h, v in ((of_a, a), (of_b, b), (of_out, out))):
        return "hash"
    passes.copy(a.view(np.uint8), copied.view(np.uint8))
    return None if np.array_equal(a, copied) else "copy"


@cache
def current() -> Passes | None:
    """The passes if they can be used here."""
    try:
        return load()
    except NotUsable:
        return None
