"""The fused kernels of `_fused.c`: hash, square, add, copy, read and write float32 arrays in one pass over memory.

`rounds.one_pass`, `rounds.publish` and the file store call them where `current()` is not None. Otherwise they do the
same with numpy and xxhash, one operation after the other; results and hashes are bit for bit the same. ctypes releases
the interpreter lock during each call.
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

from atoll.kernels.native import Functions, NotUsable, address_of, log, open_library, writable_address

LIBRARY = Path(__file__).with_name("_fused.so")
SOURCE = Path(__file__).with_name("_fused.c")
FROM_FILE, FROM_SOCKET, FROM_HUGE_PAGES = 1, 2, 3
"""Kinds of sources. A socket has its own timeout. A file in huge pages is mapped, so it must not get shorter."""
BLOCK = 256
"""Each piece of an array has a multiple of this many values, except for the last piece."""


class Hash:
    """The XXH3-64 of bytes that arrive in pieces.

    With kernels, their functions hash the pieces: of an array of more than 60 values. Without, `update` does.
    """

    def __init__(self, kernels: FusedKernels | None = None) -> None:
        self.address: int | None = None
        """The state for compiled code; None without kernels."""
        if kernels is None:
            import xxhash  # here and not above: the core install has no xxhash

            self._plain = xxhash.xxh3_64()
            return
        self._state = _HashState()
        self.address = addressof(self._state)
        self._end = kernels.library.atoll_hash_end
        kernels.library.atoll_hash_start(self.address)

    def update(self, data: memoryview) -> None:
        """Hash the next bytes, unless compiled code does."""
        if self.address is None:
            self._plain.update(data)

    def hexdigest(self) -> str:
        return self._plain.hexdigest() if self.address is None else f"{self._end(self.address):016x}"


class Mixture(Structure):
    """`(a * of_a + b * of_b) / divisor`. A division by a power of two is a faster multiplication with equal bits."""

    _fields_ = (
        ("of_a", c_float), ("of_b", c_float), ("scale", c_float), ("divisor", c_float), ("is_divided", c_int),
    )  # fmt: skip

    @classmethod
    def of(cls, of_a: float = 1.0, of_b: float = 1.0, divisor: int = 1) -> Mixture:
        return cls(of_a, of_b, 1.0 / divisor, float(divisor), bool(divisor & (divisor - 1)))


class Source(Structure):
    """An array that compiled code reads by itself: from memory, a file or a socket."""

    _fields_ = (
        ("values", c_void_p), ("ready", c_void_p), ("ready_bytes", c_int64), ("kind", c_int64), ("file", c_int64),
        ("hashed", c_void_p), ("seconds", c_double), ("_window", c_uint64 * 4),
    )  # fmt: skip

    @classmethod
    def in_memory(cls, address: int, hashed: Hash | None) -> Source:
        return cls(values=address, hashed=None if hashed is None else hashed.address)

    @classmethod
    def from_open(cls, file: int, ready: memoryview, kind: int, hashed: Hash) -> Source:
        """The bytes of `ready`, then the next ones of an open file or socket. The caller keeps both alive."""
        front = np.frombuffer(ready, np.uint8)
        address = front.__array_interface__["data"][0] if front.size else None
        return cls(ready=address, ready_bytes=front.size, kind=kind, file=file, hashed=hashed.address)


Operand: TypeAlias = tuple[int, Hash | None]
"""The address of an array, and the hash that its values are added to."""


class FusedKernels:
    """The functions of the library. Outputs are written past the caches, except where noted."""

    def __init__(self, library: CDLL) -> None:
        self.library, self._accumulate = library, library.atoll_accumulate

    def copy(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Non-temporal copy."""
        assert data.size == out.size
        self.library.atoll_copy(address_of(data, np.uint8), data.size, writable_address(out, np.uint8))

    def copy_hashed(self, data: int, out: NDArray[np.float32], hashed: Hash) -> None:
        """Copy `out.size` values from the address `data`, and hash them."""
        self.library.atoll_copy_hashed(hashed.address, data, 4 * out.size, writable_address(out, np.float32))

    def hash_and_norm(self, values: NDArray[np.float32], hashed: Hash, copy: NDArray[np.uint8] | None = None) -> float:
        """Hash the values, and copy them if there is a `copy`. Returns the sum of squares.

        Squares are float32: the sum is infinite if one of them overflows.
        """
        assert copy is None or copy.size == 4 * values.size
        out = None if copy is None else writable_address(copy, np.uint8)
        address = address_of(values, np.float32)
        squares: float = self.library.atoll_hash_and_norm(hashed.address, address, values.size, out)
        return squares

    def write_hashed(
        self, values: NDArray[np.float32], hashed: Hash, file: int, at: int, step: int
    ) -> tuple[float, float]:
        """Hash values and write them to a file from offset `at` on, in steps that end at multiples of `step`.

        Returns the sum of squares, and the seconds that hashing took.
        """
        squares, seconds = c_double(), c_double()
        failed = self.library.atoll_write_hashed(
            hashed.address, address_of(values, np.float32), values.size, file, at, step, byref(squares), byref(seconds)
        )
        if failed:
            raise OSError(failed, os.strerror(failed))
        return squares.value, seconds.value

    def accumulate(self, how: Mixture, a: Operand, b: Operand, out: Operand, count: int, *, is_done: bool) -> None:
        """Mix `count` values of `a` and `b` into `out`, and hash each operand that has a hash.

        `out` may be `a` if `a` has no hash. Only with `is_done` the result is written past the caches.
        """
        hashes = [None if hashed is None else hashed.address for _, hashed in (a, b, out)]
        self._accumulate(byref(how), a[0], hashes[0], b[0], hashes[1], count, out[0], hashes[2], is_done)

    def read(
        self,
        sources: Array[Source],
        steps: Sequence[Mixture],
        out: NDArray[np.float32],
        hashed: Hash | None,
        buffers: NDArray[np.float32],
    ) -> tuple[int, int] | None:
        """Copy the only source to `out`, or accumulate all sources in order; hash each of them, and the result.

        `buffers`: memory for three tiles. Returns None, or the index of the source that could not be read to its end
        with the `errno`, which is 0 if the source ended early.
        """
        assert len(sources) == len(steps) + 1
        tile = buffers.size // 3 // BLOCK * 4 * BLOCK
        task = _ReadTask(
            sources, len(sources), (Mixture * len(steps))(*steps), 4 * out.size, tile,
            writable_address(out, np.float32), writable_address(buffers, np.float32),
            None if hashed is None else hashed.address,
        )  # fmt: skip
        while (state := self.library.atoll_read(byref(task))) == _INTERRUPTED:
            pass  # by a signal: Python has just run its handler
        return None if state == _DONE else (task.turn, task.error)


