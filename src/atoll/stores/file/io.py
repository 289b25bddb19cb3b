"""Reading a file: into memory, or where it lies if it is large and the file system is this machine's own.

A view of a mapped file copies nothing. Objects are replaced and removed by name only, so the mapped one stays as it
was. On a network file system another machine's unlink could take the pages away (SIGBUS), so files are copied there.

Filling a file of ours with the bytes of an object, slice by slice.

Files of a tmpfs in huge pages: what the kernel does 512 times otherwise, it does once.

Such files are written and read twice as fast. Only files that are kept to be written again get them: a virtual machine
may have given its free memory back to its host, and then a huge page costs more than 512 small ones that it still has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from io import FileIO
from itertools import islice
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_WRITE
from pathlib import Path
from typing import NoReturn, TypeAlias

from atoll.errors import StoreUnavailable
from atoll.stores.base import Buffer, Data, pieces
from atoll.stores.fast import Descriptor, DescriptorBody, HashedWhileWritten, size_of
from atoll.stores.file.paths import translated

Given: TypeAlias = Sequence[memoryview] | HashedWhileWritten
SLICE = 1 << 18
"""Written by one call: where large pages are allowed, the kernel takes some of this size. Larger ones are hardly
faster, and may be had only of memory that a virtual machine has given back to its host, which takes many times as
long."""
_MOST_PARTS = 256  # of one write call; Linux allows 1 024


def given(data: Data) -> Given:
    return data if isinstance(data, HashedWhileWritten) else pieces(data)


def write(fd: int, data: Given) -> None:
    """Write all of it, from the beginning of the file on."""
    if isinstance(data, HashedWhileWritten):
        write_from(fd, data, 0)
        return
    left = deque(part for part in data if part)
    room = SLICE
    while left:
        written = os.writev(fd, _front(left, room))
        room = room - written or SLICE
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def write_from(fd: int, data: HashedWhileWritten, start: int) -> None:
    """Write what is left of a payload, and the front."""
    if start < len(data.payload):
        data.write_hashed(fd, start, len(data.payload), SLICE)
    write_at(fd, data.front(), 0)


def write_at(fd: int, data: Buffer, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written


def _front(parts: Iterable[memoryview], room: int) -> list[memoryview]:
    """The first `room` bytes of these parts, or less if there are many of them."""
    front: list[memoryview] = []
    for part in islice(parts, _MOST_PARTS):
        front.append(part[:room])
        room -= len(front[-1])
        if not room:
            break
    return front


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


def write_huge(fd: int, data: Given) -> bool:
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
    if isinstance(data, HashedWhileWritten):
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
    if isinstance(data, HashedWhileWritten):
        first = max(start, data.front_bytes)
        room = memoryview((ctypes.c_ubyte * (stop - first)).from_address(address + first - start)).cast("B")
        data.hash_and_norm(first - data.front_bytes, stop - data.front_bytes, room)
    else:
        _copy(address, _between(data, start, stop))


def _copy(address: int, parts: Iterator[memoryview]) -> None:
    import numpy as np  # here: most who open a folder need neither them nor us

    from atoll.kernels import fused

    passes = fused.current()
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


_READ_LIMIT = 1 << 30  # one read call returns at most 2 GiB on Linux
_MAP_FROM = 1 << 20
_LOCAL = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
_MOUNTS = Path("/proc/self/mountinfo")


class FileBody(DescriptorBody):
    """An open file, read from its beginning."""

    def __init__(self, fd: int, uri: str, key: str, *, may_be_huge: bool = False) -> None:
        self._uri, self._key = uri, key
        try:
            self._file = FileIO(fd)
        except OSError as exc:  # a folder
            os.close(fd)
            raise translated(exc, "read", uri, key) from exc
        found = os.fstat(fd)
        self.size = found.st_size
        self._is_huge = may_be_huge and is_huge(found)  # a copy on another file system keeps the mark

    def readinto(self, buffer: memoryview) -> None:
        try:
            while (count := self._file.readinto(buffer)) < len(buffer):
                if not count:
                    self.was_cut(None)
                buffer = buffer[count:]
        except OSError as exc:
            self.was_cut(exc)
        except ValueError as exc:
            raise StoreUnavailable(f"`{self._key}` in {self._uri} is closed", uri=self._uri, key=self._key) from exc

    def descriptor(self) -> Descriptor:
        return Descriptor(self._file.fileno(), is_huge=self._is_huge)

    def was_read(self, count: int) -> None:
        """The file knows."""

    def was_cut(self, error: OSError | None) -> NoReturn:
        if error is not None:
            raise translated(error, "read", self._uri, self._key) from error
        raise StoreUnavailable(f"`{self._key}` in {self._uri} ended early", uri=self._uri, key=self._key, reason="cut")

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def read(fd: int, start: int, length: int | None, *, may_map: bool) -> Buffer:
    """The bytes of an open file from `start`, as far as there are any."""
    size = os.fstat(fd).st_size
    end = size if length is None else min(size, start + length)
    if may_map and start == 0 and end == size >= _MAP_FROM:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return memoryview(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ))
    chunks: list[bytes] = []
    while start < end:
        chunk = os.pread(fd, min(end - start, _READ_LIMIT), start)
        if not chunk:
            break
        chunks.append(chunk)
        start += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def is_local(kind: str) -> bool:
    """Whether only this machine writes to such a file system."""
    return kind in _LOCAL


def file_system(folder: Path) -> str:
    """What kind of file system the folder is on; empty if nobody knows."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        inside = folder == Path(point) or point == "/" or str(folder).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
