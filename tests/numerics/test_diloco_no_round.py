"""Training that would never meet the others does not go by in silence."""

from __future__ import annotations

import logging
from collections import deque

import pytest
import torch
from diloco_toys import QUICK, batches, contexts, loss_of, perceptron, train

import atoll
from atoll.errors import ConfigError, InvalidSpec
from atoll.training.pace import Pace

pytestmark = pytest.mark.training


def alone(inner_steps: int, steps: int, *, is_held: bool = True) -> None:
    """One replica that takes so many optimizer steps and leaves."""
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, contexts(1)[0], inner_steps=inner_steps, tuning=QUICK) as outer:
        for batch in batches(0, steps):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if is_held:
                outer.step()


@pytest.mark.parametrize("rounds", [0, -1, 2.5])
def test_a_number_of_rounds_that_is_none_is_refused(rounds):
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(InvalidSpec, match=f"rounds={rounds}: a whole number from 1"),
        atoll.DiLoCo(model, inner, contexts(1)[0], tuning=QUICK) as outer,
    ):
        train(outer, model, inner, batches(0, 4), rounds)


@pytest.mark.parametrize(
    ("inner_steps", "steps", "is_held", "words"),
    [(5, 3, True, "a round is due after 5"), (5, 7, False, "call `outer.step()` in your loop")],
)
def test_one_who_leaves_before_the_first_round_is_told_so(caplog, inner_steps, steps, is_held, words):
    with caplog.at_level(logging.WARNING, "atoll.training"):
        alone(inner_steps, steps, is_held=is_held)
    (record,) = caplog.records
    assert f"{steps} optimizer steps and no round" in record.getMessage()
    assert words in record.getMessage()


@pytest.mark.parametrize("steps", [0, 5, 7])
def test_one_who_met_the_others_or_did_not_train_is_told_nothing(caplog, steps):
    with caplog.at_level(logging.WARNING, "atoll.training"):
        alone(5, steps)
    assert not caplog.records


def test_a_loop_that_never_takes_an_optimizer_step_is_refused():
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, contexts(1)[0], inner_steps=2, tuning=QUICK) as outer:
        words = "1000 passes of the training loop without an optimizer step"
        with pytest.raises(ConfigError, match=words) as caught:
            deque(outer.steps(batches(0, 4), rounds=2), maxlen=0)
    assert caught.value.hint == "call `step()` of the optimizer that DiLoCo was given"


def test_passes_that_only_add_up_gradients_are_counted_from_the_last_optimizer_step():
    pace = Pace(fragments=1)
    for _ in range(3):
        pace.boundary(1.0)
    assert pace.idle == 3
    pace.count()
    pace.boundary(1.0)
    assert pace.idle == 0


def test_training_on_and_on_without_a_round_is_refused():
    with pytest.raises(ConfigError, match="50 optimizer steps without a round, inner_steps=5"):
        alone(5, 60, is_held=False)
