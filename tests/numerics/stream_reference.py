"""Streaming DiLoCo as plain arithmetic: all replicas in one thread, torch's own optimizers, nothing of ours.

Written down from the papers: a fragment's exchange begins every `stride` steps in turn, its mean is there `delay` steps
later. `own` is what a replica's live weights do then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from diloco_toys import bits, loss_of
from torch import Tensor, nn

Names = list[str]


class Fragment:
    """The agreed values of some tensors, and the outer optimizer they have to themselves."""

    def __init__(self, names: Names, model: nn.Module, *, lr: float, momentum: float) -> None:
        self.names = names
        own = dict(model.named_parameters())
        self.values = [own[name].detach().clone().requires_grad_() for name in names]
        self.optimizer = torch.optim.SGD(self.values, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, mean: Sequence[Tensor]) -> None:
        for value, update in zip(self.values, mean, strict=True):
            value.grad = update
        self.optimizer.step()

    def foreseen(self, mean: Sequence[Tensor]) -> list[Tensor]:
        """The values after a step that is not taken."""
        twin = copy.deepcopy(self)
        twin.step(mean)
        return [value.detach() for value in twin.values]


@dataclass
class Replica:
    model: nn.Module
    inner: torch.optim.Optimizer
    history: list[bytes] = field(default_factory=list)
    stand_in: list[Tensor] = field(default_factory=list)

    def live(self, fragment: Fragment) -> list[Tensor]:
        own = dict(self.model.named_parameters())
        return [own[name] for name in fragment.names]

    def update(self, fragment: Fragment) -> list[Tensor]:
        return [(g - p).detach() for g, p in zip(fragment.values, self.live(fragment), strict=True)]


def simulate(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    data: Sequence[Sequence[tuple[Tensor, Tensor]]],
    fragments: Sequence[Names],
    *,
    stride: int,
    delay: int,
    alpha: float = 0.0,
    eager: bool = False,
    rounds: int,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> list[Replica]:
    """Every replica after `rounds` rounds, with its bits after each step; the last round is not delayed."""
    replicas = [Replica(*make()) for _ in data]
    agreed = [Fragment(names, replicas[0].model, lr=lr, momentum=momentum) for names in fragments]
    means: dict[int, list[Tensor]] = {}
    for step in range(1, stride * rounds + 1):
        for replica, batches in zip(replicas, data, strict=True):
            loss_of(replica.model, batches[step - 1]).backward()
            replica.inner.step()
            replica.inner.zero_grad()
        with torch.no_grad():
            if (means_due := means.pop(step, None)) is not None:
                _merge(replicas, agreed[((step - delay) // stride - 1) % len(agreed)], means_due, alpha, eager)
            if step % stride == 0:
                fragment = agreed[(step // stride - 1) % len(agreed)]
                mean = _exchange(replicas, fragment, eager)
                if delay and step < stride * rounds:
                    means[step + delay] = mean
                else:
                    _merge(replicas, fragment, mean, alpha, eager)
        for replica in replicas:
            replica.history.append(bits(replica.model))
    for replica in replicas:
        for fragment in agreed:
            for live, value in zip(replica.live(fragment), fragment.values, strict=True):
                live.data.copy_(value)
    return replicas


def _exchange(replicas: list[Replica], fragment: Fragment, eager: bool) -> list[Tensor]:
    updates = [replica.update(fragment) for replica in replicas]
    if eager:
        for replica, update in zip(replicas, updates, strict=True):
            replica.stand_in = fragment.foreseen(update)
            for live, value in zip(replica.live(fragment), replica.stand_in, strict=True):
                live.copy_(value)
    return [sum(parts[1:], parts[0]) / len(parts) for parts in zip(*updates, strict=True)]


def _merge(replicas: list[Replica], fragment: Fragment, mean: list[Tensor], alpha: float, eager: bool) -> None:
    with torch.enable_grad():
        fragment.step(mean)
    for replica in replicas:
        for i, (live, value) in enumerate(zip(replica.live(fragment), fragment.values, strict=True)):
            if eager:
                live.add_(value - replica.stand_in[i])
            else:
                live.copy_(torch.lerp(value, live, alpha))
