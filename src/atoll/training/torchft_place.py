"""Where the replicas of a torchft run meet: the store, the run and the rank, from whatever the caller knows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atoll.context import ReplicaContext
from atoll.errors import ConfigError
from atoll.registry import open_store
from atoll.stores.base import Store

if TYPE_CHECKING:
    from atoll.training.allreduce import ObjectStoreAllReduce


class Place:
    """Which store, which run, which rank."""

    def __init__(self, store: Store, rank: int, world_size: int, run_id: str, attempt: int) -> None:
        self.store, self.rank, self.world_size, self.run_id, self.attempt = store, rank, world_size, run_id, attempt

    @classmethod
    def of(
        cls,
        store: str | os.PathLike[str] | Store | ReplicaContext | ObjectStoreAllReduce,
        rank: int | None,
        world_size: int | None,
        run_id: str | None,
        attempt: int,
    ) -> Place:
        if isinstance(store, ReplicaContext):
            return cls(store.store, store.rank, store.world_size, run_id or store.run_id, attempt or store.attempt)
        from atoll.training.allreduce import ObjectStoreAllReduce

        if isinstance(store, ObjectStoreAllReduce):
            return cls(store.store, store.rank, store.world_size, run_id or store.round_id or "torchft", attempt)
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: give both, with the rank below the world size")
        opened = open_store(store) if isinstance(store, str | os.PathLike) else store
        return cls(opened, rank, world_size, run_id or "torchft", attempt)
