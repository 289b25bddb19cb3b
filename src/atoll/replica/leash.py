"""The leash: every process group the shepherd starts dies with it, by the kernel's hand.

Each replica holds the read end of a pipe whose only write end is the shepherd's, and asks the kernel to send SIGKILL
to its whole process group when that end closes (`F_SETOWN`, `F_SETSIG`, `O_ASYNC`). No thread, no polling, and it
holds for grandchildren as well.
"""

from __future__ import annotations

import fcntl
import os
import signal


class Leash:
    """Made by the shepherd; `attach` is called in the child, after its process group exists."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def attach(self) -> None:
        # A new open file of the same pipe: owner and signal belong to the open file, not to the descriptor.
        own = os.open(f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.drop()
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | fcntl.FASYNC)
        try:
            os.read(own, 1)
        except BlockingIOError:
            return  # there is a writer: its end will be told
        os.killpg(0, signal.SIGKILL)  # the shepherd died before the kernel knew whom to tell

    def drop(self) -> None:
        """Let go of both ends; for a child that is not on the leash."""
        os.close(self._read)
        os.close(self._write)
