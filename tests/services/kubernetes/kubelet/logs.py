"""The output of containers: read from pipes by one thread, kept in files with the time of each line."""

from __future__ import annotations

import datetime as dt
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

_LONGEST_LINE = 16 * 1024


@dataclass(frozen=True)
class Selection:
    """Which part of a log is asked for."""

    tail: int | None = None
    is_followed: bool = False
    has_timestamps: bool = False
    since: str = ""
    """The earliest time, in the form that the log has."""
    limit_bytes: int | None = None


class Log:
    """One start of one container. A line in the file is `TIME F text`, or `TIME P text` if no line end follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._partial = b""
        self._changed = Condition()
        self._is_closed = False

    def append(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > _LONGEST_LINE:
            self._write([self._partial[:_LONGEST_LINE]], b"P")
            self._partial = self._partial[_LONGEST_LINE:]
        self._write(lines, b"F")

    def close(self) -> None:
        if self._partial:
            self._write([self._partial], b"P")
        with self._changed:
            self._is_closed = True
            self._file.close()
            self._changed.notify_all()

    def wait_until_closed(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def read(self, selection: Selection) -> Iterator[bytes]:
        """Pieces of the answer. With `is_followed` the last one comes when the container has ended."""
        left = selection.limit_bytes
        for piece in self._selected(selection):
            if left is not None:
                piece, left = piece[:left], left - len(piece)
            yield piece
            if left is not None and left <= 0:
                return

    def tail(self, lines: int, size: int) -> str:
        """The end of the log, for the message of a container that failed."""
        text = b"".join(self.read(Selection(tail=lines)))
        return text[-size:].decode(errors="replace")

    def _selected(self, selection: Selection) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            since = selection.since.removesuffix("Z").encode()  # `:05.1Z` is later than `:05Z`
            present = (line for line in file.readlines() if line.split(b" ", 1)[0].removesuffix(b"Z") >= since)
            for line in present if selection.tail is None else deque(present, selection.tail):
                yield _shown(line, selection.has_timestamps)
            while selection.is_followed:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or os.fstat(file.fileno()).st_size > file.tell(), 60)
                    is_last, lines = self._is_closed, file.readlines()
                for line in lines:
                    yield _shown(line, selection.has_timestamps)
                if is_last:
                    return

    def _write(self, lines: list[bytes], mark: bytes) -> None:
        if lines:
            start = timestamp().encode() + b" " + mark + b" "
            with self._changed:
                self._file.write(b"".join(start + line + b"\n" for line in lines))
                self._changed.notify_all()


def timestamp(before_s: float = 0.0) -> str:
    """The time so many seconds ago, so written that the order of the texts is the order of the times."""
    moment = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=before_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def with_nanoseconds(moment: str) -> str:
    """A time of the API server, such as `2026-08-01T12:00:00.5Z`, in the form of `timestamp`."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}Z" if whole else ""


def _shown(line: bytes, has_timestamp: bool) -> bytes:
    time, mark, text = line.split(b" ", 2)
    text = text if mark == b"F" else text[:-1]
    return time + b" " + text if has_timestamp else text


class Watcher(Thread):
    """The one thread that reads the pipes of all containers and sees their processes end."""

    def __init__(self) -> None:
        super().__init__(name="watcher", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        self._new: deque[tuple[int, Callable[[], bool]]] = deque()
        self._selector.register(self._wake, selectors.EVENT_READ, self._add_new)

    def add(self, descriptor: int, is_over: Callable[[], bool]) -> None:
        """Call `is_over` whenever the descriptor can be read, until it says so; then close the descriptor."""
        self._new.append((descriptor, is_over))
        os.write(self._woken, b"x")

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data():
                    self._selector.unregister(key.fd)
                    os.close(key.fd)

    def _add_new(self) -> bool:
        os.read(self._wake, 4096)
        while self._new:
            descriptor, is_over = self._new.popleft()
            self._selector.register(descriptor, selectors.EVENT_READ, is_over)
        return False
