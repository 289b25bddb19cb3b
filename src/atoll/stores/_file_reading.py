"""Reading a file: into memory, or where it lies if it is large and the file system is this machine's own.

A view of a mapped file copies nothing. Objects are replaced and removed by name only, so the mapped one stays as it
was. On a network file system another machine's unlink could take the pages away (SIGBUS), so files are copied there.
"""

from __future__ import annotations

import mmap
import os
from io import FileIO
from pathlib import Path
from typing import NoReturn

from atoll.errors import StoreUnavailable
from atoll.stores._file_errors import translated
from atoll.stores._file_huge import is_huge
from atoll.stores.base import Buffer
from atoll.stores.fast import Descriptor, Straight

_READ_LIMIT = 1 << 30  # one read call returns at most 2 GiB on Linux
_MAP_FROM = 1 << 20
_LOCAL = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
_MOUNTS = Path("/proc/self/mountinfo")


class FileBody(Straight):
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
