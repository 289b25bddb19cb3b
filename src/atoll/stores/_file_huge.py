"""Files of a tmpfs in huge pages: what the kernel does 512 times otherwise, it does once.

Such files are written and read twice as fast. Only files that are kept to be written again get them: a virtual machine
may have given its free memory back to its host, and then a huge page costs more than 512 small ones that it still has.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_WRITE

from atoll.stores._file_writing import Given, write_at, write_from
from atoll.stores.fast import Unsealed, size_of

HUGE = 2 << 20
_WINDOW = 4 * HUGE
"""Mapped at once: more is not faster, and would show in the memory of the process."""

_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25
_IS_HUGE = stat.S_ISVTX
"""A mark that files of deleted objects keep, and that means nothing else on Linux."""
_FAILED = ctypes.c_void_p(-1).value


def is_huge(found: os.stat_result) -> bool:
    """Whether a file has been written so, and has no holes. It is never made shorter then."""
    return bool(found.st_mode & _IS_HUGE) and found.st_blocks * 512 >= found.st_size


def write(fd: int, data: Given) -> bool:
    """Fill a new file, or one of as many bytes; False if that has to be done another way, whatever was done so far.

    The file is open for reading and writing, and nobody else's.
    """
    found, size = os.fstat(fd), size_of(data)
    whole = size - size % HUGE
    if _libc() is None or found.st_size not in (0, size):
        return False
    try:
        if not (found.st_size and found.st_mode & _IS_HUGE):
            _make(fd, whole)
            os.fchmod(fd, stat.S_IMODE(found.st_mode) | _IS_HUGE)
        elif not is_huge(found):  # a hole may find no memory, which would be the end of us
            return False
        for start in range(0, whole, _WINDOW):
            stop = min(start + _WINDOW, whole)
            with _mapped(fd, start, stop) as address:
                _fill(address, data, start, stop)
    except OSError:
        return False
    if isinstance(data, Unsealed):
        write_from(fd, data, max(whole - data.front_bytes, 0))
    else:
        write_at(fd, b"".join(_between(data, whole, size)), whole)
    return True


def _make(fd: int, size: int) -> None:
    """Give the file huge pages, for what it has and for what it lacks. Its bytes may be lost.

    Takes its time even if it has them: the kernel asks every processor.
    """
    for start in range(0, size, HUGE):
        os.pwrite(fd, b"\0", start)  # where there is nothing at all the kernel makes no huge page
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    with _mapped(fd, 0, size) as address:
        libc = _libc()
        if libc is not None and libc.madvise(address, size, _MADV_COLLAPSE):
            raise _error()


@contextmanager
def _mapped(fd: int, start: int, stop: int) -> Iterator[int]:
    """Where these bytes of the file are in memory: at an address that huge pages can have."""
    libc = _libc()
    assert libc is not None
    length = stop - start
    reserved = _address(libc.mmap(None, length + HUGE, 0, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
    try:
        at = reserved + -reserved % HUGE
        _address(libc.mmap(at, length, PROT_WRITE, MAP_SHARED | _MAP_FIXED, fd, start))
        yield at
    finally:
        libc.munmap(reserved, length + HUGE)


def _fill(address: int, data: Given, start: int, stop: int) -> None:
    """Put these bytes of the file there; of what is unsealed, not the front."""
    if isinstance(data, Unsealed):
        first = max(start, data.front_bytes)
        room = memoryview((ctypes.c_ubyte * (stop - first)).from_address(address + first - start)).cast("B")
        data.look(first - data.front_bytes, stop - data.front_bytes, room)
    else:
        _copy(address, _between(data, start, stop))


def _copy(address: int, parts: Iterator[memoryview]) -> None:
    import numpy as np  # here: most who open a folder need neither them nor us

    from atoll import _passes

    passes = _passes.current()
    for part in parts:
        data = np.frombuffer(part, np.uint8)
        room = np.frombuffer(memoryview((ctypes.c_ubyte * len(part)).from_address(address)), np.uint8)
        if passes is None:
            np.copyto(room, data)  # both let other threads run
        else:
            passes.copy(data, room)
        address += len(part)


def _between(parts: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """What there is from `start` to `stop` of these parts, one after the other."""
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if piece:
            yield piece
        start, stop = start - len(part), stop - len(part)


@cache
def _libc() -> ctypes.CDLL | None:
    """None where there is no such call, or no numpy."""
    if find_spec("numpy") is None or not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_int64), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


def _address(found: int | None) -> int:
    if found is None or found == _FAILED:
        raise _error()
    return found


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
