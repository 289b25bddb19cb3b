"""Error feedback: what a codec rounds away from an update is added to the next one, so that nothing is lost for good.

    u = update + residual                     what is offered
    residual = u - decode(encode(u))          if the commit includes it
    residual = u                              if the round went on without it: the whole update is still owed

Missed again and again, what is owed is halved each time from the second on, so it never exceeds the largest update;
an update that was refused for its values is owed to nobody. The residual is this replica's own and belongs in its
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atoll.errors import ConfigError
from atoll.rounds.codecs.base import F32, codec

_TILE = 1 << 16  # a multiple of what codecs work on as one block, so that tiles give the bits chunks do


def is_wanted(choice: bool | None, codec_name: str) -> bool:
    """Whether residuals are kept: as the caller chose, else if the codec needs it; never for an exact codec."""
    how = codec(codec_name)
    return not how.is_exact and (how.needs_feedback if choice is None else choice)


class ErrorFeedback:
    """The residuals of one replica, one for each fragment of the vector."""

    def __init__(self, codec_name: str, fragments: Sequence[slice]) -> None:
        self._codec = codec(codec_name)
        self._fragments = list(fragments)
        self._residual: F32 = np.zeros(max(part.stop for part in fragments), dtype=np.float32)
        self._missed = [0] * len(self._fragments)

    def fold(self, fragment: int, update: F32) -> F32:
        """The update with what is owed added. It lies where the residual was and stays there until `settle`."""
        owed = self._residual[self._fragments[fragment]]
        np.add(update, owed, out=owed)
        return owed

    def settle(self, fragment: int, *, is_included: bool) -> None:
        """The round is over: what of the folded update is still owed?"""
        owed = self._residual[self._fragments[fragment]]
        if is_included:
            self._missed[fragment] = 0
            self._take_off_what_arrived(owed)
            return
        self._missed[fragment] += 1
        if self._missed[fragment] > 1:
            owed *= np.float32(0.5)

    def forget(self, fragment: int | None = None) -> None:
        """Owe nothing, of one fragment or of all."""
        which = range(len(self._fragments)) if fragment is None else [fragment]
        for i in which:
            self._residual[self._fragments[i]] = 0.0
            self._missed[i] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"residual": torch.from_numpy(self._residual), "missed": self._missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual = state["residual"].numpy()
        if residual.shape != self._residual.shape or len(state["missed"]) != len(self._missed):
            raise ConfigError(f"the checkpoint's residual has {residual.size} elements, not {self._residual.size}")
        self._residual[:] = residual
        self._missed = [int(count) for count in state["missed"]]

    def _take_off_what_arrived(self, owed: F32) -> None:
        size = min(_TILE, owed.size)
        payload = np.empty(self._codec.encoded_bytes(size), dtype=np.uint8)
        arrived: F32 = np.empty(size, dtype=np.float32)
        for start in range(0, owed.size, _TILE):
            tile = owed[start : start + _TILE]
            encoded = payload[: self._codec.encoded_bytes(tile.size)].data
            self._codec.encode_into(tile, encoded)
            self._codec.decode_into(encoded, arrived[: tile.size])
            np.subtract(tile, arrived[: tile.size], out=tile)
