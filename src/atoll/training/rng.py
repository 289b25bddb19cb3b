"""Every random number generator a training loop is likely to draw from: torch, its devices, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of all of them, now."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Go on drawing as if nothing had happened. Devices that are not here are passed over."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for index, cuda in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(cuda, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
