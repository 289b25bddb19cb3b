"""The inner side of training: the user's optimizers, the count of their steps, and the batches they train on.

`DiLoCo` calls it. Optimizers and batches are saved in checkpoints and restored to the bit.

Batches with `state_dict` and `load_state_dict` (`ShardedLoader`, torchdata's loaders) keep their own cursor. Any other
iterable is iterated again and the batches that were used are skipped. That is exact if the iterable gives the same
batches again, as a shuffling DataLoader does: the random state from before the epoch is saved too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.training.checkpoint import capture_rng, restore_rng

Batch = TypeVar("Batch")


class InnerOptimizers:
    """One optimizer, or several that step together; a hook counts the steps of the last one."""

    def __init__(self, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        self._all = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self._all or not all(isinstance(one, Optimizer) for one in self._all):
            raise ConfigError("inner_optimizer is a torch optimizer, or a list of them")
        self._hook: Any = None

    def __iter__(self) -> Any:
        return iter(self._all)

    def on_step(self, call: Callable[[], None]) -> None:
        """Call `call` after every optimizer step, until `release`."""
        self._hook = self._all[-1].register_step_post_hook(lambda *_: call())

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forget(self) -> None:
        """Clear the state: moments that are not finite would spoil every later step."""
        for optimizer in self._all:
            optimizer.state.clear()

    def state_dicts(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dicts(self, saved: list[dict[str, Any]]) -> None:
        if len(saved) != len(self._all):
            raise ConfigError(f"the checkpoint has {len(saved)} optimizers, this replica has {len(self._all)}")
        for optimizer, state in zip(self._all, saved, strict=True):
            try:
                optimizer.load_state_dict(state)
            except (ValueError, KeyError) as exc:
                raise ConfigError(f"the optimizer of the checkpoint does not fit this one: {exc}") from exc
            _keep_types(optimizer, state)


def _keep_types(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Undo torch's cast of loaded state to a parameter's type: float32 moments of bfloat16 weights would lose bits."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][name] = torch.clone(value).to(loaded.device)


class StepCounter:
    """Optimizer steps between two exchanges, and their weight for each fragment since its last exchange."""

    def __init__(self, fragments: int) -> None:
        self.since = 0
        """Optimizer steps since the last exchange began."""
        self.unclaimed = 0
        """Optimizer steps since the last call of `boundary`."""
        self.idle = 0
        """Consecutive iterations of the training loop without an optimizer step."""
        self._weights = [0.0] * fragments
        self._steps = [0] * fragments
        self._taken = (0, 0, 0.0, 0)

    def count(self) -> None:
        """Count one optimizer step."""
        self.since += 1
        self.unclaimed += 1

    def boundary(self, weight: float) -> None:
        """End an iteration of the training loop, and add its weight."""
        self._weights = [total + weight for total in self._weights]
        self._steps = [steps + self.unclaimed for steps in self._steps]
        self.idle = 0 if self.unclaimed else self.idle + 1
        self.unclaimed = 0

    def weight(self, fragment: int) -> float:
        """The weight of a fragment's update in the mean: the given weights, or else its optimizer steps."""
        return self._weights[fragment] or float(self._steps[fragment])

    def begin(self, fragment: int) -> None:
        """Begin the exchange of a fragment."""
        self._taken = (fragment, self.since, self._weights[fragment], self._steps[fragment])
        self._weights[fragment], self._steps[fragment] = 0.0, 0
        self.since = 0

    def undo(self) -> None:
        """Make the exchange that began last, and failed, due again."""
        fragment, since, weight, steps = self._taken
        self.since += since
        self._weights[fragment] += weight
        self._steps[fragment] += steps

    def forget(self, stride: int) -> None:
        """Drop the weights of discarded training. The next exchange is due at its usual step, but not at once."""
        self.since %= stride
        self._weights, self._steps = [0.0] * len(self._weights), [0] * len(self._steps)

    def restart(self) -> None:
        """Count from the last exchange, without any training since."""
        self.forget(1)

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "weights": self._weights, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since, self.unclaimed = state["since"], 0
        self._weights, self._steps = list(state["weights"]), list(state["steps"])


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored, such as torch's optimizers and schedulers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Feed(Iterator[Batch]):
    """An endless iterator over `batches`, epoch after epoch, with a cursor."""

    def __init__(self, batches: Iterable[Batch], saved: dict[str, Any] | None = None) -> None:
        self._batches = batches
        self._taken = 0
        self._own = batches if isinstance(batches, Stateful) else None
        self._before_epoch = capture_rng()
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
            hint="pass an iterable that can be iterated again for every epoch",
        )

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batches that were used."""
        if self._own is not None:
            return {"own": self._own.state_dict()}
        return {"taken": self._taken, "before_epoch": self._before_epoch}

    def _resume(self, saved: dict[str, Any]) -> None:
        if ("own" in saved) != (self._own is not None):
            raise ConfigError(
                "the batches of the checkpoint and these differ: only one of them has a cursor of its own",
                reason="cursor",
            )
        if self._own is not None:
            self._own.load_state_dict(saved["own"])
            self._iterator = iter(self._batches)
            return
        self._before_epoch = saved["before_epoch"]
        restore_rng(self._before_epoch)
        self._iterator = iter(self._batches)
        for _ in range(saved["taken"]):
            if next(self._iterator, self) is self:
                raise ConfigError("the batches ended before the position of the checkpoint", reason="exhausted")
        self._taken = saved["taken"]

    def _begin_epoch(self) -> None:
        self._taken = 0
        self._before_epoch = capture_rng()
        self._iterator = iter(self._batches)


def elements(batch: object) -> float:
    """The default weight of a batch: the elements of its first tensor, or 1 without a tensor."""
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
