"""Single key presses from a terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def key_presses() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or nothing. Harmless where there are no keys."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system
        yield _no_key
        return
    if sys.stdin is None or not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda wait_s: _key(descriptor, wait_s)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(descriptor: int, wait_s: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], wait_s)
    if not ready:
        return ""
    data = os.read(descriptor, 32)
    return data.decode(errors="replace") or "q"  # the terminal is gone


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""
