"""What is exchanged of a model: tied, frozen, low-precision and odd parameters, and buffers."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from diloco_toys import QUICK, batches, bits, contexts, loss_of, perceptron, side_by_side, train, weights
from torch import nn

import atoll
from atoll.errors import ConfigError, Conflict, QuorumLost, RoundError
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Agreement
from atoll.rounds.verify import verify
from atoll.training.model import ModelVector

pytestmark = pytest.mark.training


def seeded(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class Tied(nn.Module):
    """Encoder and decoder share one matrix; the middle is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.encode, self.middle, self.decode = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        seeded(self, seed)
        seeded(self.middle, 99)
        self.decode.weight = self.encode.weight
        self.middle.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(torch.tanh(self.middle(self.encode(x)))))


class Normed(nn.Module):
    """BatchNorm has running statistics; the scratch buffer is not part of the model's state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        seeded(self, seed)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.inner(x))))


def agreement_of(uri: str) -> Agreement:
    return Agreement.open(open_store(uri).get(RoundKeys("toy").agreement()))


def run(
    make, *, world_size: int = 2, rounds: int = 4, replicas=None, optimizer=torch.optim.AdamW, **options
) -> list[nn.Module]:
    def body(ctx: atoll.ReplicaContext) -> nn.Module:
        model = make(ctx.rank)
        inner = optimizer((p for p in model.parameters() if p.requires_grad), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, inner_steps=3, tuning=QUICK, **options) as outer:
            train(outer, model, inner, batches(ctx.rank, 10), rounds)
        return model

    return side_by_side(replicas or contexts(world_size), body)


def join_in_turn(make, **of_rank) -> None:
    """Two replicas join, one after the other, and leave again."""
    for ctx in contexts(2):
        model = make(ctx.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {name: values[ctx.rank] for name, values in of_rank.items()}
        atoll.DiLoCo(model, inner, ctx, tuning=QUICK, **options).close()


def test_tied_parameters_travel_once_and_frozen_ones_not_at_all():
    replicas = contexts(2)
    first, second = run(Tied, replicas=replicas)
    names = [tensor.name for tensor in agreement_of(replicas[0].store_uri).layouts[0].tensors]
    assert names == ["encode.weight", "encode.bias", "decode.bias", "head.weight", "head.bias"]
    assert first.decode.weight is first.encode.weight
    assert bits(first) == bits(second)
    assert torch.equal(first.middle.weight, Tied().middle.weight)


def test_frozen_parameters_that_differ_are_found_out_before_the_first_step():
    def make(rank: int) -> nn.Module:
        model = Tied()
        seeded(model.middle, rank)
        model.middle.requires_grad_(False)
        return model

    with pytest.raises(Conflict) as caught:
        join_in_turn(make)
    assert [line.partition(":")[0] for line in caught.value.differences] == ["frozen_parameters"]


def test_running_statistics_are_averaged_and_verify_agrees():
    replicas = contexts(2)
    first, second = run(Normed, replicas=replicas, codec="fp32")
    assert bits(first) == bits(second)
    assert first.norm.running_var.min() > 0
    assert not torch.equal(first.norm.running_mean, Normed().norm.running_mean)
    tensors = agreement_of(replicas[0].store_uri).layouts[0].tensors
    assert [t.name for t in tensors[-2:]] == ["norm.running_mean", "norm.running_var"]
    assert "scratch" not in {t.name for t in tensors}
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert (report.difference, report.rounds) == (None, 4)


def test_averaged_statistics_are_the_plain_mean_of_the_replicas():
    models = [Normed() for _ in range(2)]
    inners = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    loops = side_by_side(
        contexts(2),
        lambda ctx: atoll.DiLoCo(models[ctx.rank], inners[ctx.rank], ctx, inner_steps=1, codec="fp32", tuning=QUICK),
    )
    for step in range(4):
        for rank, model in enumerate(models):
            loss_of(model, batches(rank, 4)[step]).backward()
            inners[rank].step()
            inners[rank].zero_grad()
        expected = (models[0].norm.running_var + models[1].norm.running_var) / 2
        side_by_side([loop.ctx for loop in loops], lambda ctx: loops[ctx.rank].step())
        assert torch.allclose(models[0].norm.running_var, expected, rtol=1e-6)
    for loop in loops:
        loop.close()


def test_local_buffers_stay_local():
    first, second = run(Normed, buffers="local")
    assert not torch.equal(first.norm.running_mean, second.norm.running_mean)
    assert torch.equal(first.inner.weight, second.inner.weight)


def test_a_bfloat16_model_keeps_outer_values_in_float32():
    """Steps too small for bfloat16 add up in the outer values, and show in the model when they are large enough."""
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    [ctx] = contexts(1)
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    seen = []
    outer_rule = atoll.Nesterov(lr=0.25, momentum=0.0)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=1, outer=outer_rule, codec="fp32", tuning=QUICK) as outer:
        for _ in range(8):
            model.weight.grad = torch.ones_like(model.weight)
            inner.step()
            outer.step()
            seen.append(model.weight[0, 0].item())
    # One bfloat16 step below 1 is 2^-8, and a quarter of it is applied in each round: every fourth round shows.
    assert outer._loop.state.values.tolist() == [1 - 8 * 2.0**-10] * 4
    assert seen == [1.0, 1.0, 0.99609375, 0.99609375, 0.99609375, 0.9921875, 0.9921875, 0.9921875]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_any_precision_train_in_step(dtype):
    first, second = run(lambda rank: perceptron(rank, dtype=dtype), rounds=5, optimizer=torch.optim.SGD)
    assert bits(first) == bits(second)
    assert not torch.equal(weights(first), weights(perceptron(0, dtype=dtype)))


def test_complex_empty_and_scalar_parameters_travel():
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.phase = nn.Parameter(torch.randn(8, 3, generator=generator, dtype=torch.complex64))
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.scale = nn.Parameter(torch.tensor(1.0 + seed))
            self.image = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) + seed)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * (x.to(torch.complex64) @ self.phase).abs() + self.image.mean()

    first, second = run(Odd)
    assert bits(first) == bits(second)
    assert first.image.is_contiguous(memory_format=torch.channels_last)


def test_gradient_accumulation_counts_optimizer_steps_not_batches():
    def body(ctx: atoll.ReplicaContext) -> tuple[int, bytes]:
        model = perceptron()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        taken = 0
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, tuning=QUICK) as outer:
            for batch in outer.steps(batches(ctx.rank, 100), rounds=3):
                taken += 1
                loss_of(model, batch).backward()
                if taken % 4 == 0:
                    inner.step()
                    inner.zero_grad()
        return taken, bits(model)

    results = side_by_side(contexts(2), body)
    assert results[0] == results[1]
    assert results[0][0] == 3 * 2 * 4


def test_a_list_of_optimizers_steps_together():
    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron()
        matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.05)
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)
        with atoll.DiLoCo(model, [matrices, rest], ctx, inner_steps=2, tuning=QUICK) as outer:
            for batch in outer.steps(batches(ctx.rank, 20), rounds=3):
                loss_of(model, batch).backward()
                for one in (matrices, rest):
                    one.step()
                    one.zero_grad()
            assert outer.round == 3
        return bits(model)

    first, second = side_by_side(contexts(2), body)
    assert first == second


def test_local_sgd_is_averaging():
    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.LocalSGD(model, inner, ctx, inner_steps=2, tuning=QUICK) as outer:
            train(outer, model, inner, batches(ctx.rank, 10), 3)
        return bits(model)

    replicas = contexts(2)
    first, second = side_by_side(replicas, body)
    assert first == second
    assert agreement_of(replicas[0].store_uri).settings["outer"]["kind"] == "average"
    assert agreement_of(replicas[0].store_uri).codec == "fp32"
    assert verify(open_store(replicas[0].store_uri), "toy").is_right


def test_averaging_with_a_codec_that_rounds_exchanges_differences():
    replicas = contexts(2)
    first, second = run(perceptron, replicas=replicas, outer=atoll.Average(), codec="bf16")
    assert bits(first) == bits(second)
    assert agreement_of(replicas[0].store_uri).settings["outer"] == {"kind": "nesterov", "lr": 1.0, "momentum": 0.0}


def test_a_replica_whose_update_is_not_finite_is_left_out_and_healed(caplog, tmp_path):
    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, tuning=QUICK) as outer:
            for batch in outer.steps(batches(ctx.rank, 20), rounds=5):
                loss = loss_of(model, batch)
                if ctx.rank == 1 and outer.round == 2:
                    loss = loss * float("nan")
                loss.backward()
                inner.step()
                inner.zero_grad()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert all(torch.isfinite(s["exp_avg"]).all() for s in inner.state.values())
        return bits(model)

    with caplog.at_level(logging.WARNING, "atoll.training"):
        spools = [tmp_path / str(rank) for rank in range(2)]
        for spool in spools:
            spool.mkdir()
        replicas = [replace(ctx, spool=str(spool)) for ctx, spool in zip(contexts(2), spools, strict=True)]
        first, second = side_by_side(replicas, body)
    assert first == second
    (record,) = [record for record in caplog.records if record.name == "atoll.training"]
    assert "round 2" in record.getMessage()
    told = [json.loads((spool / "progress.json").read_text())["metrics"] for spool in spools]
    assert [metrics.get("updates_rejected") for metrics in told] == [None, 1.0]


def test_when_no_update_is_finite_the_run_ends_as_diverged():
    def body(ctx: atoll.ReplicaContext) -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=float("inf"))
        with atoll.DiLoCo(model, inner, ctx, inner_steps=1, tuning=QUICK) as outer:
            train(outer, model, inner, batches(ctx.rank, 20), 2)

    with pytest.raises(RoundError) as caught:
        side_by_side(contexts(2), body)
    assert (caught.value.reason, caught.value.round_no) == ("diverged", 0)
    assert not isinstance(caught.value, QuorumLost)


def test_replicas_with_other_settings_are_told_what_differs():
    with pytest.raises(Conflict) as caught:
        join_in_turn(perceptron, inner_steps=[5, 6])
    (difference,) = caught.value.differences
    assert re.match(r"inner_steps: .*\b5\b.*\b6\b", difference)


@pytest.mark.parametrize(
    ("spoil", "reason", "named"),
    [
        (lambda model: model.requires_grad_(False), "no_parameters", None),
        (
            lambda model: model.register_parameter("late", nn.Parameter(torch.ones(1, device="meta"))),
            "",
            "`late`.*`meta`",
        ),
    ],
)
def test_a_model_that_cannot_be_exchanged_is_refused(spoil, reason, named):
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    spoil(model)
    with pytest.raises(ConfigError, match=named) as caught:
        atoll.DiLoCo(model, inner, contexts(1)[0])
    assert caught.value.reason == reason


def test_an_optimizer_of_another_model_is_refused():
    inner = torch.optim.SGD(perceptron().parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        atoll.DiLoCo(perceptron(), inner, contexts(1)[0])
    assert caught.value.reason == "other_parameters"


def test_parameters_swapped_during_training_are_noticed():
    model = perceptron()
    vector = ModelVector(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(ConfigError, match=r"`0\.weight`") as caught:
        vector.refresh()
    assert caught.value.reason == "changed"


def test_buffers_swapped_during_training_are_followed():
    model = Normed()
    vector = ModelVector(model)
    model.norm.running_mean = torch.full((16,), 5.0)
    vector.refresh()
    values = vector.values_of(vector.tensors())
    assert values[-32:-16].tolist() == [5.0] * 16


@pytest.mark.parametrize(
    "options", [{"inner_steps": 0}, {"checkpoint": 0}, {"snapshot": 0}, {"buffers": "rank1"}, {"codec": "int3"}]
)
def test_settings_are_checked_before_anything_happens(options):
    model = perceptron()
    [ctx] = contexts(1)
    with pytest.raises(ConfigError, match=next(iter(options)).rstrip("s")):
        atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx, **options)
    assert not list(ctx.store.list())
