"""Ranks as threads of one process, each with its own end of an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from atoll.stores.base import Store
from atoll.stores.memory import MemoryStore
from atoll.training.allreduce import ObjectStoreAllReduce

torch.set_num_threads(1)

Body = Callable[[ObjectStoreAllReduce], Any]


def side_by_side(
    world_size: int, body: Body, *, store: Store | None = None, ranks: Collection[int] | None = None, **options: Any
) -> list[Any]:
    """What `body` returns on each of the ranks, or the error it raised there; None for ranks that are not asked for."""
    store = store or MemoryStore()
    ranks = range(world_size) if ranks is None else ranks

    def on_rank(rank: int) -> Any:
        if rank not in ranks:
            return None
        ends = ObjectStoreAllReduce(store, rank, world_size, **{"poll_interval_s": 0.001, "timeout_s": 60.0, **options})
        try:
            return body(ends)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(on_rank, range(world_size)))


def values(rank: int, shape: tuple[int, ...] = (64,), *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Numbers that only this rank and seed have, of many magnitudes."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (wide * 10.0 ** torch.randint(-3, 3, shape, generator=generator)).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