@cache
def current() -> FusedKernels | None:
    """The fused kernels, or None where they cannot be used."""
    try:
        return load()
    except NotUsable as exc:
        log.info("fused kernels are not used: %s", exc)
        return None


def load(library: Path = LIBRARY, source: Path = SOURCE) -> FusedKernels:
    """The fused kernels, compared with numpy and xxhash, or `NotUsable`."""
    found = open_library(library, source, _FUNCTIONS)
    if not found.atoll_usable():
        raise NotUsable("this processor has no AVX2")
    kernels = FusedKernels(found)
    if (wrong := _disagreement(kernels)) is not None:
        raise NotUsable(f"{library.name} does not compute what numpy and xxhash compute: {wrong}")
    return kernels


def _disagreement(kernels: FusedKernels) -> str | None:
    """The first operation whose result differs from that of numpy or xxhash, or None."""
    try:
        import xxhash
    except ImportError:
        return "there is no xxhash to compare with"
    a, b = np.random.default_rng(0).standard_normal((2, 4 * BLOCK + 3), dtype=np.float32)
    # Not `empty`: memory that was used before may hold the right values already.
    out, copied = np.zeros_like(a), np.zeros_like(a)
    hashes = [Hash(kernels) for _ in range(3)]
    left, right, result = ((address_of(v, np.float32), h) for v, h in zip((a, b, out), hashes, strict=True))
    kernels.accumulate(Mixture.of(0.3, 0.7, 3), left, right, result, a.size, is_done=True)
    if out.tobytes() != ((a * np.float32(0.3) + b * np.float32(0.7)) / np.float32(3)).tobytes():
        return "accumulate"
    if any(h.hexdigest() != xxhash.xxh3_64_hexdigest(v) for v, h in zip((a, b, out), hashes, strict=True)):
        return "hash"
    kernels.copy(a.view(np.uint8), copied.view(np.uint8))
    return None if np.array_equal(a, copied) else "copy"


class _HashState(Structure):
    """`hash` of `_fused.c`."""

    _fields_ = (
        ("lanes", c_uint64 * 8),
        ("bytes", c_uint64),
        ("kept", c_uint64),
        ("before", c_uint8 * 64),
        ("last", c_uint8 * 1024),
    )


class _ReadTask(Structure):
    """`work` of `_fused.c`."""

    _fields_ = (
        ("sources", POINTER(Source)), ("count", c_int64), ("steps", POINTER(Mixture)),
        ("bytes", c_int64), ("tile", c_int64), ("out", c_void_p), ("buffers", c_void_p), ("of_out", c_void_p),
        ("at", c_int64), ("turn", c_int64), ("got", c_int64), ("error", c_int64),
    )  # fmt: skip


_DONE, _INTERRUPTED = 0, 1

_FUNCTIONS: Functions = {
    "atoll_usable": (c_int,),
    "atoll_hash_start": (None, c_void_p),
    "atoll_hash_end": (c_uint64, c_void_p),
    "atoll_copy": (None, c_void_p, c_int64, c_void_p),
    "atoll_copy_hashed": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "atoll_hash_and_norm": (c_double, c_void_p, c_void_p, c_int64, c_void_p),
    "atoll_write_hashed": (
        c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, POINTER(c_double), POINTER(c_double),
    ),
    "atoll_accumulate": (
        None, POINTER(Mixture), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int,
    ),
    "atoll_read": (c_int, POINTER(_ReadTask)),
}  # fmt: skip
