"""Filling a file of ours with the bytes of an object, slice by slice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from atoll.stores.base import Buffer, Data, pieces
from atoll.stores.fast import Unsealed

Given: TypeAlias = Sequence[memoryview] | Unsealed
SLICE = 1 << 18
"""Written by one call: where large pages are allowed, the kernel takes some of this size. Larger ones are hardly
faster, and may be had only of memory that a virtual machine has given back to its host, which takes many times as
long."""
_MOST_PARTS = 256  # of one write call; Linux allows 1 024


def given(data: Data) -> Given:
    return data if isinstance(data, Unsealed) else pieces(data)


def write(fd: int, data: Given) -> None:
    """Write all of it, from the beginning of the file on."""
    if isinstance(data, Unsealed):
        write_from(fd, data, 0)
        return
    left = deque(part for part in data if part)
    room = SLICE
    while left:
        written = os.writev(fd, _front(left, room))
        room = room - written or SLICE
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def write_from(fd: int, data: Unsealed, start: int) -> None:
    """Write what is left of a payload, and the front."""
    if start < len(data.payload):
        data.pour(fd, start, len(data.payload), SLICE)
    write_at(fd, data.front(), 0)


def write_at(fd: int, data: Buffer, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written


def _front(parts: Iterable[memoryview], room: int) -> list[memoryview]:
    """The first `room` bytes of these parts, or less if there are many of them."""
    front: list[memoryview] = []
    for part in islice(parts, _MOST_PARTS):
        front.append(part[:room])
        room -= len(front[-1])
        if not room:
            break
    return front
