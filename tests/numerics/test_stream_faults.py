"""Streaming under faults: deaths at any step, late and left-out replicas, errors in the background, ends with a round
under way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import numpy as np
import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, bits, contexts, loss_of, perceptron, side_by_side
from interruptions import Killed, interrupted, is_committed, random_training, until, until_offered
from torch import nn

import atoll
from atoll.errors import ConfigError, StoreRefused
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.verify import verify
from atoll.testing.fakes import FaultyStore

pytestmark = [pytest.mark.process, pytest.mark.training]

STREAMS = {
    "fragments": {"inner_steps": 6, "fragments": 3},
    "delay": {"inner_steps": 4, "delay": 2},
    "whole-stride": {"inner_steps": 4, "fragments": 2, "delay": 2},
    "both": {"inner_steps": 6, "fragments": 2, "delay": 1, "alpha": 0.25},
    "eager": {"inner_steps": 4, "eager": True},
    "eager-fragments": {"inner_steps": 6, "fragments": 2, "eager": True, "delay": 2},
}
CODECS = ["fp32", "bf16", "int8", "int4"]


def flights() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "atoll-round"]


# ---- deaths


@pytest.fixture(scope="module")
def unbroken() -> dict[str, bytes]:
    """The final bits of a replica that nothing happened to, by stream."""
    return {}


@pytest.mark.parametrize("stop_after", [*range(7), 11, 12, 13, 17, 18])
@pytest.mark.parametrize("stream", STREAMS)
def test_an_interrupted_replica_ends_with_the_bits_of_one_that_was_not(stream, stop_after, unbroken):
    """Before, at and between the beginnings and ends of exchanges, checkpoints of every second round."""
    options = {"codec": "int4", "rounds": 8, **STREAMS[stream]}
    if stream not in unbroken:
        unbroken[stream] = random_training(contexts(1)[0], **options)
    [ctx] = contexts(1)
    if stop_after < 8 * options["inner_steps"] // options.get("fragments", 1):
        with pytest.raises(Killed):
            random_training(ctx, stop_after=stop_after, **options)
    assert random_training(replace(ctx, attempt=1), **options) == unbroken[stream]
    assert not flights()


@pytest.mark.parametrize("left_out", ["pace", "live", "feedback"])
def test_a_checkpoint_without_one_of_its_parts_would_show(left_out, monkeypatch):
    """The test above can fail: it does when the place between exchanges, live weights or residuals are not saved."""
    options = {"codec": "int4", "rounds": 8, **STREAMS["both"]}
    expected = random_training(contexts(1)[0], **options)
    [ctx] = contexts(1)
    with pytest.raises(Killed):
        random_training(ctx, stop_after=14, **options)
    name = {
        "pace": "atoll.training.inner.StepCounter.load_state_dict",
        "live": "atoll.training.model.ModelVector.load_live",
        "feedback": "atoll.training.feedback.ErrorFeedback.load_state_dict",
    }[left_out]
    monkeypatch.setattr(name, lambda self, state: None)
    assert random_training(replace(ctx, attempt=1), **options) != expected


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stream", ["blocking", "both", "whole-stride", "eager"])
def test_a_strict_run_with_a_death_in_it_ends_with_the_same_bits(stream, codec):
    options = {"codec": codec, **STREAMS.get(stream, {"inner_steps": 3})}
    expected = interrupted(2, victim=-1, stop_after=0, rounds=6, **options)
    assert len(set(expected)) == 1
    assert interrupted(2, victim=1, stop_after=8, rounds=6, checkpoint=2, **options) == expected


@pytest.mark.parametrize("streaming", [{"delay": 4}, {"delay": 2}, {"eager": True, "delay": 3}])
def test_an_update_of_a_dead_process_that_was_committed_is_not_owed_again(streaming):
    """The commit names the process before; the one that came back offers nothing, and must owe as much all the same."""
    options = {"codec": "int4", "inner_steps": 4, "checkpoint": 3, **streaming}
    expected = interrupted(2, victim=-1, stop_after=0, rounds=7, **options)
    # Dies a step after its exchange began, with a checkpoint of the round before.
    assert interrupted(2, victim=0, stop_after=17, committed=3, rounds=7, **options) == expected


def test_without_a_checkpoint_a_restarted_replica_takes_up_the_agreed_state():
    finals = interrupted(2, victim=1, stop_after=13, rounds=12, checkpoint=None, snapshot=3, **STREAMS["both"])
    assert finals[0] == finals[1]


# ---- late and left out


def pass_of(outer: atoll.DiLoCo, model: nn.Module, inner: torch.optim.Optimizer, batch, *, wait_for: int | None):
    """One pass of the training loop; `wait_for` must have offered its update before the next round begins here.

    The grace is nil, so whoever is there first decides who takes part.
    """
    loss_of(model, batch).backward()
    inner.step()
    inner.zero_grad()
    if wait_for is not None and outer.inner_step % outer._stream.stride == 0:
        until_offered(outer.ctx, outer._loop.begun, rank=wait_for)
    return outer.step()


@pytest.mark.parametrize("stream", ["fragments", "both", "eager"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_replica_that_joins_late_catches_up_and_takes_part(stream, codec):
    """Rank 2 comes when the others have done eight rounds; soon all three take part, and they agree."""
    gate = Barrier(3)
    took_part: list[tuple[int, ...]] = []
    options = {**STREAMS[stream], "codec": codec, "snapshot": 3, "quorum": atoll.Quorum(least=2, grace_s=0.0)}

    def body(ctx: atoll.ReplicaContext) -> tuple[bytes, str]:
        is_late = ctx.rank == 2
        if is_late:
            gate.wait(60)
        model = perceptron(ctx.rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, tuning=QUICK, **options) as outer:
            if is_late:
                assert outer.round >= 8
                gate.wait(60)
            for batch in endless(ctx.rank):
                wait_for = 2 if outer.round >= 8 and not is_late else None
                outcome = pass_of(outer, model, inner, batch, wait_for=wait_for)
                if outcome is not None and ctx.rank == 0:
                    took_part.append(outcome.ranks)
                if outer.round == 8 and outcome is not None and not is_late:
                    gate.wait(60)
                    gate.wait(60)
                if outer._loop.begun >= 14:
                    break
        return bits(model), outer.digest

    replicas = contexts(3)
    finals = side_by_side(replicas, body)
    assert took_part[:8] == [(0, 1)] * 8
    assert any(2 in ranks for ranks in took_part)
    assert len(set(finals)) == 1
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert report.is_right, report.difference


def endless(rank: int) -> Iterator:
    while True:
        yield from batches(rank, 10)


@pytest.mark.parametrize("stream", ["fragments", "both", "delay", "eager-fragments"])
def test_a_replica_that_was_left_out_takes_the_agreed_weights_and_owes_its_update(stream):
    """Rank 2 does not get round 2 offered until it is committed without it."""
    replicas = contexts(3)
    store, keys = FaultyStore(open_store(replicas[2].store_uri)), RoundKeys("toy")

    def before(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.offers_prefix(2)):
            until(lambda: is_committed(replicas[0], 2))

    store.before = before
    replicas[2].__dict__["store"] = store
    quorum = atoll.Quorum(least=2, grace_s=0.0)
    options = {**STREAMS[stream], "codec": "int4", "tuning": QUICK, "checkpoint": None, "quorum": quorum}
    included: list[bool] = []
    owed: list[float] = []

    def body(ctx: atoll.ReplicaContext) -> tuple[bytes, str]:
        is_slow = ctx.rank == 2
        model = perceptron()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, **options) as outer:
            for batch in endless(ctx.rank):
                outcome = pass_of(outer, model, inner, batch, wait_for=None if is_slow or outer._loop.begun == 2 else 2)
                if is_slow and outcome is not None:
                    included.append(outcome.is_included)
                    owed.append(outer._loop.feedback.state_dict()["residual"].abs().sum().item())
                    if not outcome.is_included:
                        live = np.concatenate([t.numpy().ravel() for t in outer._loop.vector.live()])
                        assert live.tobytes() == outer._loop.state.values.tobytes()
                if outer._loop.begun >= 8:
                    break
        return bits(model), outer.digest

    finals = side_by_side(replicas, body)
    assert len(set(finals)) == 1
    assert included[:3] == [True, True, False]
    assert included[-1]
    assert owed[2] > 3 * owed[1]
    assert owed[-1] < owed[2]


# ---- errors


@pytest.mark.parametrize("stream", ["delay", "whole-stride", "eager"])
def test_an_error_in_the_background_is_raised_at_the_next_boundary_as_it_was(stream):
    [ctx] = contexts(1)
    store = FaultyStore(open_store(ctx.store_uri))
    refused = StoreRefused("no more room")
    store.fail("create", "*/rounds/0000000002/offer/*", error=lambda message: refused)
    ctx.__dict__["store"] = store
    model = perceptron()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = atoll.DiLoCo(model, inner, ctx, tuning=QUICK, **STREAMS[stream])

    def run() -> None:
        with outer:
            for batch in outer.steps(batches(0, 40), rounds=5):
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()

    with pytest.raises(StoreRefused) as caught:
        run()
    assert caught.value is refused
    assert outer.round == 2
    assert not flights()


def test_an_error_does_not_wait_until_the_result_is_due():
    [ctx] = contexts(1)
    store = FaultyStore(open_store(ctx.store_uri))
    store.fail("create", "*/rounds/0000000000/offer/*", error=StoreRefused)
    ctx.__dict__["store"] = store
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=50, delay=50, tuning=QUICK) as outer:
        for count, batch in enumerate(endless(0)):
            loss_of(model, batch).backward()
            inner.step()
            if count == 50:
                outer._loop.pending.applied.exception(timeout=60)  # it is over; training has not heard of it
                with pytest.raises(StoreRefused):
                    outer.step()
                break
            outer.step()
        assert outer.round == 0
        assert outer._loop.pending is None


@pytest.mark.parametrize("stream", ["blocking", "fragments", "both", "whole-stride", "eager", "eager-fragments"])
def test_after_an_error_the_round_can_be_tried_again(stream):
    """What was trained is not lost: the round is due again at once, and weighs all of it."""
    [ctx] = contexts(1)
    store = FaultyStore(open_store(ctx.store_uri))
    store.fail("create", "*/rounds/0000000002/offer/*", error=StoreRefused)
    ctx.__dict__["store"] = store
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    options = {"codec": "int4", "tuning": QUICK, **STREAMS.get(stream, {"inner_steps": 4})}
    failures, weighed, steps = 0, 0.0, 0
    with atoll.DiLoCo(model, inner, ctx, **options) as outer:
        for batch in endless(0):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            steps += 1
            try:
                outcome = outer.step(weight=1.0)
            except StoreRefused:
                failures += 1
                outcome = None
            if outcome is not None and outcome.fragment == 0:
                weighed += outcome.weights[0]
            if outer.round == 6:
                break
    assert failures == 1
    # All steps but those since the last exchange of the first fragment.
    assert steps - 2 * options["inner_steps"] <= weighed <= steps
    assert verify(open_store(ctx.store_uri), "toy").is_right


@pytest.mark.parametrize("stream", ["delay", "eager"])
def test_a_replica_that_fails_while_it_waits_for_others_is_gone_at_once(stream):
    """Rank 1 never comes, and the round would wait for it for half an hour."""
    ended = Event()

    def body() -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        try:
            with atoll.DiLoCo(model, inner, contexts(2)[0], tuning=QUICK, **STREAMS[stream]) as outer:
                for batch in outer.steps(batches(0, 40), rounds=5):
                    if outer._loop.pending is not None:
                        raise Killed
                    loss_of(model, batch).backward()
                    inner.step()
                    inner.zero_grad()
        except Killed:
            ended.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(60)
    assert ended.is_set()
    assert not flights()


WAITS_FOR_EVER = """
    import signal, sys
    import torch
    sys.path.insert(0, {folder!r})
    from diloco_toys import QUICK, batches, loss_of, perceptron
    import atoll

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    ctx = atoll.ReplicaContext("toy", 0, 2, {store!r})
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, delay=2, tuning=QUICK) as outer:
        for batch in outer.steps(batches(0, 40), rounds=5):
            if outer._loop.pending is not None:
                print("under way", flush=True)
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
"""


def test_sigterm_ends_a_replica_whose_round_is_under_way(tmp_path):
    code = textwrap.dedent(WAITS_FOR_EVER).format(folder=str(Path(__file__).parent), store=tmp_path.as_uri())
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.communicate()


# ---- ends


@pytest.mark.parametrize("stream", ["delay", "both", "whole-stride", "eager"])
@pytest.mark.parametrize("steps", [4, 9, 12, 13])
def test_leaving_with_a_round_under_way_brings_it_to_its_end(stream, steps):
    """Wherever all replicas stop, they have the same weights afterwards, those of every round that was begun."""
    replicas = contexts(2)

    def body(ctx: atoll.ReplicaContext) -> tuple[int, bytes, str]:
        model = perceptron()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        with atoll.DiLoCo(model, inner, ctx, tuning=SCATTERED, **STREAMS[stream]) as outer:
            for batch in batches(ctx.rank, steps):
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
                outer.step()
        return outer.round, bits(model), outer.digest

    first, second = side_by_side(replicas, body)
    assert first == second
    options = STREAMS[stream]
    assert first[0] == steps // (options["inner_steps"] // options.get("fragments", 1))
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert (report.difference, report.rounds) == (None, first[0])
    assert not flights()


def test_saving_while_a_round_is_under_way_is_refused():
    [ctx] = contexts(1)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=2, delay=1, tuning=QUICK) as outer:
        seen = []
        for batch in batches(0, 6):
            loss_of(model, batch).backward()
            inner.step()
            with pytest.raises(ConfigError) as caught:
                outer.save()  # an optimizer step that no boundary has seen
            assert caught.value.reason == "mid_round"
            outer.step()
            try:
                outer.save()
                seen.append(True)
            except ConfigError:
                seen.append(False)
        assert seen == [True, False, True, False, True, False]


def test_what_was_hidden_is_measured():
    """The exchange of each round is held back until training has made another step."""
    [ctx] = contexts(1)
    store, begun, trained = FaultyStore(open_store(ctx.store_uri)), Event(), Event()

    def before(verb: str, key: str) -> None:
        if verb == "create" and "/offer/" in key:
            begun.set()
            assert trained.wait(60)

    store.before = before
    ctx.__dict__["store"] = store
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, delay=3, tuning=QUICK) as outer:
        for batch in outer.steps(batches(0, 20), rounds=2):
            loss_of(model, batch).backward()
            inner.step()
            assert outer.inner_step < 5 or begun.wait(60)
            if outer.inner_step >= 6:
                trained.set()
    assert 0 < outer.hidden_share <= 1
    assert outer._progress.metrics["hidden_share"] == outer.hidden_share


def test_nothing_is_hidden_where_training_waits():
    [ctx] = contexts(1)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, tuning=QUICK) as outer:
        for batch in outer.steps(batches(0, 20), rounds=3):
            loss_of(model, batch).backward()
            inner.step()
    assert outer.hidden_share == 0
