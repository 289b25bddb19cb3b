"""A dataset divided among the replicas, in an order that can be resumed anywhere: `ShardedLoader`, `TokenBlocks`.

Within an epoch no two replicas get the same sample, and all get equally many batches; the few samples left over differ
from epoch to epoch. The order depends on seed and epoch alone, so the cursor is two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from atoll.errors import ConfigError, InvalidSpec

Sample = TypeVar("Sample", covariant=True)


class MapStyle(Protocol[Sample]):
    """A dataset with a length and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def shard(size: int, *, rank: int, world_size: int, seed: int | None = 0, epoch: int = 0) -> list[int]:
    """The indices of one replica's samples in one epoch, in order; `seed=None` does not shuffle."""
    if seed is None:
        order = torch.arange(size)
    else:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))
    each = size // world_size
    mine: list[int] = order[rank : each * world_size : world_size].tolist()
    return mine


class ShardedLoader:
    """Batches of this replica's share of a dataset; each iteration is one epoch.

    `options` go to torch's DataLoader: `num_workers`, `collate_fn`, `pin_memory`, … The cursor counts the batches
    that the training loop used, not those that workers prepared. Random augmentation inside workers is seeded for each
    epoch; a loader that resumes in the middle of an epoch does not repeat it.
    """

    def __init__(
        self,
        dataset: MapStyle[Any],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        problems = []
        if not 0 <= rank < world_size:
            problems.append(f"rank={rank}: from 0 to below world_size={world_size}")
        if batch_size < 1:
            problems.append(f"batch_size={batch_size}: 1 or more")
        elif world_size > 0 and len(dataset) < world_size * batch_size:
            problems.append(f"{len(dataset)} samples do not give {world_size} replicas a batch of {batch_size} each")
        if problems:
            raise InvalidSpec("sharded loader", problems)
        self._dataset, self._batch_size, self._options = dataset, batch_size, options
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self._dataset) // self._world_size // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch."""
        wanted = self._indices()[self._batch :]
        # torch's loader draws from its own generator, so that the random numbers of the model do not change.
        generator = torch.Generator().manual_seed(_mixed(self._seed or 0, self._epoch, self._rank + 1))
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]  # any map-style dataset will do
            batch_sampler=wanted,
            generator=generator,
            **self._options,
        )
        for batch in loader:
            self._batch += 1
            yield batch
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batch": self._batch, "shape": self._shape()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches of the saved cursor. Applies to iterators that are created from now on."""
        if state_dict["shape"] != self._shape():
            raise ConfigError(
                f"the cursor belongs to {state_dict['shape']}, this loader has {self._shape()}",
                hint="resume with the same data, batch size, seed and number of replicas",
            )
        self._epoch, self._batch = state_dict["epoch"], state_dict["batch"]

    def _indices(self) -> list[list[int]]:
        mine = shard(
            len(self._dataset), rank=self._rank, world_size=self._world_size, seed=self._seed, epoch=self._epoch
        )
        size = self._batch_size
        return [mine[i * size : (i + 1) * size] for i in range(len(self))]

    def _shape(self) -> dict[str, Any]:
        """The settings that a cursor depends on."""
        return {
            "samples": len(self._dataset),
            "batch_size": self._batch_size,
            "rank": self._rank,
            "world_size": self._world_size,
            "seed": self._seed,
        }


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """A stream of tokens cut into blocks: sample i is `(block, the same block one token later)`."""

    def __init__(self, tokens: Tensor | Sequence[int], block_size: int) -> None:
        self._tokens = torch.as_tensor(tokens)
        self._block_size = block_size
        if self._tokens.dim() != 1 or block_size < 1 or len(self) < 1:
            raise ConfigError(f"{list(self._tokens.shape)} tokens do not give a block of {block_size} and its targets")

    def __len__(self) -> int:
        return (self._tokens.numel() - 1) // self._block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = index * self._block_size, (index + 1) * self._block_size
        return self._tokens[start:stop].long(), self._tokens[start + 1 : stop + 1].long()


def _mixed(*numbers: int) -> int:
    """One seed from several numbers; different numbers give different seeds, in practice."""
    mixed = 0x9E3779B97F4A7C15
    for value in numbers:
        mixed = ((mixed ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF
