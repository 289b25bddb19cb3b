"""Wrong things given to `DiLoCo`: each is named with what was given and what is wanted, before anything happens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diloco_toys import contexts, perceptron
from torch import nn

import atoll
from atoll.errors import ConfigError, InvalidSpec

STATEFUL = "a mapping of names to objects with `state_dict` and `load_state_dict`"


def refusal(*given: Any, make: Any = atoll.DiLoCo, **named: Any) -> InvalidSpec:
    with pytest.raises(InvalidSpec) as caught:
        make(*given, **named)
    return caught.value


def toy() -> tuple[nn.Module, torch.optim.Optimizer, atoll.ReplicaContext]:
    model = perceptron()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), contexts(1)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quorum": atoll.Quorum}, "quorum=the class Quorum: a number of replicas, Quorum(…), or None for all of them"),
        ({"quorum": "2"}, "quorum='2': a number of replicas, Quorum(…), or None for all of them"),
        ({"quorum": True}, "quorum=True: a number of replicas, Quorum(…), or None for all of them"),
        ({"outer": [0.7, 0.9]}, "outer=[0.7, 0.9]: Nesterov(…), Average() or None"),
        ({"outer": atoll.Nesterov}, "outer=the class Nesterov: Nesterov(…), Average() or None"),
        ({"outer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.7)},
         "outer=SGD(…): Nesterov(…), Average() or None"),
        ({"inner_steps": "50"}, "inner_steps='50': a whole number from 1"),
        ({"inner_steps": 2.0}, "inner_steps=2.0: a whole number from 1"),
        ({"inner_steps": True}, "inner_steps=True: a whole number from 1"),
        ({"inner_steps": None}, "inner_steps=None: a whole number from 1"),
        ({"fragments": "2"}, "fragments='2': a whole number from 1"),
        ({"delay": "1"}, "delay='1': a whole number of steps, or None"),
        ({"alpha": "0.5"}, "alpha='0.5': a number from 0 to 1, or None"),
        ({"codec": 8}, "codec=8: the name of a codec, or None"),
        ({"buffers": ["average"]}, "buffers=['average']: `average` or `local`"),
        ({"checkpoint": "10"}, "checkpoint='10': a whole number from 1, or None for never"),
        ({"snapshot": None}, "snapshot=None: a whole number from 1"),
        ({"tuning": {"connections": 8}}, "tuning={'connections': 8}: Tuning(…) or None"),
        ({"stateful": [1]}, f"stateful=[1]: {STATEFUL}"),
        ({"stateful": {"epoch": 1}}, f"stateful={{'epoch': 1}}: {STATEFUL}"),
        ({"chunk": "1024"}, "chunk='1024': a multiple of 1024 elements, or None"),
    ],
)  # fmt: skip
def test_an_argument_that_is_something_else_is_named(options, words):
    model, inner, ctx = toy()
    assert refusal(model, inner, ctx, **options).problems == (words,)
    assert not list(ctx.store.list(""))


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ([[]], {"rounds": 0}, "rounds=0: a whole number from 1"),
        ([[]], {"rounds": 2.0}, "rounds=2.0: a whole number from 1"),
        ([[]], {"rounds": True}, "rounds=True: a whole number from 1"),
        ([100], {"rounds": 3}, "batches=100: something to iterate over, such as a DataLoader"),
        ([[]], {"rounds": 3, "weigh": 2}, "weigh=2: a function of a batch"),
    ],
)
def test_steps_names_what_is_wrong_before_the_first_batch(given, named, words):
    with atoll.DiLoCo(*toy(), inner_steps=1) as outer:
        refused = refusal(*given, make=outer.steps, **named)
    assert refused.problems == (words,)
    assert refused.message.startswith("DiLoCo.steps is not valid: 1 problem\n")


@pytest.mark.training
def test_steps_takes_numbers_of_numpy():
    model, inner, ctx = toy()
    with atoll.DiLoCo(model, inner, ctx, inner_steps=1) as outer:
        for batch in outer.steps([torch.ones(3, 8)], rounds=np.int64(2)):
            model(batch).sum().backward()
            inner.step()
        assert outer.round == 2


def test_a_loop_without_steps_can_report_the_number_of_rounds(tmp_path):
    model, inner, ctx = toy()
    with atoll.DiLoCo(model, inner, replace(ctx, spool=str(tmp_path)), inner_steps=1) as outer:
        outer.log(loss=1.0, rounds_total=40)
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told == {"round_no": 0, "metrics": {"loss": 1.0}, "rounds_total": 40}


@pytest.mark.training
def test_reports_have_the_number_of_rounds_from_the_first_step_on(tmp_path):
    model, inner, ctx = toy()
    ctx = replace(ctx, spool=str(tmp_path))
    reports = []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=1) as outer:
        for batch in outer.steps([torch.ones(3, 8)], rounds=3):
            reports.append(json.loads((tmp_path / "progress.json").read_text()))
            model(batch).sum().backward()
            inner.step()
    reports.append(json.loads((tmp_path / "progress.json").read_text()))
    assert [(report["round_no"], report["rounds_total"]) for report in reports] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert ["round_s" in report for report in reports] == [False, True, True, True]


def test_a_metric_that_is_no_number_is_named():
    with atoll.DiLoCo(*toy(), inner_steps=1) as outer:
        refused = refusal(make=outer.log, loss="x", accuracy=[0.5, 0.25], steps=3)
        assert refused.problems == ("loss='x': a metric is one number", "accuracy=[0.5, 0.25]: a metric is one number")
        (problem,) = refusal(make=outer.log, round_no=1).problems
        assert problem.startswith("round_no: ")
        (problem,) = refusal(make=outer.log, rounds_total=0.5).problems
        assert problem.startswith("rounds_total=0.5: ")
        outer.log(loss=torch.tensor(0.5), accuracy=np.float32(0.25))


@pytest.mark.parametrize("make", [atoll.DiLoCo, atoll.LocalSGD])
def test_an_unknown_or_missing_name_is_a_type_error(make):
    model, inner, ctx = toy()
    with pytest.raises(TypeError, match="inner_step"):
        make(model, inner, ctx, inner_step=5)
    with pytest.raises(TypeError, match="inner_optimizer"):
        make(model)


def test_model_and_optimizer_the_wrong_way_round_are_said_to_be_so():
    model, inner, ctx = toy()
    refused = refusal(inner, model, ctx)
    assert refused.problems == (
        "model=SGD(…): a torch model (`nn.Module`)",
        "inner_optimizer=Sequential(…): a torch optimizer, or a list of them",
    )
    assert refused.hint == "the model comes first: `DiLoCo(model, inner_optimizer, …)`"


def test_the_model_the_optimizer_and_the_context_are_checked():
    model, inner, ctx = toy()
    assert refusal(model, inner, 50).problems == ("ctx=50: the `ctx` argument of your function, or None",)
    wanted = "a torch optimizer, or a list of them"
    assert refusal(model, [], ctx).problems == (f"inner_optimizer=[]: {wanted}",)
    assert refusal(model, "sgd", ctx).problems == (f"inner_optimizer='sgd': {wanted}",)
    assert refusal(model, torch.optim.SGD, ctx).problems == (f"inner_optimizer=the class SGD: {wanted}",)
    assert refusal(nn.Linear, inner).problems == ("model=the class Linear: a torch model (`nn.Module`)",)


def test_local_sgd_says_the_same_by_its_own_name():
    model, inner, ctx = toy()
    refused = refusal(model, inner, ctx, make=atoll.LocalSGD, inner_steps=0)
    assert refused.message.startswith("LocalSGD is not valid: 1 problem\n")
    assert "the model comes first: `LocalSGD(" in (refusal(inner, model, make=atoll.LocalSGD).hint or "")
    with pytest.raises(ConfigError, match="LocalSGD always has Average"):
        atoll.LocalSGD(model, inner, ctx, outer=atoll.Nesterov())


def test_several_optimizers_may_come_as_any_iterable():
    model, inner, ctx = toy()
    outer = atoll.DiLoCo(model, (one for one in [inner]), ctx, inner_steps=1)  # type: ignore[arg-type]
    assert outer.round == 0
    outer.close()


def test_numbers_of_numpy_are_numbers():
    model, inner, ctx = toy()
    numbers = {"inner_steps": np.int64(2), "fragments": np.int32(1), "quorum": np.int64(1), "checkpoint": np.uint8(3)}
    with atoll.DiLoCo(model, inner, ctx, **numbers, eager=np.False_, snapshot=np.int64(4)) as outer:
        assert type(outer.inner_steps) is int
    with atoll.LocalSGD(*toy(), **numbers) as outer:
        assert type(outer.inner_steps) is int
    words = "inner_steps=2.0: a whole number from 1"
    assert refusal(model, inner, ctx, inner_steps=np.float32(2.0)).problems == (words,)
