"""A rank that only averages by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from fated_store import FatedStore

from atoll.registry import open_store
from atoll.rounds.named.client import NamedClient
from atoll.rounds.named.exchange import NamedContribution
from atoll.stores.base import Store

NAMES = ("weights", "Grads of layer 1")


def exchange(
    uri: str,
    rank: int,
    world_size: int,
    turns: int,
    *,
    space: str | None = None,
    timeout_s: float = 60.0,
    fate: Sequence[Any] | None = None,
) -> str:
    """A digest of all that everybody gave. Nobody says goodbye, so the last parts stay in the store."""
    plain = open_store(uri)
    store: Store = plain if fate is None else FatedStore(plain, fate)
    client = NamedClient(store, space, rank, world_size, timeout_s=timeout_s, poll_first_s=0.005)
    seen = hashlib.sha256()
    for turn in range(turns):
        for name in NAMES:
            for part in client.exchange(
                name, NamedContribution("mean", [("uint8", (40,))], "", payload(rank, turn, name))
            ):
                seen.update(part.payload)
    return seen.hexdigest()


def payload(rank: int, turn: int, name: str) -> bytes:
    return f"{rank:4d} {turn:4d} {name:30s}".encode()


def expected(world_size: int, turns: int) -> str:
    seen = hashlib.sha256()
    for turn in range(turns):
        for name in NAMES:
            for rank in range(world_size):
                seen.update(payload(rank, turn, name))
    return seen.hexdigest()
