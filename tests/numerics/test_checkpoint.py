"""Interrupted runs: checkpoints at the round boundary, resumed to the bit; late and new replicas catch up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from diloco_toys import QUICK, batches, bits, contexts, loss_of, perceptron, side_by_side, train
from interruptions import Killed, interrupted, random_training, until_offered

import atoll
from atoll.errors import ConfigError, StoreRefused
from atoll.registry import open_store
from atoll.rounds.verify import verify
from atoll.testing.fakes import FaultyStore
from atoll.training.checkpoint import Checkpoint, Checkpoints

pytestmark = pytest.mark.training


@pytest.mark.parametrize("stop_after", [0, 5, 6, 7, 11, 17, 26])
def test_an_interrupted_replica_ends_with_the_bits_of_one_that_was_not(stop_after):
    expected = random_training(contexts(1)[0])
    [ctx] = contexts(1)
    with pytest.raises(Killed):
        random_training(ctx, stop_after=stop_after)
    assert random_training(replace(ctx, attempt=1)) == expected


def test_a_replica_that_dies_again_and_again_ends_with_the_same_bits():
    expected = random_training(contexts(1)[0])
    [ctx] = contexts(1)
    for attempt in range(4):
        with pytest.raises(Killed):
            random_training(replace(ctx, attempt=attempt), stop_after=7)
    assert random_training(replace(ctx, attempt=4)) == expected


def test_without_the_random_state_the_bits_would_differ(monkeypatch):
    """The test above can fail: it does when a checkpoint leaves the generators out."""
    expected = random_training(contexts(1)[0])
    [ctx] = contexts(1)
    with pytest.raises(Killed):
        random_training(ctx, stop_after=11)
    for module in ("diloco", "inner"):
        monkeypatch.setattr(f"atoll.training.{module}.restore_rng", lambda state: None)
    assert random_training(replace(ctx, attempt=1)) != expected


def test_a_run_that_is_over_stays_over():
    [ctx] = contexts(1)
    first = random_training(ctx)
    assert random_training(replace(ctx, attempt=1)) == first


@pytest.mark.parametrize(("stop_after", "checkpoint"), [(1, 1), (7, 1), (9, 1), (14, 4), (20, 3)])
def test_a_strict_run_with_a_death_in_it_ends_with_the_same_bits(stop_after, checkpoint):
    expected = interrupted(3, victim=-1, stop_after=0, rounds=8)
    assert len(set(expected)) == 1
    assert interrupted(3, victim=1, stop_after=stop_after, rounds=8, checkpoint=checkpoint) == expected


def test_without_a_checkpoint_a_restarted_replica_takes_up_the_agreed_state():
    finals = interrupted(2, victim=1, stop_after=13, rounds=8, checkpoint=None, snapshot=3)
    assert finals[0] == finals[1]


def test_a_replica_that_joins_late_catches_up_and_takes_part():
    """Rank 2 comes when the others have done eight rounds; from then on all three agree."""
    gate = Barrier(3)
    included: list[tuple[int, tuple[int, ...]]] = []

    def body(ctx: atoll.ReplicaContext) -> bytes:
        if ctx.rank == 2:
            gate.wait(60)
        model = perceptron(ctx.rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        quorum = atoll.Quorum(least=2, grace_s=0.0)
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, quorum=quorum, tuning=QUICK, snapshot=3) as outer:
            if ctx.rank == 2:
                assert outer.round >= 8
                gate.wait(60)
            for batch in iterate(outer, ctx.rank):
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
                if outer.round >= 8 and ctx.rank != 2 and outer.inner_step % 2 == 0:
                    until_offered(ctx, outer.round, rank=2)  # the grace is nil: whoever is there first decides
                outcome = outer.step()
                if outcome is not None:
                    included.append((outer.round, outcome.ranks))
                if outer.round == 8 and ctx.rank != 2 and outcome is not None:
                    gate.wait(60)
                    gate.wait(60)
                if outer.round >= 14:
                    break
        return bits(model)

    def iterate(outer: atoll.DiLoCo, rank: int) -> Iterator:
        while True:
            yield from batches(rank, 10)

    finals = side_by_side(contexts(3), body)
    assert finals[0] == finals[1] == finals[2]
    assert any(2 in ranks for _, ranks in included)
    assert all(2 not in ranks for round_no, ranks in included if round_no <= 8)


def test_checkpoints_keep_the_newest_two_and_damage_falls_back_to_the_older():
    [ctx] = contexts(1)
    kept = Checkpoints(ctx.store, "toy", 0)
    assert kept.newest() is None
    for round_no in (1, 2, 3):
        oldest = kept.write(Checkpoint(round_no, f"p{round_no}", {"t": torch.full((4,), float(round_no))}))
    assert oldest == 2
    assert kept.rounds() == [2, 3]
    assert kept.newest().position == "p3"
    key = next(key for key in ctx.store.list() if key.endswith("3"))
    data = bytearray(ctx.store.get(key))
    data[-1] ^= 1
    ctx.store.put(key, bytes(data))
    found = kept.newest()
    assert (found.round_no, found.position) == (2, "p2")
    assert found.state["t"].tolist() == [2.0] * 4
    assert kept.rounds() == [2]


def test_a_checkpoint_of_another_rank_is_not_ours():
    [ctx] = contexts(1)
    Checkpoints(ctx.store, "toy", 0).write(Checkpoint(4, "p", {}))
    assert Checkpoints(ctx.store, "toy", 1).newest() is None
    [key] = ctx.store.list()
    ctx.store.put(key.replace("00000/", "00001/"), ctx.store.get(key))
    assert Checkpoints(ctx.store, "toy", 1).newest() is None


def test_a_crash_while_a_checkpoint_is_written_loses_nothing():
    [ctx] = contexts(1)
    expected = random_training(contexts(1)[0])
    store = FaultyStore(open_store(ctx.store_uri))
    store.fail("put", "*/checkpoints/*", nth=2, error=StoreRefused)
    broken = replace(ctx)
    broken.__dict__["store"] = store
    with pytest.raises(StoreRefused):
        random_training(broken)
    assert Checkpoints(ctx.store, "toy", 0).rounds() == [2]
    assert random_training(replace(ctx, attempt=1)) == expected


def test_float32_moments_of_a_bfloat16_model_keep_their_bits():
    class Careful(torch.optim.SGD):
        """Keeps its momentum in float32 whatever the parameters are."""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.float32))
                    m.mul_(0.9).add_(p.grad.float())
                    p.data.add_(-0.1 * m)

    def run(ctx: atoll.ReplicaContext, stop_after: int = -1) -> bytes:
        model = perceptron(dtype=torch.bfloat16)
        inner = Careful(model.parameters(), lr=0.1)
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, checkpoint=1, tuning=QUICK) as outer:
            for count, batch in enumerate(outer.steps(batches(0, 30), rounds=6)):
                if count == stop_after:
                    raise Killed
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
        return bits(model)

    [ctx] = contexts(1)
    with pytest.raises(Killed):
        run(ctx, stop_after=7)
    assert run(replace(ctx, attempt=1)) == run(contexts(1)[0])


def test_a_checkpoint_that_does_not_fit_the_program_says_what_differs():
    [ctx] = contexts(1)
    model = perceptron()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=1, checkpoint=1, tuning=QUICK) as outer:
        train(outer, model, inner, batches(0, 4), 2)
    schedule = torch.optim.lr_scheduler.ConstantLR(inner)
    with pytest.raises(ConfigError, match="stateful="):
        atoll.DiLoCo(model, inner, ctx, inner_steps=1, stateful={"schedule": schedule}, tuning=QUICK)
    with pytest.raises(ConfigError, match=r"\b1\b.*\b2\b"):
        atoll.DiLoCo(model, [inner, inner], ctx, inner_steps=1, tuning=QUICK)


def test_saving_in_the_middle_of_a_round_is_refused():
    [ctx] = contexts(1)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, tuning=QUICK) as outer:
        loss_of(model, batches(0, 1)[0]).backward()
        inner.step()
        with pytest.raises(ConfigError) as caught:
            outer.save()
        assert caught.value.reason == "mid_round"


def test_old_rounds_go_and_what_is_left_still_verifies():
    replicas = contexts(2)

    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.DiLoCo(model, inner, ctx, inner_steps=1, checkpoint=2, snapshot=2, tuning=QUICK) as outer:
            train(outer, model, inner, batches(ctx.rank, 10), 40)
        return bits(model)

    first, second = side_by_side(replicas, body)
    assert first == second
    store = open_store(replicas[0].store_uri)
    commits = list(store.list("runs/toy/sync/commits/"))
    assert len(commits) <= 8
    assert len(list(store.list())) < 80
    report = verify(store, "toy")
    assert report.is_right, report.difference
    assert report.states >= 3
