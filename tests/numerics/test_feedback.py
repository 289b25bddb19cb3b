"""Error feedback: what a codec rounds away is owed, and paid with the next update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, bits, contexts, loss_of, perceptron, side_by_side
from torch import nn

import atoll
from atoll.errors import ConfigError, StoreRefused
from atoll.registry import open_store
from atoll.rounds.codecs.base import codec
from atoll.rounds.verify import verify
from atoll.testing.fakes import FaultyStore
from atoll.training.feedback import ErrorFeedback, is_wanted

pytestmark = pytest.mark.training

ROOM = 150_000  # more than two tiles, and no multiple of one


def passed(name: str, values: np.ndarray) -> np.ndarray:
    """What arrives of an update that is encoded as a whole."""
    how = codec(name)
    return how.decode(b"".join(how.encode(values)), values.size)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_all_that_was_sent_and_what_is_owed_add_up_to_all_that_was_trained(name):
    rng = np.random.default_rng(0)
    feedback = ErrorFeedback(name, [slice(0, ROOM)])
    trained = np.zeros(ROOM, dtype=np.float64)
    arrived = np.zeros(ROOM, dtype=np.float64)
    plain = np.zeros(ROOM, dtype=np.float64)
    for _ in range(12):
        update = (rng.standard_normal(ROOM) * 0.01 + 0.001).astype(np.float32)
        offered = feedback.fold(0, update).copy()
        feedback.settle(0, is_included=True)
        trained += update
        arrived += passed(name, offered)
        plain += passed(name, update)
    owed = feedback.state_dict()["residual"].numpy().astype(np.float64)
    assert np.abs(trained - (arrived + owed)).max() < 1e-6
    assert np.abs(owed).max() < np.abs(codec(name).error_bound(offered)).max() * 1.01 + 1e-9
    # Without feedback the errors of every round stay.
    assert np.abs(trained - arrived).mean() < 0.7 * np.abs(trained - plain).mean()


def test_the_tiles_of_the_residual_give_what_the_chunks_of_an_exchange_do():
    feedback = ErrorFeedback("int4", [slice(0, ROOM)])
    update = np.random.default_rng(1).standard_normal(ROOM).astype(np.float32)
    feedback.fold(0, update)
    feedback.settle(0, is_included=True)
    in_chunks = np.concatenate([passed("int4", update[i : i + 7 * 1024]) for i in range(0, ROOM, 7 * 1024)])
    assert np.array_equal(feedback.state_dict()["residual"].numpy(), update - in_chunks)


def test_an_update_that_was_left_out_is_owed_whole_and_what_is_owed_stays_bounded():
    feedback = ErrorFeedback("int4", [slice(0, 1), slice(1, 1025)])
    update = np.full(1024, 2.0, dtype=np.float32)
    seen = []
    for _ in range(40):
        feedback.fold(1, update)
        feedback.settle(1, is_included=False)
        seen.append(float(feedback.state_dict()["residual"][1]))
    assert seen[:3] == [2.0, 2.0, 2.0]
    assert max(seen) <= 2.0
    offered = feedback.fold(1, update).copy()
    feedback.settle(1, is_included=True)
    assert offered[0] == 4.0
    assert np.array_equal(feedback.state_dict()["residual"].numpy()[1:], offered - passed("int4", offered))
    assert feedback.state_dict()["missed"] == [0, 0]


def test_fragments_owe_on_their_own_and_forget_on_their_own():
    feedback = ErrorFeedback("int4", [slice(0, 3), slice(3, 5)])
    for fragment, size in ((0, 3), (1, 2)):
        feedback.fold(fragment, np.full(size, 1.0 + fragment, dtype=np.float32))
        feedback.settle(fragment, is_included=False)
    assert feedback.state_dict()["residual"].tolist() == [1, 1, 1, 2, 2]
    feedback.forget(0)
    assert feedback.state_dict()["residual"].tolist() == [0, 0, 0, 2, 2]
    assert feedback.state_dict()["missed"] == [0, 1]
    feedback.forget()
    assert not feedback.state_dict()["residual"].any()


@pytest.mark.parametrize(
    ("choice", "name", "wanted"),
    [
        (None, "int4", True),
        (None, "int8", False),
        (None, "bf16", False),
        (True, "int8", True),
        (True, "fp32", False),
        (False, "int4", False),
    ],
)
def test_feedback_is_on_for_int4_and_by_choice(choice, name, wanted):
    assert is_wanted(choice, name) is wanted


def follow(ctx: atoll.ReplicaContext, rounds: int, **options) -> tuple[list[torch.Tensor], bytes, atoll.DiLoCo]:
    """What each round was given by this replica, as the difference of weights, and the bits at the end."""
    model = perceptron()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    moved = []
    start = [p.detach().clone() for p in model.parameters()]
    with atoll.DiLoCo(model, inner, ctx, inner_steps=3, checkpoint=None, snapshot=99, **options) as outer:
        for batch in batches(ctx.rank, 3 * rounds):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            update = torch.cat([(s - p).detach().reshape(-1) for s, p in zip(start, model.parameters(), strict=True)])
            if outer.step() is not None:
                moved.append(update)
                start = [p.detach().clone() for p in model.parameters()]
    return moved, bits(model), outer


@pytest.mark.parametrize("tuning", [QUICK, SCATTERED])
def test_a_run_with_int4_offers_updates_with_what_was_owed(tuning):
    """The weights after every round are those of arithmetic done by hand, from the updates alone."""
    replicas = contexts(1)
    moved, final, _ = follow(
        replicas[0], 6, codec="int4", mean_codec="fp32", outer=atoll.Nesterov(lr=1.0, momentum=0.0), tuning=tuning
    )
    values = torch.cat([p.detach().reshape(-1) for p in perceptron().parameters()]).numpy().copy()
    owed = np.zeros_like(values)
    for update in moved:
        offered = update.numpy() + owed
        arrived = passed("int4", offered)
        owed = offered - arrived
        values -= arrived
    found = np.frombuffer(final, dtype=np.float32)
    assert np.array_equal(found, values)
    assert owed.any()


@pytest.mark.parametrize("streaming", [{}, {"fragments": 3, "delay": 1}, {"eager": True}])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_replicas_stay_equal_and_verify_with_codecs_that_round(name, streaming):
    replicas = contexts(3)
    results = side_by_side(
        replicas, lambda ctx: follow(ctx, 8, codec=name, error_feedback=True, tuning=SCATTERED, **streaming)
    )
    assert len({final for _, final, _ in results}) == 1
    assert len({outer.digest for _, _, outer in results}) == 1
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert report.is_right, report.difference


def test_a_refused_update_is_owed_to_nobody():
    """A replica whose values are not finite for one round goes on clean."""

    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        options = {"codec": "int4", "tuning": QUICK, "fragments": 2, "delay": 1}
        with atoll.DiLoCo(model, inner, ctx, inner_steps=4, **options) as outer:
            for batch in outer.steps(batches(ctx.rank, 40), rounds=8):
                loss = loss_of(model, batch)
                if ctx.rank == 1 and outer.inner_step == 7:
                    loss = loss * float("nan")
                loss.backward()
                inner.step()
                inner.zero_grad()
            assert all(torch.isfinite(p).all() for p in model.parameters())
            owed = outer._loop.feedback.state_dict()["residual"]
            assert torch.isfinite(owed).all()
            assert owed.any()
        return bits(model)

    first, second = side_by_side(contexts(2), body)
    assert first == second


def test_a_checkpoint_with_another_choice_is_refused():
    [ctx] = contexts(1)
    model = nn.Linear(8, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"inner_steps": 1, "checkpoint": 1, "codec": "int4", "tuning": QUICK}
    with atoll.DiLoCo(model, inner, ctx, **options) as outer:
        for batch in outer.steps(batches(0, 4), rounds=2):
            loss_of(model, batch).backward()
            inner.step()
    with pytest.raises(ConfigError, match="error_feedback"):
        atoll.DiLoCo(model, inner, ctx, error_feedback=False, **options)


def test_a_commit_that_took_what_was_offered_before_leaves_nothing_owed():
    """The round fails after the offer, training goes on, and the second try finds that the first update counts."""
    [ctx] = contexts(1)
    store = FaultyStore(open_store(ctx.store_uri))
    store.fail("create", "*/commits/0000000001.json", error=StoreRefused)
    ctx.__dict__["store"] = store
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    failures, included = 0, []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=2, codec="int4", tuning=QUICK) as outer:
        for batch in batches(0, 20):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            try:
                outcome = outer.step(weight=1.0)
            except StoreRefused:
                failures += 1
                continue
            if outcome is not None:
                included.append((outcome.is_included, outcome.ranks))
            if len(included) == 2:
                break
        assert not outer._loop.feedback.state_dict()["residual"].any()
    assert failures == 1
    assert included == [(True, (0,)), (False, (0,))]
    assert verify(open_store(ctx.store_uri), "toy").is_right
