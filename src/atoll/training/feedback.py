"""Error feedback: the rounding error of an update is added to the next one, so that nothing is lost for good.

    u = update + residual                     the offer
    residual = u - decode(encode(u))          if the commit includes it
    residual = u                              if the round was committed without it

After each further missed round in a row the residual is halved, so that it never exceeds the largest update. An update
that was rejected for its values leaves no residual. Each replica has its own residual, which its checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atoll.errors import ConfigError
from atoll.rounds.codecs.base import F32, codec

_TILE = 1 << 16  # a multiple of the block of every codec, so that tiles and chunks give the same bits


def is_wanted(choice: bool | None, codec_name: str) -> bool:
    """Whether to keep residuals: the caller's choice, or else if the codec needs it; never for an exact codec."""
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
        """Add the update to the residual and return the sum: a view that stays valid until `settle`."""
        residual = self._residual[self._fragments[fragment]]
        np.add(update, residual, out=residual)
        return residual

    def settle(self, fragment: int, *, is_included: bool) -> None:
        """Compute the residual after a round: the rounding error, or the whole update if the mean lacks it."""
        residual = self._residual[self._fragments[fragment]]
        if is_included:
            self._missed[fragment] = 0
            self._subtract_decoded(residual)
            return
        self._missed[fragment] += 1
        if self._missed[fragment] > 1:
            residual *= np.float32(0.5)

    def forget(self, fragment: int | None = None) -> None:
        """Set the residual of one fragment, or of all, to zero."""
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

    def _subtract_decoded(self, values: F32) -> None:
        """Subtract from the values what the other replicas decode."""
        size = min(_TILE, values.size)
        payload = np.empty(self._codec.encoded_bytes(size), dtype=np.uint8)
        decoded: F32 = np.empty(size, dtype=np.float32)
        for start in range(0, values.size, _TILE):
            tile = values[start : start + _TILE]
            encoded = payload[: self._codec.encoded_bytes(tile.size)].data
            self._codec.encode_into(tile, encoded)
            self._codec.decode_into(encoded, decoded[: tile.size])
            np.subtract(tile, decoded[: tile.size], out=tile)
