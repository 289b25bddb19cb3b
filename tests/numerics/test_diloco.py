"""DiLoCo against plain arithmetic: data parallel, plain training and torch's own Nesterov."""

from __future__ import annotations

import random
import time

import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, bits, contexts, loss_of, perceptron, side_by_side, train, weights
from torch import nn

import atoll
from atoll.registry import open_store
from atoll.rounds.verify import verify

pytestmark = pytest.mark.training


def data_parallel(world_size: int, steps: int, *, lr: float) -> nn.Module:
    """Synchronous data parallel training: the mean of all gradients in every step."""
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    data = [batches(rank, steps) for rank in range(world_size)]
    for step in range(steps):
        sum(loss_of(model, data[rank][step]) for rank in range(world_size)).backward()  # type: ignore[union-attr]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= world_size
        inner.step()
        inner.zero_grad()
    return model


def local_steps(world_size: int, steps: int, *, is_alone: bool, outer: atoll.rounds.outer.OuterRule) -> list[nn.Module]:
    """One inner step of SGD to a round; with `is_alone` every replica is a run of its own, so nothing is exchanged."""

    def body(ctx: atoll.ReplicaContext) -> nn.Module:
        mine = atoll.ReplicaContext(f"alone-{ctx.rank}", 0, 1, ctx.store_uri) if is_alone else ctx
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with atoll.DiLoCo(model, inner, mine, inner_steps=1, outer=outer, tuning=QUICK, checkpoint=None) as loop:
            train(loop, model, inner, batches(ctx.rank, steps), steps)
        return model

    return side_by_side(contexts(world_size), body)


@pytest.mark.parametrize("outer", [atoll.Nesterov(lr=1.0, momentum=0.0), atoll.Average()])
def test_one_step_of_sgd_to_a_round_is_synchronous_data_parallel(outer):
    expected = weights(data_parallel(4, 20, lr=0.1))
    for model in local_steps(4, 20, is_alone=False, outer=outer):
        assert (weights(model) - expected).abs().max() < 1e-5


def test_without_the_exchange_it_is_not_data_parallel():
    expected = weights(data_parallel(4, 20, lr=0.1))
    for model in local_steps(4, 20, is_alone=True, outer=atoll.Average()):
        assert (weights(model) - expected).abs().max() > 1e-2


def test_a_replica_with_more_samples_counts_for_more():
    """Unequal batches: one step to a round is the gradient over all samples, each counted once."""
    sizes, steps = [4, 20], 15
    data = [batches(rank, steps, size=size) for rank, size in enumerate(sizes)]

    def body(ctx: atoll.ReplicaContext) -> nn.Module:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with atoll.LocalSGD(model, inner, ctx, inner_steps=1, tuning=QUICK) as outer:
            train(outer, model, inner, data[ctx.rank], steps)
        return model

    reference = perceptron()
    inner = torch.optim.SGD(reference.parameters(), lr=0.1)
    for both in zip(*data, strict=True):
        x, y = (torch.cat(part) for part in zip(*both, strict=True))
        loss_of(reference, (x, y)).backward()
        inner.step()
        inner.zero_grad()
    for model in side_by_side(contexts(2), body):
        assert (weights(model) - weights(reference)).abs().max() < 1e-5


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("outer", [atoll.Nesterov(lr=1.0, momentum=0.0), atoll.Average()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_replica_with_outer_lr_one_is_plain_training_to_the_bit(optimizer, outer, dtype):
    def trained(with_diloco: bool) -> bytes:
        model = perceptron(dtype=dtype)
        inner = optimizer(model.parameters(), lr=0.02)
        data = batches(0, 30)
        if with_diloco:
            [ctx] = contexts(1)
            with atoll.DiLoCo(model, inner, ctx, inner_steps=5, outer=outer, tuning=QUICK) as loop:
                train(loop, model, inner, data, 6)
        else:
            for batch in data:
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
        return bits(model)

    assert trained(True) == trained(False)


@pytest.mark.parametrize("tuning", [QUICK, SCATTERED])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_replicas_hold_the_same_bits_after_every_round_whatever_the_delays(codec, tuning):
    def body(ctx: atoll.ReplicaContext) -> tuple[list[bytes], float]:
        model = perceptron(seed=ctx.rank)  # different: the agreed weights must win
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        chance = random.Random(ctx.rank)
        history: list[bytes] = []
        losses: list[float] = []
        data = batches(ctx.rank, 200, size=8 + 4 * ctx.rank)  # other weights in the mean
        with atoll.DiLoCo(model, inner, ctx, inner_steps=3, codec=codec, tuning=tuning, snapshot=99) as loop:
            history.append(bits(model))
            for batch in loop.steps(data, rounds=12):
                if loop.round + 1 > len(history):
                    history.append(bits(model))
                time.sleep(chance.random() * 0.01)  # who is late differs from round to round
                loss = loss_of(model, batch)
                loss.backward()
                inner.step()
                inner.zero_grad()
                losses.append(loss.item())
        return [*history, bits(model)], losses[-1] / losses[0]

    replicas = contexts(3)
    results = side_by_side(replicas, body)
    histories = [history for history, _ in results]
    assert len(histories[0]) == 13
    assert histories[0] == histories[1] == histories[2]
    assert len(set(histories[0])) == 13
    assert all(gain < 0.8 for _, gain in results)
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert report.is_right, report.difference
    assert (report.rounds, report.updates, report.states) == (12, 36, 13)
    assert (report.means > 0) == (tuning is SCATTERED)


def test_the_outer_step_is_torch_nesterov_to_the_bit():
    """The mean of fp32 updates is fed to torch's own optimizer; live weights must follow it exactly."""

    def body(ctx: atoll.ReplicaContext) -> list[bool]:
        model = perceptron()
        reference = perceptron()
        nesterov = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        same = []
        with atoll.DiLoCo(model, inner, ctx, inner_steps=4, codec="fp32", tuning=QUICK) as loop:
            for batch in batches(ctx.rank, 40):
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
                moved = [
                    r.detach() - p.detach() for r, p in zip(reference.parameters(), model.parameters(), strict=True)
                ]
                if loop.step() is None:
                    continue
                for parameter, update in zip(reference.parameters(), moved, strict=True):
                    parameter.grad = update
                nesterov.step()
                same.append(bits(model) == bits(reference))
        return same

    [same] = side_by_side(contexts(1), body)
    assert len(same) == 10
    assert all(same)


def test_two_replicas_follow_torch_nesterov_on_the_mean_of_their_updates():
    models = [perceptron() for _ in range(2)]
    reference = perceptron()
    nesterov = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inners = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    data = [batches(rank, 24) for rank in range(2)]
    loops = side_by_side(
        contexts(2),
        lambda ctx: atoll.DiLoCo(
            models[ctx.rank], inners[ctx.rank], ctx, inner_steps=4, codec="fp32", tuning=QUICK, checkpoint=None
        ),
    )
    for step in range(24):
        for rank in range(2):
            loss_of(models[rank], data[rank][step]).backward()
            inners[rank].step()
            inners[rank].zero_grad()
        if step % 4 == 3:
            for parameter, *others in zip(reference.parameters(), *(m.parameters() for m in models), strict=True):
                first, second = (parameter.detach() - other.detach() for other in others)
                parameter.grad = (first + second) / 2
            nesterov.step()
        side_by_side([loop.ctx for loop in loops], lambda ctx: loops[ctx.rank].step())
        if step % 4 == 3:
            assert bits(models[0]) == bits(models[1]) == bits(reference)
    for loop in loops:
        loop.close()
