"""Which of a model's buffers replicas average, and which each keeps to itself.

`average`: persistent floating-point buffers (BatchNorm statistics) are averaged with the weights, so that after a
round every replica holds the same model. Counters and masks of other types, and buffers that are not persistent, are
rebuilt or counted alike by every replica and stay local.
`local`: none is exchanged; the values they begin with are each replica's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError

BufferPolicy: TypeAlias = Literal["average", "local"]


def check_policy(policy: str) -> None:
    if policy not in ("average", "local"):
        raise ConfigError(f"buffers={policy!r}: `average` or `local`")


def averaged_buffers(model: nn.Module, policy: BufferPolicy) -> list[tuple[str, Tensor]]:
    """The buffers that are exchanged, by name."""
    return [] if policy == "local" else [(name, b) for name, b in persistent_buffers(model) if b.is_floating_point()]


def local_buffers(model: nn.Module, policy: BufferPolicy) -> dict[str, Tensor]:
    """The persistent buffers that are not exchanged: a checkpoint has to keep them."""
    exchanged = {name for name, _ in averaged_buffers(model, policy)}
    return {name: buffer for name, buffer in persistent_buffers(model) if name not in exchanged}


def restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Put saved local buffers back."""
    own = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in saved.items():
            if name in own:
                own[name].copy_(value)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the model's state, each once even if two modules share it."""
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or buffer in seen:
                continue
            seen.add(buffer)
            yield f"{prefix}.{name}" if prefix else name, buffer
