"""An outlet: the pipe a replica writes both its outputs to, and the log file the shepherd pours it into.

A pipe, and not the file itself, because a program may open `/dev/stdout` or `/dev/stderr` anew and truncate a file.

The leash: every process group the shepherd starts dies with it, by the kernel's hand.

Each replica holds the read end of a pipe whose only write end is the shepherd's, and asks the kernel to send SIGKILL
to its whole process group when that end closes (`F_SETOWN`, `F_SETSIG`, `O_ASYNC`). No thread, no polling, and it
holds for grandchildren as well.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class KillPipe:
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


_PIPE_BYTES = 1 << 20
_TURN_BYTES = 4 << 20
"""How much one replica may pour in a turn before the others have theirs."""


class OutputPipe:
    """Both ends of one replica's output, from before the fork until it has ended."""

    _disk_is_full = False

    def __init__(self, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.is_open = True
        try:
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # a small pipe works too, with more turns

    def become_output(self) -> None:
        """In the replica: both outputs go in here, in order and from the first byte; input is empty."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.dup2(self._write_end, 1)
        os.dup2(self._write_end, 2)
        os.close(nothing)
        self.close_in_shepherd()
        self.close()
        sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc,assignment]
        sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc,assignment]

    def close_in_shepherd(self) -> None:
        """Only the replica may hold the end it writes to."""
        os.close(self._write_end)

    def pour(self) -> None:
        """Move what has arrived to the log: up to more than a pipe holds, so what was there is not left behind."""
        moved = 0
        while moved < _TURN_BYTES:
            try:
                data = os.read(self.read_end, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.is_open = False  # the replica has closed its outputs; it may live on without
                return
            moved += len(data)
            self._write(data)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._log)

    def _write(self, data: bytes) -> None:
        if OutputPipe._disk_is_full:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._log, view) :]
        except OSError as exc:
            # A full disk must not stop the replica: output is lost from here on, and that is said. What room there
            # is, or will be, is for how the run ended.
            OutputPipe._disk_is_full = True
            with suppress(OSError):
                print(f"shepherd: output is lost from here on: {exc}", file=sys.stderr, flush=True)


def _stream(descriptor: int) -> TextIO:
    """A new stream: the shepherd's believe that they can seek, which a pipe cannot. Sends each line at once."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
