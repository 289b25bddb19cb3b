"""A character-level GPT trained by DiLoCo, on text that every Python installation has: its own standard library.

    atoll run examples/train_gpt.py:train --replicas 4

It reads from top to bottom in the order things happen: text, model, training.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll
from atoll.training.data import ShardedLoader, TokenBlocks

VOCABULARY = 128  # ASCII; anything else becomes `?`
CONTEXT = 64


# ---- text


@cache
def text(split: str) -> Tensor:
    """The standard library as one stream of characters; nine files in ten are for training, the rest for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: _scrambled(path.name))
    held_out = [path for path in files if _scrambled(path.name)[0] < 26]
    chosen = held_out if split == "validation" else [path for path in files if path not in held_out]
    characters = b"".join(path.read_bytes() for path in chosen).decode("utf-8", "replace")
    return torch.frombuffer(bytearray(characters.encode("ascii", "replace")), dtype=torch.uint8)


def _scrambled(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


# ---- model


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.attention_in(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.network(self.norm_2(x))


class GPT(nn.Module):
    """Characters in, the logits of the next character out."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


def validation_loss(model: GPT, blocks: int = 128) -> float:
    """The loss on text that nobody trains on."""
    held_out = TokenBlocks(text("validation"), CONTEXT)
    step = len(held_out) // blocks
    x, y = (torch.stack(part) for part in zip(*(held_out[i * step] for i in range(blocks)), strict=True))
    with torch.no_grad():
        return model.loss(x, y).item()


# ---- training


def batches(rank: int, world_size: int, batch_size: int) -> ShardedLoader:
    return ShardedLoader(TokenBlocks(text("training"), CONTEXT), batch_size, rank=rank, world_size=world_size, seed=1)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short warm-up, then half a cosine."""
    warm_up = min(1.0, (step + 1) / 50)
    return peak * warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


class Kept(dict):
    """A dict that goes into the checkpoint."""

    def state_dict(self) -> dict:
        return dict(self)

    load_state_dict = dict.update


def train(
    ctx: atoll.ReplicaContext, *, rounds: int = 50, inner_steps: int = 20, batch_size: int = 8, lr: float = 2e-3
) -> dict:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ctx.world_size))
    torch.manual_seed(0)
    model = GPT()
    inner = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    history = Kept(train=[], validation=[])

    with atoll.DiLoCo(model, inner, ctx, inner_steps=inner_steps, stateful={"history": history}) as outer:
        for x, y in outer.steps(batches(ctx.rank, ctx.world_size, batch_size), rounds=rounds):
            if outer.inner_step % (2 * inner_steps) == 0 and ctx.rank == 0:  # all replicas have these weights now
                history["validation"].append([outer.inner_step, validation_loss(model)])
            inner.param_groups[0]["lr"] = learning_rate(outer.inner_step, rounds * inner_steps, lr)
            loss = model.loss(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            inner.zero_grad()
            history["train"].append(loss.item())
            outer.log(loss=loss.item())
        counters = outer.counters
    final = validation_loss(model)
    print(f"rank {ctx.rank}: validation loss {final:.4f} after {outer.round} rounds, weights {outer.digest[:12]}")
    return {
        "validation_loss": final, "history": history, "digest": outer.digest, "wait_share": outer.wait_share,
        "bytes_up": counters.bytes_up, "bytes_down": counters.bytes_down,
    }  # fmt: skip
