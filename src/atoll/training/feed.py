"""Batches for a run that may be interrupted: counts what the training loop has taken, and goes on from there.

Anything that has `state_dict` and `load_state_dict` (`ShardedLoader`, torchdata's loaders) keeps its own cursor. Any
other iterable is gone through again and what was taken is dropped; that is exact if the iterable gives the same
batches again, which includes a shuffling DataLoader, because the random state before the epoch is kept as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from atoll.errors import ConfigError
from atoll.training import rng

Batch = TypeVar("Batch")


@runtime_checkable
class Stateful(Protocol):
    """Keeps a state that can be saved and restored, as torch's optimizers and schedulers do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Feed(Iterator[Batch]):
    """An endless iterator over `batches`, epoch after epoch, with a cursor."""

    def __init__(self, batches: Iterable[Batch], saved: dict[str, Any] | None = None) -> None:
        self._batches = batches
        self._taken = 0
        self._own = batches if isinstance(batches, Stateful) else None
        self._before_epoch = rng.capture()
        if saved is not None:
            self._resume(saved)
        else:
            self._iterator = iter(batches)

    def __next__(self) -> Batch:
        for _ in range(2):
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._begin_epoch()
                continue
            self._taken += 1
            return batch
        raise ConfigError(
            "the batches ran out",
            reason="exhausted",
            hint="pass something that can be iterated again, epoch after epoch",
        )

    def state_dict(self) -> dict[str, Any]:
        """The cursor: what comes after the batches that were taken."""
        if self._own is not None:
            return {"own": self._own.state_dict()}
        return {"taken": self._taken, "before_epoch": self._before_epoch}

    def _resume(self, saved: dict[str, Any]) -> None:
        if ("own" in saved) != (self._own is not None):
            raise ConfigError(
                "the checkpoint was made with batches of another kind: one with a cursor, one without",
                reason="cursor",
            )
        if self._own is not None:
            self._own.load_state_dict(saved["own"])
            self._iterator = iter(self._batches)
            return
        self._before_epoch = saved["before_epoch"]
        rng.restore(self._before_epoch)
        self._iterator = iter(self._batches)
        for _ in range(saved["taken"]):
            if next(self._iterator, self) is self:
                raise ConfigError("there are fewer batches than before the interruption", reason="exhausted")
        self._taken = saved["taken"]

    def _begin_epoch(self) -> None:
        self._taken = 0
        self._before_epoch = rng.capture()
        self._iterator = iter(self._batches)


def elements(batch: object) -> float:
    """What a batch weighs by default: the elements of the first tensor in it, or 1 when there is none."""
    first = _first_tensor(batch)
    return float(first.numel()) if first is not None and first.numel() else 1.0


def _first_tensor(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    return None
