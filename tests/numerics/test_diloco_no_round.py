"""Training that would never meet the others does not go by in silence."""

from __future__ import annotations

import logging
import re
from collections import deque

import pytest
import torch
from diloco_toys import QUICK, batches, contexts, loss_of, perceptron, train

import atoll
from atoll.errors import ConfigError, InvalidSpec
from atoll.training.inner import StepCounter

pytestmark = pytest.mark.training


def alone(inner_steps: int, steps: int, *, is_local_only: bool = True) -> None:
    """One replica that takes so many optimizer steps and leaves."""
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, contexts(1)[0], inner_steps=inner_steps, tuning=QUICK) as outer:
        for batch in batches(0, steps):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if is_local_only:
                outer.step()


@pytest.mark.parametrize("rounds", [0, -1, 2.5])
def test_a_number_of_rounds_that_is_none_is_refused(rounds):
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(InvalidSpec, match=re.escape(f"rounds={rounds}: ")),
        atoll.DiLoCo(model, inner, contexts(1)[0], tuning=QUICK) as outer,
    ):
        train(outer, model, inner, batches(0, 4), rounds)


@pytest.mark.parametrize(
    ("inner_steps", "steps", "is_local_only", "words"),
    [(5, 3, True, " 5"), (5, 7, False, "`outer.step()`")],
)
def test_one_who_leaves_before_the_first_round_is_told_so(caplog, inner_steps, steps, is_local_only, words):
    with caplog.at_level(logging.WARNING, "atoll.training"):
        alone(inner_steps, steps, is_local_only=is_local_only)
    (record,) = caplog.records
    assert f"{steps} " in record.getMessage()
    assert words in record.getMessage()


@pytest.mark.parametrize("steps", [0, 5, 7])
def test_one_who_met_the_others_or_did_not_train_is_told_nothing(caplog, steps):
    with caplog.at_level(logging.WARNING, "atoll.training"):
        alone(5, steps)
    assert not caplog.records


def test_a_loop_that_never_takes_an_optimizer_step_is_refused():
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        atoll.DiLoCo(model, inner, contexts(1)[0], inner_steps=2, tuning=QUICK) as outer,
        pytest.raises(ConfigError, match=r"\b1000\b") as caught,
    ):
        deque(outer.steps(batches(0, 4), rounds=2), maxlen=0)
    assert "`step()`" in (caught.value.hint or "")


def test_passes_that_only_add_up_gradients_are_counted_from_the_last_optimizer_step():
    pace = StepCounter(fragments=1)
    for _ in range(3):
        pace.boundary(1.0)
    assert pace.idle == 3
    pace.count()
    pace.boundary(1.0)
    assert pace.idle == 0


def test_training_on_and_on_without_a_round_is_refused():
    with pytest.raises(ConfigError, match=r"\b50\b.*inner_steps=5"):
        alone(5, 60, is_local_only=False)
