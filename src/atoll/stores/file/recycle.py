"""Files of deleted objects, kept to be written again: overwriting pages is several times faster than getting new ones.

Only for objects that nobody reads any more when they are deleted. A spare is used for an object of exactly its size, so
no reader that is late after all sees a file shrink; the bytes change under it, which its checksums tell.
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
"""Spares of one size; what is deleted beyond that is gone."""


class RecycledFiles:
    """Shared by every process that uses the folder: a rename takes a spare, and only one can have it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = Lock()
        self._prefix = f"{uuid.uuid4().hex}."
        self._known: dict[int, list[str]] = {}

    def keep(self, path: str) -> bool:
        """Take over the file of a deleted object; False when there is none, or it is not worth it."""
        try:
            size = os.stat(path).st_size
        except OSError:
            return False
        if size < LEAST_BYTES:
            return False
        home = f"{self._folder}/{size}"
        with self._lock:
            known = self._known.setdefault(size, [])
            if len(known) >= _MOST:
                return False
        name = f"{self._prefix}{os.getpid()}.{next(_numbers)}"
        if not os.path.isdir(home):
            try:
                os.makedirs(home, exist_ok=True)
            except OSError:  # a full disk, say, where deleting must still work
                return False
        os.rename(path, f"{home}/{name}")
        with self._lock:
            known.append(name)
        return True

    def take(self, size: int, target: str) -> bool:
        """Make a spare of this size the file `target`; False when there is none."""
        if size < LEAST_BYTES:
            return False
        known = self._known.setdefault(size, [])
        return self._take_one(size, known, target) or (self._look(size, known) and self._take_one(size, known, target))

    def _look(self, size: int, known: list[str]) -> bool:
        """Learn what there is by now, of other processes too; False if there is nothing."""
        try:
            found = os.listdir(f"{self._folder}/{size}")
        except FileNotFoundError:
            return False
        random.shuffle(found)  # or all who look would reach for the same one
        with self._lock:
            known[:] = found
        return bool(found)

    def _take_one(self, size: int, known: list[str], target: str) -> bool:
        """Take one of those we know that is still there."""
        while True:
            with self._lock:
                if not known:
                    return False
                spare = f"{self._folder}/{size}/{known.pop()}"
            with suppress(FileNotFoundError, PermissionError):  # another process has it, or it is another user's
                os.utime(spare)  # or it would look like something a dead writer left long ago
                os.rename(spare, target)
                found = os.stat(target)
                if _is_fit(found, size):
                    return True
                os.unlink(target)

    def clear(self, oldest: float = math.inf) -> None:
        """Remove every spare that was last written before this time, whoever left it."""
        for path in Path(self._folder).glob("*/*"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _is_fit(found: os.stat_result, size: int) -> bool:
    """Not also under another name (a writer that died, or somebody's copy), nor replaced while it was deleted, nor
    protected, nor another user's: a file keeps its owner and who may read it."""
    is_ours = found.st_uid == os.geteuid() and bool(found.st_mode & stat.S_IWUSR)
    return is_ours and found.st_nlink == 1 and found.st_size == size
