"""A folder in memory whose files may have large pages: a tmpfs mounted with `huge=within_size`.

The kernel's own default for a tmpfs, `/dev/shm` too, is pages of 4 KiB, and to get them takes longer than to fill them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPTION = "huge=within_size"
_NEW_MOUNTS, _PRIVATE, _ALL_BELOW = 0x20000, 0x40000, 0x4000
_WHEN_UNUSED = 2


@contextmanager
def large_pages(folder: Path) -> Iterator[str | None]:
    """Mount one on a new folder; why there is none, in words, or None if there is.

    Only this process and those it starts see it, so that it is gone with them, however they end.
    """
    folder.mkdir()
    trouble = _mounted(folder)
    try:
        yield trouble
    finally:
        if trouble is None:
            os.chdir("/")
            ctypes.CDLL(None).umount2(os.fsencode(folder), _WHEN_UNUSED)  # a replica may still be ending


def _mounted(folder: Path) -> str | None:
    if not sys.platform.startswith("linux"):
        return "there is no tmpfs here"
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(_NEW_MOUNTS),
        lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE | _ALL_BELOW), None),
        lambda: libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), OPTION.encode()),
    )
    for call in calls:
        if call() != 0:
            return f"a tmpfs with {OPTION} could not be mounted: {os.strerror(ctypes.get_errno())}"
    return None
