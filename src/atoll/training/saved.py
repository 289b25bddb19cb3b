"""The outer loop's part of a checkpoint: agreed state, live weights where they differ from it, what is still owed.

A checkpoint is made when no round is under way, so nothing of one is in it.
"""

from __future__ import annotations

from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.rounds.codecs.base import as_bytes
from atoll.training.checkpoint import Checkpoint
from atoll.training.loop import OuterLoop


def outer_state(loop: OuterLoop) -> dict[str, Any]:
    """What `load_outer` needs; views, not copies."""
    state = loop.state
    return {
        "values": torch.from_numpy(state.values),
        "momentum": None if state.momentum is None else torch.from_numpy(state.momentum),
        "started": state.started,
        "live": None if loop.stream.is_settled else loop.vector.live(),
        "feedback": None if loop.feedback is None else loop.feedback.state_dict(),
    }


def load_outer(loop: OuterLoop, saved: Checkpoint) -> None:
    """Put the outer loop where it was."""
    state = saved.state
    if (state["feedback"] is None) != (loop.feedback is None):
        raise ConfigError("the checkpoint was made with another setting of error_feedback")
    names = [name for name in ("values", "momentum") if state[name] is not None]
    sections = {name: as_bytes(state[name].numpy()) for name in names}
    loop.restore(sections, saved.round_no, saved.position, state["started"])
    if state["live"] is not None:
        loop.vector.load_live(state["live"])
    if loop.feedback is not None:
        loop.feedback.load_state_dict(state["feedback"])
