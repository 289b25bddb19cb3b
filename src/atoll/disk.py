"""Full disks, and folders of stores: which errors mean a full disk, and what a folder is."""

from __future__ import annotations

import errno
import os
from urllib.parse import unquote_to_bytes

MARGIN_BYTES = 64 << 10
"""A disk with less free space counts as full: the next log chunk or record may not fit."""
STORE_MARK = ".atoll-tmp~f"
"""The folder of unfinished files, which every `file:` store that was written to has and keeps."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def full_text(folder: str | os.PathLike[str]) -> str:
    """How `status` names a full disk."""
    return f"disk full: {os.fspath(folder)}"


def free_bytes(folder: str | os.PathLike[str]) -> int | None:
    """The bytes that this process may still write there, 0 if no file can be created; None if this is unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    if found.f_flag & os.ST_RDONLY:
        return None
    if found.f_files and not found.f_ffree:
        return 0
    # The last blocks of some file systems are reserved for root.
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize


def folder_of(store_uri: str) -> str | None:
    """The folder of a `file:` store; None for any other store."""
    if not store_uri.startswith("file://"):
        return None
    return os.fsdecode(unquote_to_bytes(store_uri.removeprefix("file://").partition("?")[0]))


def is_store(folder: str) -> bool:
    """Whether a `file:` store was written to this folder."""
    return os.path.isdir(f"{folder}/{STORE_MARK}")


class DiskWatch:
    """Whether a folder's disk is full: from a failed write, or too little space, until `room_bytes` are free."""

    def __init__(self, folder: str | os.PathLike[str], *, room_bytes: int) -> None:
        self._folder, self._room_bytes = folder, room_bytes
        self.is_full = False

    def failed(self, error: BaseException | None) -> None:
        """A write has failed."""
        self.is_full = self.is_full or is_full(error)

    def look(self) -> bool:
        """Ask the file system again."""
        free = free_bytes(self._folder)
        if free is not None:
            self.is_full = free < (self._room_bytes if self.is_full else MARGIN_BYTES)
        return self.is_full

    @property
    def problem(self) -> str:
        """How `status` names it; empty while the disk has room."""
        return full_text(self._folder) if self.is_full else ""


def problem_of(folder: str | os.PathLike[str]) -> str:
    """`disk full: …` if the folder's disk is full; otherwise empty."""
    free = free_bytes(folder)
    return full_text(folder) if free is not None and free < MARGIN_BYTES else ""
