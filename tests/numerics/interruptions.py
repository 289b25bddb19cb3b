"""Replicas that die in the middle of training and come back, as threads of one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diloco_toys import QUICK, batches, bits, contexts, loss_of, perceptron, side_by_side
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.rounds.keys import RoundKeys


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs in that replica."""


def dropout_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.Dropout(0.3), nn.Linear(20, 3))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def random_training(ctx: atoll.ReplicaContext, *, stop_after: int | None = None, rounds: int = 9, **more: Any) -> bytes:
    """Draws from every generator, has a schedule, a shuffling loader and local buffers; the model's final bits."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    model = dropout_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.97**step)  # depends on its own count
    data = DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*batches(0, 9), strict=True))), 10, shuffle=True)
    options = {"buffers": "local", "checkpoint": 2, "stateful": {"schedule": schedule}, "tuning": QUICK, **more}
    with atoll.DiLoCo(model, inner, ctx, **{"inner_steps": 3, **options}) as outer:
        for count, (x, y) in enumerate(outer.steps(data, rounds=rounds)):
            if count == stop_after:
                raise Killed
            noise = random.random() + np.random.random()
            (loss_of(model, (x, y)) * noise).backward()
            inner.step()
            inner.zero_grad()
            schedule.step()
    return bits(model)


def interrupted(
    world_size: int, *, victim: int, stop_after: int, rounds: int, committed: int | None = None, **options: Any
) -> list[bytes]:
    """A run in which one replica dies after so many steps and is started again; the final bits of every replica.

    With `committed`, it dies only when that round is.
    """

    def once(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron(ctx.rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, **{"inner_steps": 3, "tuning": QUICK, **options}) as outer:
            for count, batch in enumerate(outer.steps(batches(ctx.rank, 50), rounds=rounds)):
                if ctx.rank == victim and ctx.attempt == 0 and count == stop_after:
                    if committed is not None:
                        until(lambda: is_committed(ctx, committed))
                    raise Killed
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
        return bits(model)

    def body(ctx: atoll.ReplicaContext) -> bytes:
        try:
            return once(ctx)
        except Killed:
            return once(replace(ctx, attempt=1))

    return side_by_side(contexts(world_size), body)


def until_offered(ctx: atoll.ReplicaContext, round_no: int, *, rank: int) -> None:
    """Until the store has the update of another rank."""
    keys = RoundKeys(ctx.run_id)
    until(lambda: any(keys.parse_offer(key)[1] == rank for key in ctx.store.list(keys.offers_prefix(round_no))))


def is_committed(ctx: atoll.ReplicaContext, round_no: int) -> bool:
    keys = RoundKeys(ctx.run_id)
    return keys.commit(round_no) in ctx.store.list(keys.commits_prefix())


def until(happened: Callable[[], bool]) -> None:
    """Look again and again, for a minute at most."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)
