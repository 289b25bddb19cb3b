"""A chunk of `fp32` that is about to be written: hashed and squared as it goes, so that memory is read once.

Its header names the hash and the norm, so it is made last, in room that was left for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from atoll import _passes
from atoll._passes import Hash
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.rounds.codec import F32, as_bytes
from atoll.rounds.fused import LEAST_COMPILED, sound, sum_of_squares
from atoll.rounds.seal import PREAMBLE_BYTES, canonical, checksum, seal_front
from atoll.stores.base import Buffer
from atoll.stores.fast import Unsealed

_STEP = 1 << 10
_TILE = 1 << 19
_LONGEST = -sys.float_info.max
"""No float has more digits."""


class NotFinite(Exception):
    """A value is infinite or no number, so nothing is written."""


class Outgoing(Unsealed):
    """A frame of these values, with this header and what is found of them."""

    norm = math.nan
    """L2 of the values, when there is a front."""
    seconds = 0.0
    """How long it was looked at; where it is copied in the same pass, that too."""

    def __init__(self, header: Mapping[str, Any], values: F32, clock: Clock = SYSTEM_CLOCK) -> None:
        self._header, self._values, self._clock = header, values, clock
        self.payload = as_bytes(np.ascontiguousarray(values, "<f4"))
        text = canonical({**header, "norm": _LONGEST, "xxh3": "0" * 16})
        self.front_bytes = -(-(PREAMBLE_BYTES + len(text)) // _STEP) * _STEP
        self._passes = _passes.current() if values.size >= LEAST_COMPILED else None
        self._begin()

    @property
    def check(self) -> str:
        """XXH3-64 of what has been seen."""
        return self._state.hexdigest()

    def look(self, start: int, stop: int, room: memoryview | None = None) -> None:
        if start == 0:
            self._begin()
        began = self._clock.monotonic()
        values = self._values[start // 4 : stop // 4]
        copy = None if room is None else np.frombuffer(room, np.uint8)
        if isinstance(self._state, Hash):
            assert self._passes is not None
            self._squares += self._passes.look(values, self._state, copy)
        else:
            self._state.update(self.payload[start:stop])
            self._squares += sum_of_squares(values)
            if copy is not None:
                np.copyto(copy, np.frombuffer(self.payload[start:stop], np.uint8))
        self._seen = stop
        self.seconds += self._clock.monotonic() - began

    def pour(self, fd: int, start: int, stop: int, step: int) -> None:
        if not isinstance(self._state, Hash):
            super().pour(fd, start, stop, step)
            return
        assert self._passes is not None
        if start == 0:
            self._begin()
        values = self._values[start // 4 : stop // 4]
        squares, seconds = self._passes.pour(values, self._state, fd, self.front_bytes + start, step)
        self._squares += squares
        self.seconds += seconds
        self._seen = stop

    def front(self) -> Buffer:
        if self._seen < len(self.payload):
            self._look_at_all()
        self.norm = math.sqrt(sound(self._squares, self._values))
        if not (math.isfinite(self.norm) and self._are_sound()):
            raise NotFinite
        header = {**self._header, "norm": self.norm, "xxh3": self.check}
        return seal_front(header, len(self.payload), alignment=self.front_bytes)

    def _begin(self) -> None:
        self._state: xxhash.xxh3_64 | Hash = xxhash.xxh3_64() if self._passes is None else Hash(self._passes)
        self._squares, self._seen, self.seconds = 0.0, 0, 0.0

    def _are_sound(self) -> bool:
        """Whether the values that were seen are finite. If squares did not fit, that is known of those of now."""
        return math.isfinite(self._squares) or checksum(self.payload) == self.check

    def _look_at_all(self) -> None:
        for start in range(0, len(self.payload), _TILE):
            self.look(start, min(start + _TILE, len(self.payload)))
