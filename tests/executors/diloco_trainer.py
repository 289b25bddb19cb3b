"""The trainer of the DiLoCo tests of executors: a small network, trained in rounds that all replicas agree on."""

from __future__ import annotations

import torch
from torch import nn

import atoll


def train(ctx: atoll.ReplicaContext, *, rounds: int, lr: float) -> dict[str, object]:
    """Return the final weights to the last bit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(100 + ctx.rank)
    batches = [torch.randn(16, 8, generator=data) for _ in range(rounds * 4)]
    losses = []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, codec="fp32") as outer:
        for x in outer.steps(batches, rounds=rounds):
            loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :3]))
            loss.backward()
            inner.step()
            inner.zero_grad()
            losses.append(loss.item())
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"rank {ctx.rank}: {losses[0]:.4f} -> {losses[-1]:.4f}")
    return {"weights": weights.hex(), "first": losses[0], "last": losses[-1]}
