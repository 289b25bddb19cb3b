"""Memory settings for moving gigabytes: the process keeps freed memory instead of returning it to the system.

Fresh pages cost more than the copying: reading from a fast store into them takes about 2.5 times the CPU. The settings
hold for the whole process, so `Tuning(keep_freed_memory=True)` has to ask for them.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_is_set = False


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory, for the rest of the process. Does nothing where there is no glibc."""
    global _is_set
    if _is_set or not sys.platform.startswith("linux"):
        return
    _is_set = True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 2)
    if not mallopt(_M_MMAP_THRESHOLD, 1 << 30):
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # what older versions allow
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
