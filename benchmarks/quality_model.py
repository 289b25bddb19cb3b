"""What `quality.py` trains: a character-level GPT of 112,577 parameters on tinyshakespeare."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.training.data import ShardedLoader, TokenBlocks

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
_STDLIB_FILES = 40


@cache
def tokens(text: str) -> tuple[Tensor, int]:
    """The text as numbers of characters, and how many different ones there are. `stdlib` is Python's own source."""
    raw = _stdlib() if text == "stdlib" else Path(text).read_bytes()
    characters = sorted(set(raw))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in raw], dtype=torch.uint8), len(characters)


def _stdlib() -> bytes:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files.sort(key=lambda path: hashlib.sha256(path.name.encode()).digest())
    return b"".join(
        path.read_bytes().decode("ascii", "replace").encode("ascii", "replace") for path in files[:_STDLIB_FILES]
    )


def training_batches(text: str, rank: int, world_size: int, batch_size: int, seed: int) -> ShardedLoader:
    """This replica's share of the first nine tenths; no block goes to two replicas in one epoch."""
    stream, _ = tokens(text)
    blocks = TokenBlocks(stream[: len(stream) * 9 // 10], CONTEXT)
    return ShardedLoader(blocks, batch_size, rank=rank, world_size=world_size, seed=seed)


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        parts = self.attention_in(self.norm_1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.network(self.norm_2(x))


class GPT(nn.Module):
    """Characters in, the logits of the next character out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


def fresh_model(text: str, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(tokens(text)[1])


@torch.no_grad()
def validation_loss(model: GPT, text: str) -> float:
    """The mean loss over the last tenth of the text, which nobody trains on."""
    stream, _ = tokens(text)
    held_out = TokenBlocks(stream[len(stream) * 9 // 10 :], CONTEXT)
    total, step = 0.0, 256
    for first in range(0, len(held_out), step):
        chosen = range(first, min(first + step, len(held_out)))
        x, y = (torch.stack(part) for part in zip(*(held_out[i] for i in chosen), strict=True))
        total += model.loss(x, y).item() * len(chosen)
    return total / len(held_out)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short warm-up, then half a cosine down to a tenth."""
    warm_up = min(1.0, (step + 1) / max(1, steps // 20))
    return peak * warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def inner_optimizer(model: nn.Module, peak: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.1)


def train_step(model: GPT, inner: torch.optim.Optimizer, x: Tensor, y: Tensor, lr: float) -> float:
    """The same inner step for everybody."""
    inner.param_groups[0]["lr"] = lr
    loss = model.loss(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner.step()
    inner.zero_grad()
    return loss.item()
