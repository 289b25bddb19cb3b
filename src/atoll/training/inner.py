"""The inner side: the user's optimizers, counted by their own steps, saved and restored to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError


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
