"""Replicas with torch: DiLoCo as people use it, in processes that tests kill, fork and count."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # optimizers load it when they are first used; here once for all children
from fated_store import FatedStore
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import atoll
from atoll.registry import open_store
from atoll.rounds.context import Tuning
from atoll.rounds.quorum import Quorum
from atoll.testing.fakes import FaultyStore
from atoll.training.data import ShardedLoader, TokenBlocks

SMALL_PIECES = Tuning(
    poll_first_s=0.005, poll_cap_s=0.05, turn_s=0.2, patience_s=2.0, inline_bytes=0, latency_s=0.0,
    bandwidth_bytes_s=1.0,
)  # fmt: skip
QUICK = Tuning(poll_first_s=0.005, poll_cap_s=0.05, turn_s=0.2, patience_s=5.0)


def context(uri: str, run_id: str, rank: int, world_size: int, attempt: int = 0) -> atoll.ReplicaContext:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    return atoll.ReplicaContext(run_id, rank, world_size, uri, attempt=attempt)


def train(
    uri: str,
    run_id: str,
    rank: int,
    world_size: int,
    rounds: int,
    *,
    attempt: int = 0,
    fate: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Dropout draws from the random state, so a resume that loses it shows in the digest."""
    ctx = context(uri, run_id, rank, world_size, attempt)
    if fate is not None:
        ctx.__dict__["store"] = FatedStore(open_store(uri), fate)
    model = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Dropout(0.2), nn.Linear(200, 3))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"tuning": SMALL_PIECES, "chunk": 1024, "checkpoint": 2, "snapshot": 2, "quorum": Quorum(deadline_s=60.0)}
    with atoll.DiLoCo(model, inner, ctx, inner_steps=2, **options) as outer:
        for x, y in outer.steps(problem(rank), rounds=rounds):
            loss = functional.mse_loss(model(x), y) * (1 + random.random() / 10)
            loss.backward()
            inner.step()
            inner.zero_grad()
    return {
        "weights": digest(p.detach() for p in model.parameters()),
        "moments": digest(state["exp_avg_sq"] for state in inner.state.values()),
        "attempt": attempt,
    }


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def problem(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    inputs = [torch.randn(16, 8, generator=generator) for _ in range(10)]
    return [(x, torch.sin(x[:, :3])) for x in inputs]


def train_with_workers(uri: str, run_id: str, rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    """Batches come from two forked worker processes, while the replica talks to the store."""
    ctx = context(uri, run_id, rank, world_size)
    tokens = torch.arange(4001) * 7 % 61
    batches = ShardedLoader(TokenBlocks(tokens, 8), 4, rank=rank, world_size=world_size, num_workers=2)
    model = nn.Sequential(nn.Embedding(61, 16), nn.Linear(16, 61))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=5, tuning=QUICK) as outer:
        for x, y in outer.steps(batches, rounds=rounds):
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            inner.step()
            inner.zero_grad()
            losses.append(loss.item())
        return {"digest": outer.digest, "losses": losses}


class FromTheStore(Dataset[Tensor]):
    """A dataset that reads its items from the run's store, in whichever process asks."""

    def __init__(self, ctx: atoll.ReplicaContext) -> None:
        self.ctx = ctx

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(bytes(self.ctx.store.get(f"data/{index}"))))


def read_in_workers(uri: str, run_id: str) -> list[float]:
    """The parent uses the store, then forks workers that use it."""
    ctx = context(uri, run_id, 0, 1)
    for index in range(4):
        ctx.store.put(f"data/{index}", str(index).encode())
    return [value.item() for value in DataLoader(FromTheStore(ctx), batch_size=1, num_workers=2, timeout=60)]


# ---- quality


class TinyGPT(nn.Module):
    """One block of attention; characters in, the logits of the next one out."""

    def __init__(self, width: int = 32, context: int = 32) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places.weight
        query, key, value = self.attend(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.mix(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return self.head(self.norms[2](x + self.network(self.norms[1](x))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


def learn_text(
    uri: str, run_id: str, rank: int, world_size: int, rounds: int, *, inner_steps: int, text: str, shares: int
) -> dict[str, Any]:
    """Train on one of `shares` of a text; the loss on its last tenth, and what went through the store."""
    ctx = context(uri, run_id, rank, world_size)
    counting = FaultyStore(open_store(uri))
    ctx.__dict__["store"] = counting
    tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
    split = len(tokens) * 9 // 10
    batches = ShardedLoader(TokenBlocks(tokens[:split], 32), 2, rank=rank, world_size=shares, seed=1)
    torch.manual_seed(0)
    model = TinyGPT()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    rule = atoll.Nesterov() if world_size > 1 else atoll.Nesterov(lr=1.0, momentum=0.0)  # alone: plain training
    with atoll.DiLoCo(
        model, inner, ctx, inner_steps=inner_steps, outer=rule, tuning=QUICK, checkpoint=None, codec="fp32"
    ) as outer:
        for x, y in outer.steps(batches, rounds=rounds):
            model.loss(x, y).backward()
            inner.step()
            inner.zero_grad()
        digest = outer.digest
    held_out = TokenBlocks(tokens[split:], 32)
    x, y = (torch.stack(part) for part in zip(*(held_out[i] for i in range(200)), strict=True))
    with torch.no_grad():
        loss = model.loss(x, y).item()
    traffic, counters = counting.traffic, outer.counters
    return {
        "loss": loss,
        "digest": digest,
        "counted": [traffic.requests.total(), traffic.bytes_up.total(), traffic.bytes_down.total()],
        "said": [counters.requests.total(), counters.bytes_up, counters.bytes_down],
        "model_bytes": sum(p.numel() for p in model.parameters()) * 4,
    }
