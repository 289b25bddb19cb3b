"""Replicas of torchft's DiLoCo and LocalSGD as threads, and what they train: with our manager, or with a plain one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atoll.rounds.context import Tuning
from atoll.stores.memory import MemoryStore
from atoll.training.torchft.manager import Manager

torch.set_num_threads(1)

STEPS = 30
STREAMING = {"is_split": True, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
CASES = [(delay, alpha) for delay in (0, 1) for alpha in (0.0, 0.5, 1.0)]
"""Delay and alpha of torchft's published fixtures."""
QUICK = Tuning(
    poll_first_s=0.001,
    poll_cap_s=0.02,
    turn_s=0.02,
    init_patience_s=5.0,
    patience_s=2.0,
    outlier_factor=None,
    retry_s=2.0,
)
Make = Callable[[int], Any]
"""A manager for a rank."""


def local_sgd() -> Any:
    import torchft.local_sgd as module

    return module


def side_by_side(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(body, rank) for rank in range(world_size)]
        return [future.result(timeout=180) for future in futures]


@contextmanager
def our_managers(world_size: int, **options: Any) -> Iterator[Make]:
    store = options.pop("store", None) or MemoryStore()
    settings = {"tuning": QUICK, "timeout_s": 60.0, **options}
    yield lambda rank: Manager(store, rank, world_size, **settings)


class PlainGroup:
    """The least a manager can be: ranks meet at a barrier and average in memory, one round after the other."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.given: list[list[Tensor]] = [[] for _ in range(world_size)]

    def manager(self, rank: int) -> PlainManager:
        return PlainManager(self, rank)


class PlainManager:
    """Written from torchft's calls alone, without anything of ours."""

    _use_async_quorum = False

    def __init__(self, group: PlainGroup, rank: int) -> None:
        self._group, self._rank, self._step = group, rank, 0
        self._queue: list[Tensor] = []
        self._saved: dict[str, Callable[[], Any]] = {}

    def register_state_dict_fn(self, key: str, load: Any, save: Callable[[], Any]) -> None:
        self._saved[key] = save

    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def wait_quorum(self) -> None: ...
    def start_quorum(self) -> None: ...
    def shutdown(self) -> None: ...

    def current_step(self) -> int:
        return self._step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> PlainManager:
        self._queue.append(tensor)
        return self

    def wait(self) -> None:
        if not self._queue:
            return
        mine, self._queue = self._queue, []
        self._group.given[self._rank] = [t.detach().clone() for t in mine]
        self._group.barrier.wait(60)
        for i, tensor in enumerate(mine):
            total = self._group.given[0][i]
            for rank in range(1, self._group.world_size):
                total = total + self._group.given[rank][i]
            tensor.detach().copy_(total / self._group.world_size)
        self._group.barrier.wait(60)

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def _manager_state_dict(self) -> dict[str, Any]:
        return {"user": {key: save() for key, save in self._saved.items()}}


@contextmanager
def plain_managers(world_size: int) -> Iterator[Make]:
    yield PlainGroup(world_size).manager


def small_model(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def batch(rank: int, step: int) -> Tensor:
    """Data that only this rank and step have."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10_000 * rank + step))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    inputs = batch(rank, step)
    loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def bits(tensors: list[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)


def outer_optimizers(fragments: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(one.parameters(), lr=0.7, momentum=0.9, nesterov=True) for one in fragments]


def run_diloco(make: Make, world_size: int, *, is_split: bool = False, **options: Any) -> list[tuple[Any, ...]]:
    """For each rank: its weights, its last loss, and the global weights of its fragments."""

    def body(rank: int) -> tuple[Any, ...]:
        model, manager = small_model(), make(rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        fragments = [model[0], model[2]] if is_split else [model]
        diloco = local_sgd().DiLoCo(
            manager, fragments, inner, outer_optimizers(fragments), **{"sync_every": 6, **options}
        )
        with diloco:
            losses = [train_step(model, inner, rank, step) for step in range(STEPS)]
        manager.shutdown()
        return weights(model), losses[-1], [t for f in diloco._fragments for t in f.original_parameters.values()]

    return side_by_side(world_size, body)


def run_local_sgd(make: Make, world_size: int) -> list[bytes]:
    def body(rank: int) -> bytes:
        model, manager = small_model(), make(rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with local_sgd().LocalSGD(manager, model, inner, sync_every=5):
            for step in range(STEPS):
                train_step(model, inner, rank, step)
        manager.shutdown()
        return bits(weights(model))

    return side_by_side(world_size, body)


class Constant(nn.Module):
    """One weight whose gradient is always 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))


class PlainDescent(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


def history(make: Make, delay: int, alpha: float) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Weights at every step, and global weights at every new manager step, until the manager is at step 7."""

    def body(rank: int) -> tuple[dict[int, Any], dict[int, Any]]:
        layers, manager = nn.ModuleList([Constant(), Constant()]), make(rank)
        inner = PlainDescent(layers.parameters(), lr=1.0)
        outer = [PlainDescent(layer.parameters(), lr=2.0) for layer in layers]
        live: dict[int, Any] = {}
        agreed: dict[int, Any] = {}
        with local_sgd().DiLoCo(manager, list(layers), inner, outer, sync_every=6, fragment_sync_delay=delay,
                              fragment_update_alpha=alpha):  # fmt: skip
            manager.start_quorum()
            manager.wait_quorum()
            assert manager.should_commit()
            assert manager.should_commit()
            seen = set()
            while True:
                live[len(live)] = [layer.weight.item() for layer in layers]
                if (at := manager.current_step()) == 7:
                    break
                if at not in seen:
                    seen.add(at)
                    user = manager._manager_state_dict()["user"]
                    agreed[len(live) - 1] = [
                        user[f"StreamingDiLoCoFragment_{i}"]["original_parameters"]["weight"].item() for i in range(2)
                    ]
                for layer in layers:
                    layer.weight.grad = torch.full((1, 1), 2.0)
                inner.step()
        manager.shutdown()
        return live, agreed

    return side_by_side(2, body)
