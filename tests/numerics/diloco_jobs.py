"""Entry points that tests launch as real replicas."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

import atoll
from atoll.rounds.context import Tuning
from atoll.testing.fakes import FaultyStore
from atoll.training.data import ShardedLoader, TokenBlocks

SMALL_PIECES = Tuning(
    poll_first_s=0.005,
    poll_cap_s=0.1,
    turn_s=0.05,
    patience_s=5.0,
    inline_bytes=0,
    latency_s=0.0,
    bandwidth_bytes_s=1.0,
)
"""Every update goes in several chunks, and each chunk is averaged by its owner."""


def die_at(ctx: atoll.ReplicaContext, points: list[list]) -> None:
    """In attempt i, SIGKILL this process just before the nth store request that fits points[i]."""
    if ctx.attempt >= len(points):
        return
    verb, pattern, nth = points[ctx.attempt]
    store = FaultyStore(ctx.store)
    seen = 0

    def before(asked: str, key: str) -> None:
        nonlocal seen
        if asked == verb and fnmatchcase(key, pattern):
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    store.before = before
    ctx.__dict__["store"] = store


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Dropout(0.2), nn.Linear(300, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def problem(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    inputs = [torch.randn(16, 8, generator=generator) for _ in range(10)]
    return [(x, torch.sin(x[:, :3])) for x in inputs]


def train(
    ctx: atoll.ReplicaContext, *, rounds: int, points: dict[str, list] | None = None, stream: dict | None = None
) -> dict:
    """Dropout draws from the random state, so a resume that loses it shows in the digest."""
    torch.set_num_threads(1)
    torch.manual_seed(ctx.rank)
    random.seed(ctx.rank)
    die_at(ctx, (points or {}).get(str(ctx.rank), []))
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"tuning": SMALL_PIECES, "chunk": 1024, "checkpoint": 2, "snapshot": 2}
    with atoll.DiLoCo(model, inner, ctx, **{"inner_steps": 3, **options, **(stream or {})}) as outer:
        for x, y in outer.steps(problem(ctx.rank), rounds=rounds):
            loss = nn.functional.mse_loss(model(x), y) * (1 + random.random() / 10)
            loss.backward()
            inner.step()
            inner.zero_grad()
            outer.log(loss=loss.item())
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    moments = b"".join(s["exp_avg_sq"].numpy().tobytes() for s in inner.state.values())
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "moments": hashlib.sha256(moments).hexdigest(),
        "attempt": ctx.attempt,
        "rounds": outer.round,
    }


def forked(
    job: str, store: str, run_id: str, rank: int, world_size: int, attempt: int, fate: None, arguments: dict
) -> dict:
    """One of the entry points above and below, in a process that no supervisor started."""
    ctx = atoll.ReplicaContext(run_id, rank, world_size, store, attempt=attempt)
    return globals()[job](ctx, **arguments)


def train_with_workers(ctx: atoll.ReplicaContext, *, rounds: int, stream: dict) -> dict:
    """Batches come from two forked worker processes, while the replica talks to the store."""
    torch.set_num_threads(1)
    tokens = torch.arange(4001) * 7 % 61
    batches = ShardedLoader(TokenBlocks(tokens, 8), 4, rank=ctx.rank, world_size=ctx.world_size, num_workers=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 16), nn.Linear(16, 61))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=10, **stream) as outer:
        for x, y in outer.steps(batches, rounds=rounds):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            inner.step()
            inner.zero_grad()
            outer.log(loss=loss.item())
            losses.append(loss.item())
        digest = outer.digest
    return {"digest": digest, "first": losses[0], "last": losses[-1], "steps": len(losses)}
