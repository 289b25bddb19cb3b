"""The passes of `_fused.c` over large memory, for whoever has them: all that is done to a byte is done at once.

Who has not does the same with numpy and xxhash, one thing after the other. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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

from atoll.kernels.native import Functions, NotUsable, address_of, opened, room_of

LIBRARY = Path(__file__).with_name("_fused.so")
SOURCE = Path(__file__).with_name("_fused.c")
FROM_FILE, FROM_SOCKET, FROM_HUGE_PAGES = 1, 2, 3
"""Kinds of sources. A socket waits as long as it was told to; a file in huge pages must not get shorter."""
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
    """Values that C gets by itself, all of them."""

    _fields_ = (
        ("values", c_void_p), ("ready", c_void_p), ("ready_bytes", c_int64), ("kind", c_int64), ("file", c_int64),
        ("hashed", c_void_p), ("seconds", c_double), ("_window", c_uint64 * 4),
    )  # fmt: skip

    @classmethod
    def in_memory(cls, address: int, hashed: Hash | None) -> Source:
        return cls(values=address, hashed=None if hashed is None else hashed.address)

    @classmethod
    def from_open(cls, file: int, ready: memoryview, kind: int, hashed: Hash) -> Source:
        """The next bytes of what is open, after those that are `ready`. Both have to stay."""
        front = np.frombuffer(ready, np.uint8)
        address = front.__array_interface__["data"][0] if front.size else None
        return cls(ready=address, ready_bytes=front.size, kind=kind, file=file, hashed=hashed.address)


class _Work(Structure):
    _fields_ = (
        ("sources", POINTER(Source)), ("count", c_int64), ("steps", POINTER(Mixture)),
        ("bytes", c_int64), ("tile", c_int64), ("out", c_void_p), ("rooms", c_void_p), ("of_out", c_void_p),
        ("at", c_int64), ("turn", c_int64), ("got", c_int64), ("error", c_int64),
    )  # fmt: skip


_DONE, _INTERRUPTED = 0, 1


_FUNCTIONS: Functions = {
    "atoll_usable": (c_int,),
    "atoll_hash_start": (None, c_void_p),
    "atoll_hash_end": (c_uint64, c_void_p),
    "atoll_copy": (None, c_void_p, c_int64, c_void_p),
    "atoll_place": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "atoll_look": (c_double, c_void_p, c_void_p, c_int64, c_void_p),
    "atoll_pour": (
        c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, POINTER(c_double), POINTER(c_double),
    ),
    "atoll_mix": (
        None, POINTER(Mixture), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int,
    ),
    "atoll_read": (c_int, POINTER(_Work)),
}  # fmt: skip


class Hash:
    """The XXH3-64 of an array that comes in pieces. It has more than 60 values."""

    def __init__(self, passes: FusedKernels) -> None:
        self._state = _State()
        self.address = addressof(self._state)
        self._end = passes.library.atoll_hash_end
        passes.library.atoll_hash_start(self.address)

    def hexdigest(self) -> str:
        return f"{self._end(self.address):016x}"


Place: TypeAlias = tuple[int, Hash | None]
"""Where values are, and what they are hashed with."""


class FusedKernels:
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

    def look(self, values: NDArray[np.float32], hashed: Hash, copy: NDArray[np.uint8] | None = None) -> float:
        """The sum of squares, as float32 has it: infinite where squares do not fit. Nobody looks at the copy soon."""
        assert copy is None or copy.size == 4 * values.size
        out = None if copy is None else room_of(copy, np.uint8)
        squares: float = self.library.atoll_look(hashed.address, address_of(values, np.float32), values.size, out)
        return squares

    def pour(self, values: NDArray[np.float32], hashed: Hash, file: int, at: int, step: int) -> tuple[float, float]:
        """Write values to a file from `at` on, in steps that end at multiples of `step`, and look at them before.

        The sum of squares, and the seconds that looking took.
        """
        squares, seconds = c_double(), c_double()
        failed = self.library.atoll_pour(
            hashed.address, address_of(values, np.float32), values.size, file, at, step, byref(squares), byref(seconds)
        )
        if failed:
            raise OSError(failed, os.strerror(failed))
        return squares.value, seconds.value

    def mix(self, how: Mixture, a: Place, b: Place, out: Place, count: int, *, is_done: bool) -> None:
        """Mix so many values of two places, and hash each that has a hash. `out` may be `a` if `a` has none."""
        hashes = [None if hashed is None else hashed.address for _, hashed in (a, b, out)]
        self._mix(byref(how), a[0], hashes[0], b[0], hashes[1], count, out[0], hashes[2], is_done)

    def read(
        self,
        sources: Array[Source],
        steps: Sequence[Mixture],
        out: NDArray[np.float32],
        hashed: Hash | None,
        rooms: NDArray[np.float32],
    ) -> tuple[int, int] | None:
        """Place the only source, or mix the second with the first, the third with that, and so on.

        If one of them does not come to its end: which one, and the system's number for why, or 0 if there is no more.
        """
        tile = rooms.size // 3 // BLOCK * 4 * BLOCK
        work = _Work(
            sources, len(sources), (Mixture * len(steps))(*steps), 4 * out.size, tile, room_of(out, np.float32),
            room_of(rooms, np.float32), None if hashed is None else hashed.address,
        )  # fmt: skip
        assert len(sources) == len(steps) + 1
        while (how := self.library.atoll_read(byref(work))) == _INTERRUPTED:
            pass  # by a signal, whose handler has just run
        return None if how == _DONE else (work.turn, work.error)


def load(library: Path = LIBRARY, source: Path = SOURCE) -> FusedKernels:
    """The passes, or `NotUsable`."""
    found = opened(library, source, _FUNCTIONS)
    if not found.atoll_usable():
        raise NotUsable("this processor has no AVX2")
    passes = FusedKernels(found)
    if (wrong := _disagreement(passes)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy and xxhash compute: {wrong}")
    return passes


def _disagreement(passes: FusedKernels) -> str | None:
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
def current() -> FusedKernels | None:
    """The passes if they can be used here."""
    try:
        return load()
    except NotUsable:
        return None
