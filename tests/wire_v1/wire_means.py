"""Averages by name (`ObjectStoreAllReduce`) in the wire fixture, and how a test reads them again.

A part belongs to a session, and a session to the tokens of its processes, which are random. Here they are not: with the
tokens of the processes that wrote the fixture, a later process takes the same seats and finds the parts that stand
there. It gives zeros itself, so a result that is not zero was read from the store.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
from torch import Tensor
from wire_toys import fractions, weights_digest

import atoll

WORLD_SIZE = 2
SPACES: list[str | None] = [None, "exp-7", "Zwölf Runs"]
ENDED = "ended"
"""The space whose ranks said goodbye: nothing is left of it but the mark of its next session."""
NAME = "Layer 1/bias"
"""Not plain, so it is escaped in keys."""


def leave_parts(store: str) -> None:
    """Exchange once in every space and stop without a goodbye; once more with one."""
    for space in SPACES:
        _exchange(store, space, own_tensors)
    _exchange(store, ENDED, own_tensors, is_closed=True)


def mean_again(store: str, space: str | None) -> str:
    """The digest of the means that the parts of the store give."""
    return _exchange(store, space, lambda rank: [torch.zeros_like(t) for t in own_tensors(rank)], is_closed=True)


def own_tensors(rank: int) -> list[Tensor]:
    """One tensor of each kind of mean: floats of three widths, whole numbers, truth values."""
    floats = fractions((5, 7), 50 + rank, 0)
    whole = torch.arange(6) * (3 + rank)
    return [floats, floats.double() / 4, floats.bfloat16(), whole, whole % 4 == 0]


def _exchange(store: str, space: str | None, tensors_of, *, is_closed: bool = False) -> str:
    ends = []
    for rank in range(WORLD_SIZE):
        opened = atoll.open_store(store)
        with patch("uuid.uuid4", return_value=uuid.UUID(int=1 + rank)):  # the token of this rank
            ends.append(
                atoll.ObjectStoreAllReduce(
                    opened, rank, WORLD_SIZE, round_id=space, timeout_s=60.0, poll_interval_s=0.001
                )
            )

    def body(end: atoll.ObjectStoreAllReduce) -> str:
        tensors = tensors_of(end.rank)
        end.allreduce_coalesced(tensors, NAME)
        return weights_digest(tensors)

    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        (found,) = set(pool.map(body, ends))
        if is_closed:
            list(pool.map(atoll.ObjectStoreAllReduce.close, ends))
    return found
