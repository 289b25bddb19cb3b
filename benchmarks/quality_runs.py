"""One training run of `quality.py`: data parallel, one replica alone, or one replica of DiLoCo; each in its process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from quality_model import (
    GPT,
    fresh_model,
    inner_optimizer,
    learning_rate,
    train_step,
    training_batches,
    validation_loss,
)
from quality_store import LinkedContext
from torch import Tensor

import atoll
from atoll.rounds.context import Tuning
from atoll.rounds.quorum import Quorum
from atoll.training.inner import Feed

OFTEN = Tuning(poll_first_s=0.01, poll_cap_s=0.03, keep_freed_memory=True)
"""Rounds of half a second are looked after more often than those of minutes, for which the usual pauses are made."""


@dataclass(frozen=True)
class Setting:
    """What all ways to train have in common."""

    text: str
    replicas: int
    steps: int
    inner_steps: int
    batch_size: int
    lr: float
    seed: int

    @property
    def rounds(self) -> int:
        return self.steps // self.inner_steps


@dataclass(frozen=True)
class Arm:
    """A way to exchange updates: options of `atoll.DiLoCo`, bytes a second of each replica's link, seconds of a step.

    A step that is over sooner sleeps for the rest, as a processor does whose steps are computed by an accelerator.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    bytes_s: float | None = None
    step_s: float = 0.0

    @property
    def fragments(self) -> int:
        """Each is exchanged in a round of its own, so this many rounds exchange the whole model."""
        return int(self.options.get("fragments", 1))


@dataclass(frozen=True)
class Replica:
    """What one replica of DiLoCo has to tell."""

    loss: float
    parameters: int
    digest: str
    seconds: float
    wait_share: float
    hidden_share: float
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    requests: int


def data_parallel(setting: Setting, shards: int) -> float:
    """The mean gradient of `shards` replicas' batches in every step; with one shard, a replica alone."""
    torch.set_num_threads(1)
    model = fresh_model(setting.text, setting.seed)
    inner = inner_optimizer(model, setting.lr)
    feeds = [_feed(setting, rank) for rank in range(shards)]
    for step in range(setting.steps):
        # Equal batches: the gradient of their mean loss is the mean of the gradients that replicas would send.
        x, y = (torch.cat(part) for part in zip(*(next(feed) for feed in feeds), strict=True))
        train_step(model, inner, x, y, learning_rate(step, setting.steps, setting.lr))
    return validation_loss(model, setting.text)


def replica(setting: Setting, arm: Arm, rank: int, store: str, run_id: str) -> Replica:
    """One of the replicas of a DiLoCo run that share nothing but the store."""
    torch.set_num_threads(1)
    ctx = LinkedContext(run_id, rank, setting.replicas, store, bytes_s=arm.bytes_s)
    model = fresh_model(setting.text, setting.seed)
    inner = inner_optimizer(model, setting.lr)
    began, rounds = time.monotonic(), setting.rounds * arm.fragments
    with atoll.DiLoCo(
        model, inner, ctx, inner_steps=setting.inner_steps, checkpoint=None, snapshot=rounds,
        quorum=Quorum(deadline_s=300.0), tuning=OFTEN, **arm.options,
    ) as outer:  # fmt: skip
        for x, y in outer.steps(_feed(setting, rank), rounds=rounds):
            over_at = time.monotonic() + arm.step_s
            train_step(model, inner, x, y, learning_rate(outer.inner_step, setting.steps, setting.lr))
            time.sleep(max(0.0, over_at - time.monotonic()))
        seconds = time.monotonic() - began
    return Replica(
        validation_loss(model, setting.text), size_of(model), outer.digest, seconds, outer.wait_share,
        outer.hidden_share, dict(ctx.store.bytes_up), dict(ctx.store.bytes_down),
        ctx.store.requests.total(),
    )  # fmt: skip


def size_of(model: GPT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _feed(setting: Setting, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    return Feed(training_batches(setting.text, rank, setting.replicas, setting.batch_size, setting.seed))
