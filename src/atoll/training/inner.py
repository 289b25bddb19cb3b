"""The inner side: the user's optimizers, counted by their own steps, saved and restored to the bit.

How far a replica is between two exchanges: optimizer steps, and what they weigh for each fragment.

Batches for a run that may be interrupted: counts what the training loop has taken, and goes on from there.

Anything that has `state_dict` and `load_state_dict` (`ShardedLoader`, torchdata's loaders) keeps its own cursor. Any
other iterable is gone through again and what was taken is dropped; that is exact if the iterable gives the same
batches again, which includes a shuffling DataLoader, because the random state before the epoch is kept as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.training import checkpoint


class StepCounter:
    """Counts. A fragment's update weighs all that was trained since the fragment was exchanged last."""

    def __init__(self, fragments: int) -> None:
        self.since = 0
        """Optimizer steps since the last exchange began."""
        self.loose = 0
        """Optimizer steps since training was last at a boundary."""
        self.idle = 0
        """Boundaries in a row before which there was none."""
        self._weights = [0.0] * fragments
        self._steps = [0] * fragments
        self._taken = (0, 0, 0.0, 0)

    def count(self) -> None:
        """One optimizer step."""
        self.since += 1
        self.loose += 1

    def boundary(self, weight: float) -> None:
        """The end of a pass of the training loop, which weighs this much."""
        self._weights = [sum_ + weight for sum_ in self._weights]
        self._steps = [steps + self.loose for steps in self._steps]
        self.idle = 0 if self.loose else self.idle + 1
        self.loose = 0

    def weight(self, fragment: int) -> float:
        """What the update of a fragment counts in the mean: what was given, or else its optimizer steps."""
        return self._weights[fragment] or float(self._steps[fragment])

    def begin(self, fragment: int) -> None:
        """The exchange of a fragment begins."""
        self._taken = (fragment, self.since, self._weights[fragment], self._steps[fragment])
        self._weights[fragment], self._steps[fragment] = 0.0, 0
        self.since = 0

    def undo(self) -> None:
        """The exchange that began last came to nothing; it is due again."""
        fragment, since, weight, steps = self._taken
        self.since += since
        self._weights[fragment] += weight
        self._steps[fragment] += steps

    def forget(self, stride: int) -> None:
        """What was trained is lost. The next exchange is due when it would have been, but not at once."""
        self.since %= stride
        self._weights, self._steps = [0.0] * len(self._weights), [0] * len(self._steps)

    def restart(self) -> None:
        """Nothing was trained since the last exchange."""
        self.forget(1)

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "weights": self._weights, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since, self.loose = state["since"], 0
        self._weights, self._steps = list(state["weights"]), list(state["steps"])


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
        self._before_epoch = checkpoint.capture()
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
        checkpoint.restore(self._before_epoch)
        self._iterator = iter(self._batches)
        for _ in range(saved["taken"]):
            if next(self._iterator, self) is self:
                raise ConfigError("there are fewer batches than before the interruption", reason="exhausted")
        self._taken = saved["taken"]

    def _begin_epoch(self) -> None:
        self._taken = 0
        self._before_epoch = checkpoint.capture()
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


class InnerOptimizers:
    """One optimizer, or several that step together; the steps of the last one are counted."""

    def __init__(self, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        self._all = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self._all or not all(isinstance(one, Optimizer) for one in self._all):
            raise ConfigError("inner_optimizer is a torch optimizer, or a list of them")
        self._hook: Any = None

    def __iter__(self) -> Any:
        return iter(self._all)

    def on_step(self, call: Callable[[], None]) -> None:
        """Call this after every optimizer step, until `release`."""
        self._hook = self._all[-1].register_step_post_hook(lambda *_: call())

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forget(self) -> None:
        """Begin anew: moments made of values that are not finite would spoil every step to come."""
        for optimizer in self._all:
            optimizer.state.clear()

    def state_dicts(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dicts(self, saved: list[dict[str, Any]]) -> None:
        if len(saved) != len(self._all):
            raise ConfigError(f"the checkpoint has {len(saved)} optimizers, here there are {len(self._all)}")
        for optimizer, state in zip(self._all, saved, strict=True):
            try:
                optimizer.load_state_dict(state)
            except (ValueError, KeyError) as exc:
                raise ConfigError(f"the optimizer of the checkpoint does not fit this one: {exc}") from exc
            _keep_types(optimizer, state)


def _keep_types(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """torch casts loaded state to the type of the parameter; float32 moments of a bfloat16 model would lose bits."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][name] = torch.clone(value).to(loaded.device)
