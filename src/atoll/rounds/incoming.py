"""A frame that is still arriving: its front has been checked; its payload is read tile by tile and hashed as it comes.

So bytes are added up, or come to rest, while they are in the nearest cache, and none of them needs memory of its own.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import numpy as np
import xxhash

from atoll._passes import FROM_FILE, FROM_HUGE_PAGES, FROM_SOCKET, Hash, Passes, Source
from atoll._time import Clock
from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.kernels import aligned
from atoll.rounds.mixed import Room
from atoll.rounds.seal import PREAMBLE_BYTES, open_front, open_header
from atoll.stores.fast import Body, Straight


class Incoming:
    """Made and read within a `Read`, because both take bytes from the store.

    Also an `Opened` payload of `fp32`, if it is read from its beginning to its end.
    """

    def __init__(self, body: Body, clock: Clock, *, kind: str) -> None:
        """Reads the front. Raises `CorruptUpdate` when it does not check out, `StoreUnavailable` when it stays out."""
        self._body, self._clock = body, clock
        self._state: xxhash.xxh3_64 | Hash = xxhash.xxh3_64()
        self.seconds = 0.0
        """How long its reader waited for bytes."""
        preamble = bytearray(min(PREAMBLE_BYTES, body.size))
        body.readinto(memoryview(preamble))
        front = open_front(preamble, body.size, kind=kind)
        text = bytearray(front.header_bytes)
        body.readinto(memoryview(text))
        self.header = open_header(preamble, bytes(text), kind=kind)
        self.payload_bytes = front.payload_bytes

    @property
    def check(self) -> str:
        """XXH3-64 of what has been read of the payload."""
        return self._state.hexdigest()

    def take(self, room: memoryview) -> None:
        """The next bytes of the payload."""
        self._receive(room)
        if isinstance(self._state, xxhash.xxh3_64):
            self._state.update(room)

    def _receive(self, room: memoryview) -> None:
        began = self._clock.monotonic()
        self._body.readinto(room)
        self.seconds += self._clock.monotonic() - began

    def hashed_by(self, passes: Passes) -> Hash:
        self._state = Hash(passes)
        return self._state

    def tile(self, start: int, count: int, room: Room) -> int:  # noqa: ARG002 - one after the other
        self._receive(room.bytes_of(count))
        return room.address

    def source(self, count: int) -> Source | None:
        if not (isinstance(self._body, Straight) and isinstance(self._state, Hash)) or 4 * count > self.payload_bytes:
            return None
        where = self._body.descriptor()
        if where is None:
            return None
        kind = FROM_HUGE_PAGES if where.is_huge else FROM_SOCKET if where.is_socket else FROM_FILE
        return Source.from_open(where.file, where.ready, kind, self._state)

    def was_read(self, source: Source, count: int) -> None:
        self.seconds += source.seconds
        assert isinstance(self._body, Straight)
        self._body.was_read(4 * count)

    def was_cut(self, number: int) -> NoReturn:
        assert isinstance(self._body, Straight)
        self._body.was_cut(OSError(number, os.strerror(number)) if number else None)

    def read(self, start: int, room: F32) -> F32:  # noqa: ARG002 - one after the other
        self.take(as_bytes(room))
        if sys.byteorder == "big":
            room.byteswap(inplace=True)
        return room

    def whole(self) -> memoryview:
        """All of the payload, in memory of its own."""
        room = aligned(self.payload_bytes, np.uint8).data
        self.take(room)
        return room

    def close(self) -> None:
        self._body.close()
