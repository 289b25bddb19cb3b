"""Tiny models and data, and replicas that train them side by side as threads of one process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import atoll
from atoll.rounds.context import Tuning

torch.set_num_threads(1)

QUICK = Tuning(poll_first_s=0.001, poll_cap_s=0.02, turn_s=0.02, init_patience_s=5.0, patience_s=2.0)
"""For a store in memory: look often."""
SCATTERED = Tuning(
    poll_first_s=0.001,
    poll_cap_s=0.02,
    turn_s=0.02,
    patience_s=2.0,
    inline_bytes=0,
    latency_s=0.0,
    bandwidth_bytes_s=1.0,
)
"""Small updates that behave like big ones: written in chunks, averaged by their owners."""


def contexts(world_size: int, *, store: str | None = None, run_id: str = "toy") -> list[atoll.ReplicaContext]:
    """The replicas of a fresh run."""
    uri = store or f"memory://{uuid.uuid4().hex}"
    return [atoll.ReplicaContext(run_id, rank, world_size, uri) for rank in range(world_size)]


def side_by_side(contexts: list[atoll.ReplicaContext], body: Callable[[atoll.ReplicaContext], Any]) -> list[Any]:
    """What `body` returns for each replica; the first error, if any, is raised."""
    with ThreadPoolExecutor(len(contexts)) as pool:
        futures = [pool.submit(body, ctx) for ctx in contexts]
        return [future.result(timeout=120) for future in futures]


def perceptron(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A small network whose weights depend on the seed alone, whichever thread makes it."""
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.to(dtype)


def batches(rank: int, count: int, *, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Batches of a regression problem; those of another rank are others."""
    generator = torch.Generator().manual_seed(1000 + rank)
    teacher = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))
    inputs = [torch.randn(size, 8, generator=generator) for _ in range(count)]
    return [(x, torch.tanh(x @ teacher)) for x in inputs]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    dtype = next(model.parameters()).dtype
    dtype = torch.float32 if dtype.is_complex else dtype
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def weights(model: nn.Module) -> Tensor:
    """All parameters and buffers as one vector."""
    return torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()])


def bits(model: nn.Module) -> bytes:
    """The exact content of a model."""
    return b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in states(model))


def states(model: nn.Module) -> Iterator[Tensor]:
    yield from model.state_dict().values()


def train(
    outer: atoll.DiLoCo, model: nn.Module, inner: torch.optim.Optimizer, data: list[Any], rounds: int
) -> list[bytes]:
    """Train to the end; the model's bits after every round."""
    history: list[bytes] = []
    for batch in outer.steps(data, rounds=rounds):
        if outer.round > len(history):
            history.append(bits(model))
        loss = loss_of(model, batch)
        loss.backward()
        inner.step()
        inner.zero_grad()
        outer.log(loss=loss.item())
    return [*history, bits(model)]
