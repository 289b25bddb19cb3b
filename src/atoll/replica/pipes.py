"""The two pipes between the supervisor and a replica: one for the replica's output, one that kills it.

`OutputPipe`: the replica writes both outputs to a pipe, and the supervisor copies them to the log file. The replica
does not write to the file itself, because a program may open `/dev/stdout` again and truncate it.

`KillPipe`: the replica holds the read end of a pipe whose only write end is the supervisor's. It asks the kernel
(`F_SETOWN`, `F_SETSIG`, `O_ASYNC`) to send SIGKILL to its whole process group when that end closes. This needs no
thread and no polling, and it covers grandchildren.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

_PIPE_BYTES = 1 << 20
_DRAIN_BYTES = 4 << 20
"""The most that `drain` copies for one replica before the supervisor serves the others."""

log = logging.getLogger("atoll.replica")


class KillPipe:
    """Kills process groups when the supervisor, which creates it, dies."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def attach(self) -> None:
        """In the child, after its process group exists: let the kernel kill this group with the supervisor."""
        # Open the pipe anew: owner and signal belong to the open file, which parent and child share otherwise.
        own = os.open(f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.close()
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | fcntl.FASYNC)
        try:
            os.read(own, 1)
        except BlockingIOError:
            return  # the supervisor lives, and the kernel will signal its end
        os.killpg(0, signal.SIGKILL)  # the supervisor died before the signal was set up

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read)
        os.close(self._write)


class OutputPipe:
    """Both ends of one replica's output, from before the fork until the replica has ended."""

    write_error: OSError | None = None
    """Why output of replicas is dropped at the moment, for all pipes; the supervisor clears it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.is_open = True
        self.lost_bytes = 0
        """How much of the output is not in the log file, because the disk was full."""
        try:
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # a smaller pipe works too

    def redirect(self) -> None:
        """In the replica: send stdout and stderr to the pipe, and read nothing from stdin."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.dup2(self._write_end, 1)
        os.dup2(self._write_end, 2)
        os.close(nothing)
        self.close_write_end()
        self.close()
        sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc,assignment]
        sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc,assignment]

    def close_write_end(self) -> None:
        """In the supervisor: only the replica keeps the write end."""
        os.close(self._write_end)

    def drain(self) -> None:
        """Copy what has arrived to the log file: more than a pipe holds, so everything written so far is copied."""
        copied = 0
        while copied < _DRAIN_BYTES:
            try:
                data = os.read(self.read_end, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.is_open = False  # the replica closed its outputs; it may still run
                return
            copied += len(data)
            self._write(data)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        if OutputPipe.write_error is not None:
            self.lost_bytes += len(view)
            return
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as exc:
            # A full disk must not block the replica. Output is dropped: free space is for the run's outcome.
            OutputPipe.write_error = exc
            self.lost_bytes += len(view)
            log.warning("replica output is lost from here on: %s", exc)


def _stream(descriptor: int) -> TextIO:
    """A line-buffered stream. The inherited stream cannot be reused: it was opened on a file that can seek."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
