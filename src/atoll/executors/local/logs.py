"""Lines of a log file: all, the last few, or as they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll._time import Clock
from atoll.status import ReplicaStatus

_BLOCK = 1 << 16
_PAUSE_S = 0.1


def lines(path: Path, start: int = 0) -> Iterator[str]:
    """Every line from byte `start` on; an unfinished last line is a line."""
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below, when the generator ends
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            yield _text(line)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines, read from the end: a log may be larger than memory."""
    try:
        return list(lines(path, _start_of_last(path, count)))
    except FileNotFoundError:
        return []


def follow_lines(
    log_of: Callable[[int], Path], *, first: int, tail: int | None, current: Callable[[], ReplicaStatus], clock: Clock
) -> Iterator[str]:
    """Lines as they are written, over restarts, until the replica is over and its log is read to the end."""
    number = first
    partial: list[bytes] = []  # in pieces: joining a very long line at each block would be quadratic
    path = log_of(number)
    offset = _start_of_last(path, tail) if tail is not None and path.exists() else 0
    while True:
        status = current()  # before reading: what is written later is read in the next iteration
        block = _read(path, offset)
        while block:
            offset += len(block)
            *whole, rest = block.split(b"\n")
            if whole:
                whole[0], partial = b"".join([*partial, whole[0]]), []
            partial.append(rest)
            yield from map(_text, whole)
            block = _read(path, offset)
        moved_on = status.attempt > number
        if moved_on or status.state.is_terminal:
            if any(partial):
                yield _text(b"".join(partial))
            if not moved_on:
                return
            number, partial, offset = number + 1, [], 0
            path = log_of(number)
        else:
            clock.sleep(_PAUSE_S)


def _read(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(_BLOCK)
    except FileNotFoundError:
        return b""


def _start_of_last(path: Path, count: int) -> int:
    """The byte where the last `count` lines begin."""
    with open(path, "rb") as file:
        end = position = file.seek(0, os.SEEK_END)
        if count <= 0:
            return end
        found = 0
        while position > 0:
            step = min(_BLOCK, position)
            position -= step
            file.seek(position)
            block = file.read(step)
            # A line end at the very end of the file closes the last line and begins no new one.
            stop = len(block) - 1 if position + step == end and block.endswith(b"\n") else len(block)
            while (at := block.rfind(b"\n", 0, stop)) >= 0:
                found += 1
                if found == count:
                    return position + at + 1
                stop = at
        return 0


def _text(line: bytes) -> str:
    return line.rstrip(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace")
