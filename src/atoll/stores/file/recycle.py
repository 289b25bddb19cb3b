"""Files of deleted objects, kept to be overwritten: overwriting pages is several times faster than allocating new ones.

Only for objects without readers. A kept file is used for an object of exactly its size, so that no late reader sees a
file shrink; the bytes change while it reads, which its checksums detect.
"""

from __future__ import annotations

import math
import os
import random
import stat
import uuid
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock

SPARE_FOLDER = "spare"
LEAST_BYTES = 1 << 16
_numbers = count()
_MOST = 512
"""Kept files of one size; further files are deleted."""


class RecycledFiles:
    """Kept files, shared by every process that uses the folder: a rename takes a file, and only one process gets it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = Lock()
        self._prefix = f"{uuid.uuid4().hex}."
        self._known: dict[int, list[str]] = {}

    def keep(self, path: str) -> bool:
        """Keep the file of a deleted object; False if there is none, or if it is too small or one too many."""
        try:
            size = os.stat(path).st_size
        except OSError:
            return False
        if size < LEAST_BYTES:
            return False
        folder = f"{self._folder}/{size}"
        with self._lock:
            known = self._known.setdefault(size, [])
            if len(known) >= _MOST:
                return False
        name = f"{self._prefix}{os.getpid()}.{next(_numbers)}"
        if not os.path.isdir(folder):
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError:  # for instance a full disk, where deleting must still work
                return False
        os.rename(path, f"{folder}/{name}")
        with self._lock:
            known.append(name)
        return True

    def take(self, size: int, target: str) -> bool:
        """Rename a kept file of this size to `target`; False if there is none."""
        if size < LEAST_BYTES:
            return False
        known = self._known.setdefault(size, [])
        return self._take_one(size, known, target) or (self._list(size, known) and self._take_one(size, known, target))

    def _list(self, size: int, known: list[str]) -> bool:
        """List the kept files, also of other processes; False if there is none."""
        try:
            found = os.listdir(f"{self._folder}/{size}")
        except FileNotFoundError:
            return False
        random.shuffle(found)  # so that processes try different files
        with self._lock:
            known[:] = found
        return bool(found)

    def _take_one(self, size: int, known: list[str], target: str) -> bool:
        """Take one of the known files that still exists."""
        while True:
            with self._lock:
                if not known:
                    return False
                path = f"{self._folder}/{size}/{known.pop()}"
            with suppress(FileNotFoundError, PermissionError):  # another process took it, or another user owns it
                os.utime(path)  # otherwise it would look like an old leftover of a writer that died
                os.rename(path, target)
                found = os.stat(target)
                if _is_fit(found, size):
                    return True
                os.unlink(target)

    def clear(self, oldest: float = math.inf) -> None:
        """Remove every kept file that was last written before this time, also those of other processes."""
        for path in Path(self._folder).glob("*/*"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _is_fit(found: os.stat_result, size: int) -> bool:
    """Whether the file may be overwritten: it has no second name (of a dead writer, or a copy), this size, write
    permission, and this user as its owner, because a file keeps its owner and permissions."""
    is_ours = found.st_uid == os.geteuid() and bool(found.st_mode & stat.S_IWUSR)
    return is_ours and found.st_nlink == 1 and found.st_size == size
