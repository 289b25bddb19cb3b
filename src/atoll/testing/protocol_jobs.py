"""Entry points that the replica protocol's suite launches. They know only the variables of the protocol.

`train` and `main` are the names that the protocol calls by default. A replica in `hold` waits for an object in the
store of `RENDEZVOUS_URI`, so the suite can release it on any backend (`let_go`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll._time import SYSTEM_CLOCK, Deadline
from atoll.errors import KeyNotFound
from atoll.registry import open_store

HOLD_S = 120.0
"""A replica that holds ends by itself after this time, so that a broken facade leaves no process behind."""
_POLL_S = 0.02


@dataclass
class Point:
    """A value that is not JSON; it is converted to a table of its fields."""

    x: int
    y: int


class Odd:
    """A value that cannot be converted."""

    def __repr__(self) -> str:
        return "<an odd value>"


def main(**arguments: Any) -> dict[str, Any]:
    """What an entry point that names only the module calls."""
    return {"called": "main", "arguments": arguments}


def train(**arguments: Any) -> dict[str, Any]:
    """What the trainer form calls unless `trainer_fn` names another function."""
    return {"called": "train", "arguments": arguments}


def echo(**arguments: Any) -> dict[str, Any]:
    return {"called": "echo", "arguments": arguments}


def only_x(x: int) -> int:
    """A function without the parameters `rank_env` and `rendezvous_uri`."""
    return x


def own_names(rank_env: str, rendezvous_uri: str) -> list[str]:
    """A function that has these two parameters itself."""
    return [rank_env, rendezvous_uri]


def variables(names: Sequence[str]) -> dict[str, str | None]:
    """Return the values of environment variables."""
    return {name: os.environ.get(name) for name in names}


def act(parts: Sequence[str], key: str = "") -> str:
    """Print two lines, then end as the part of this rank says: `return`, `raise`, `exit`, `sigkill`, `hold`."""
    rank = int(os.environ["REPLICA_RANK"])
    print(f"first line of {rank}\nlast line of {rank}", flush=True)
    part = parts[rank]
    if part == "raise":
        raise ValueError(f"rank {rank} raises")
    if part == "exit":
        sys.exit(3)
    if part == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "hold":
        hold(key)
    return part


def hold(key: str) -> int:
    """Run without output until `let_go`, then return the rank."""
    store, deadline = open_store(os.environ["RENDEZVOUS_URI"]), Deadline(HOLD_S, SYSTEM_CLOCK)
    while not deadline.is_past:
        try:
            store.get(_go(key))
        except KeyNotFound:
            deadline.sleep(_POLL_S)
        else:
            return int(os.environ["REPLICA_RANK"])
    raise TimeoutError(f"`let_go` was not called within {HOLD_S:g} s")


def let_go(store_uri: str, key: str) -> None:
    """Let the replicas return that hold with this key."""
    open_store(store_uri).put(_go(key), b"")


def converted() -> Mapping[str, Any]:
    """Values that are not JSON and have an obvious counterpart."""
    import numpy as np

    return {
        "tuple": (1, (2, "é")),
        "set": {3, 1, 2},
        "dataclass": Point(1, 2),
        "path": Path("/tmp/model.pt"),
        "numpy": [np.float32(0.5), np.int64(7), np.bool_(True)],
    }


def tensors() -> Mapping[str, Any]:
    """Tensors without dimensions. `__import__` because only `atoll.training` may import torch by name."""
    torch = __import__("torch")
    return {"loss": torch.tensor(0.5), "steps": torch.tensor(7)}


def returned(parts: Sequence[str]) -> Any:
    """Return a value that is not JSON: the one that the part of this rank names."""
    part = parts[int(os.environ["REPLICA_RANK"])]
    if part == "converted":
        return converted()
    if part == "tensors":
        return tensors()
    return {"object": Odd(), "nested": {"kept": 1, "odd": [Odd(), b"\xff"]}, "nan": float("nan")}[part]


def _go(key: str) -> str:
    return f"protocol/{key}/go"
