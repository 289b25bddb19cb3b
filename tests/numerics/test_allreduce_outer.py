"""The outer loop for people with a loop of their own, compared with DiLoCo written out, and with `atoll.DiLoCo`."""

from __future__ import annotations

import copy
import uuid

import pytest
import torch
from allreduce_ranks import bits, side_by_side
from torch import nn

import atoll
from atoll.errors import ConfigError, CorruptUpdate
from atoll.stores.memory import MemoryStore
from atoll.training.allreduce import ObjectStoreAllReduce, PartsDiffer, make_diloco_outer_loop

pytestmark = pytest.mark.training

ROUNDS, STEPS = 4, 3


def small_model(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, round_no: int) -> None:
    """A few steps on data that only this rank and round have."""
    generator = torch.Generator().manual_seed(100 * rank + round_no)
    for _ in range(STEPS):
        inputs = torch.randn(8, 4, generator=generator)
        target = inputs[:, :2].to(next(model.parameters()).dtype)
        loss = (model(inputs.to(target.dtype)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def weights(model: nn.Module) -> bytes:
    return b"".join(bits(tensor) for tensor in model.state_dict().values())


def written_out(world_size: int, *, lr: float, momentum: float, nesterov: bool = True) -> bytes:
    """DiLoCo without any of the code under test: all replicas one after the other."""
    replicas = [small_model() for _ in range(world_size)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in replicas]
    agreed = copy.deepcopy(replicas[0])
    outer = torch.optim.SGD(agreed.parameters(), lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    for round_no in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            train(model, optimizer, rank, round_no)
        with torch.no_grad():
            for i, parameter in enumerate(agreed.parameters()):
                moved = [parameter - list(model.parameters())[i] for model in replicas]
                total = moved[0]
                for one in moved[1:]:
                    total = total + one
                parameter.grad = total / world_size
        outer.step()
        for model in replicas:
            model.load_state_dict(agreed.state_dict())
    return weights(agreed)


def with_outer_loop(world_size: int, **options) -> list:
    def body(ar):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        outer = make_diloco_outer_loop(model, ar, **options)
        for round_no in range(ROUNDS):
            train(model, optimizer, ar.rank, round_no)
            assert outer() == round_no + 1
        return weights(model)

    return side_by_side(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("lr", "momentum", "nesterov"), [(0.7, 0.9, True), (0.4, 0.5, False), (1.0, 0.0, True)])
def test_it_is_diloco_to_the_bit(world_size, lr, momentum, nesterov):
    found = with_outer_loop(world_size, outer_lr=lr, outer_momentum=momentum, nesterov=nesterov)
    assert found == [written_out(world_size, lr=lr, momentum=momentum, nesterov=nesterov)] * world_size


def test_another_rule_gives_another_result():
    assert with_outer_loop(2, outer_momentum=0.8) != with_outer_loop(2, outer_momentum=0.9)


def test_it_agrees_with_the_diloco_of_atoll():
    uri = f"memory://{uuid.uuid4().hex}"

    def body(ar):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        ctx = atoll.ReplicaContext("run", ar.rank, 2, uri)
        with atoll.DiLoCo(model, optimizer, ctx, inner_steps=STEPS, codec="fp32", checkpoint=None) as outer:
            for round_no in range(ROUNDS):
                train(model, optimizer, ar.rank, round_no)
                outer.step()
        return weights(model)

    assert side_by_side(2, body) == with_outer_loop(2)


def test_one_exchange_for_a_whole_model():
    def body(ar):
        outer = make_diloco_outer_loop(small_model(), ar)
        outer()
        before = ar.counters.requests["create"]
        outer()
        return ar.counters.requests["create"] - before

    assert side_by_side(2, body) == [1, 1]


def test_ranks_that_begin_differently_are_found_out_before_anything_is_averaged():
    def body(ar):
        model = small_model(seed=ar.rank)
        outer = make_diloco_outer_loop(model, ar)
        before = weights(model)
        with pytest.raises(PartsDiffer) as caught:
            outer()
        assert weights(model) == before
        return sorted(caught.value.words)

    assert side_by_side(2, body) == [[0, 1], [0, 1]]


def test_agree_gives_everyone_the_weights_of_rank_0():
    def body(ar):
        model = small_model(seed=ar.rank)
        outer = make_diloco_outer_loop(model, ar)
        outer.agree()
        agreed = weights(model)
        outer()
        with pytest.raises(ConfigError) as caught:
            outer.agree()
        assert caught.value.reason == "too_late"
        return agreed, weights(model)

    assert side_by_side(3, body) == [(weights(small_model(0)),) * 2] * 3


def test_a_bfloat16_model_has_float32_outer_weights_and_starts_each_round_from_their_rounding():
    def body(ar):
        model = small_model().to(torch.bfloat16)
        outer = make_diloco_outer_loop(model, ar, outer_lr=0.001, outer_momentum=0.0)
        start = outer.state_dict()["agreed"][0].clone()
        for _ in range(50):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(torch.full_like(parameter, 0.25))
            outer()
        assert next(model.parameters()).dtype == torch.bfloat16
        return (start - outer.state_dict()["agreed"][0]).mean().item()

    # 50 steps of 0.25 * 0.001, each far below what bfloat16 can tell from nothing.
    assert side_by_side(2, body) == pytest.approx([0.0125, 0.0125], rel=0.05)


def test_frozen_parameters_stay_tied_ones_count_once_and_buffers_are_averaged():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.norm = nn.BatchNorm1d(3, affine=False)

    def body(ar):
        model = Tied()
        nn.init.ones_(model.a.weight)
        outer = make_diloco_outer_loop(model, ar, outer_lr=1.0, outer_momentum=0.0)
        with torch.no_grad():
            model.a.weight.add_(float(ar.rank))
            model.norm.running_mean.add_(float(ar.rank))
        outer()
        assert model.b.weight is model.a.weight
        return model.a.weight[0, 0].item(), model.frozen.tolist(), model.norm.running_mean.tolist()

    assert side_by_side(2, body) == [(1.5, [1.0, 1.0], [0.5, 0.5, 0.5])] * 2


def test_weights_that_are_not_finite_stop_every_rank_and_the_guilty_one_says_so():
    def body(ar):
        model = small_model()
        outer = make_diloco_outer_loop(model, ar)
        if ar.rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")
        with pytest.raises(CorruptUpdate) as caught:
            outer()
        return caught.value.check, caught.value.rank, outer.round

    assert side_by_side(2, body) == [("finite", -1, 0), ("finite", 1, 0)]


def test_a_checkpoint_goes_on_to_the_bit():
    store = MemoryStore()
    saved: dict[int, tuple] = {}

    def before(ar):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = make_diloco_outer_loop(model, ar)
        for round_no in range(ROUNDS):
            if round_no == 2:
                saved[ar.rank] = copy.deepcopy(outer.state_dict())
            train(model, optimizer, ar.rank, round_no)
            outer()
        return weights(model)

    def after(ar):
        model = small_model(seed=9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = make_diloco_outer_loop(model, ar)
        outer.load_state_dict(saved[ar.rank])
        for round_no in range(2, ROUNDS):
            train(model, optimizer, ar.rank, round_no)
            outer()
        return weights(model)

    assert side_by_side(2, before, store=store) == side_by_side(2, after, store=store)


def test_a_url_will_do():
    uri = f"memory://{uuid.uuid4().hex}"

    def body(ar):
        model = small_model()
        options = {"poll_interval_s": 0.001, "timeout_s": 60.0, "round_id": 7}
        outer = make_diloco_outer_loop(model, uri, ar.rank, 2, **options)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), ar.rank, 0)
        outer()
        return weights(model)

    first, second = side_by_side(2, body)
    assert first == second != weights(small_model())


def test_mistakes_are_named():
    ar = ObjectStoreAllReduce(MemoryStore(), 0, 2)
    with pytest.raises(ConfigError) as caught:
        make_diloco_outer_loop(small_model(), MemoryStore())
    assert caught.value.reason == "rank_missing"
    with pytest.raises(ConfigError) as caught:
        make_diloco_outer_loop(small_model(), ar, 0, 2)
    assert caught.value.reason == "rank_twice"
    with pytest.raises(ConfigError) as caught:
        make_diloco_outer_loop(nn.Identity(), ar)
    assert caught.value.reason == "no_parameters"
