"""torchft's DiLoCo with `fragment_sync_delay` over a store: the exchange goes on while the model trains."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchft_replicas import (
    QUICK,
    STREAMING,
    batch,
    bits,
    local_sgd,
    our_managers,
    outer_optimizers,
    run_diloco,
    side_by_side,
    small_model,
    weights,
)

from atoll.context import ReplicaContext
from atoll.errors import ConfigError, StoreRefused
from atoll.rounds.codecs import recommended_mean
from atoll.rounds.codecs.base import codec, codec_names
from atoll.stores.base import Store
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore
from atoll.training.torchft.manager import Manager, RoundMeter

pytestmark = pytest.mark.training

EVERY, DELAY, STEPS = 3, 1, 30
"""One fragment every three steps, applied one step after it was sent; as in `run_diloco` with two fragments."""


class Streaming:
    """One replica of two fragments, and a loop that can be watched from inside."""

    def __init__(self, store: Store | ReplicaContext, rank: int, world_size: int = 2, **options: Any) -> None:
        where = (store,) if isinstance(store, ReplicaContext) else (store, rank, world_size)
        self.rank, self.model = rank, small_model()
        self.manager = Manager(*where, **{"tuning": QUICK, "timeout_s": 60.0, **options})
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        fragments = [self.model[0], self.model[2]]
        more = {"fragment_sync_delay": DELAY, "fragment_update_alpha": 0.5}
        self.loop = local_sgd().DiLoCo(
            self.manager, fragments, self.inner, outer_optimizers(fragments), sync_every=2 * EVERY, **more
        )

    def gradients(self, step: int) -> float:
        """Forward and backward of `train_step`."""
        inputs = batch(self.rank, step)
        loss = (self.model(inputs) - inputs[:, :2].sin()).square().mean()
        self.inner.zero_grad()
        loss.backward()
        return loss.item()

    @property
    def agreed(self) -> list[torch.Tensor]:
        return [tensor for one in self.loop._fragments for tensor in one.original_parameters.values()]


class Held(FaultyStore):
    """Offers are held up until the training loop has taken another step."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_under_way, self.has_trained = threading.Event(), threading.Event()
        self.held: list[bool] = []
        self.before = self._hold

    def _hold(self, verb: str, key: str) -> None:
        if verb == "create" and "/offer/" in key:
            self.is_under_way.set()
            self.held.append(self.has_trained.wait(30))

    def next_round(self) -> None:
        self.is_under_way.clear()
        self.has_trained.clear()


def test_an_exchange_that_cannot_end_before_the_next_step_is_taken_does_end_and_changes_no_bit():
    shared = MemoryStore()

    def body(rank: int) -> Any:
        store = Held(shared)
        one = Streaming(store, rank)
        with one.loop:
            for step in range(STEPS):
                is_overlapped = step % EVERY == EVERY - DELAY
                if is_overlapped:
                    assert store.is_under_way.wait(30), "it begins when the last tensor is handed in, not a step later"
                loss = one.gradients(step)
                if is_overlapped:
                    store.has_trained.set()
                one.inner.step()
                if is_overlapped:
                    store.next_round()
        assert one.manager.current_step() == STEPS // EVERY
        one.manager.shutdown()
        assert store.held == [True] * (STEPS // EVERY)
        assert one.manager.hidden_share > 0
        return bits(weights(one.model)), loss, bits(one.agreed)

    held = side_by_side(2, body)
    with our_managers(2) as make:
        plain = run_diloco(make, 2, **STREAMING)
    assert held == [(bits(live), loss, bits(agreed)) for live, loss, agreed in plain]


def test_an_exchange_that_fails_in_the_background_disturbs_no_step_and_is_no_commit():
    shared = MemoryStore()

    def body(rank: int) -> Any:
        store = FaultyStore(shared)
        if rank == 1:
            store.fail("create", "*/rounds/0000000002/offer/*", error=StoreRefused)
        one, commits, step = Streaming(store, rank), [], 0
        with one.loop:
            while one.manager.current_step() < 6:
                before = one.manager.current_step()
                one.gradients(step)
                one.inner.step()
                step += 1
                if step % EVERY == EVERY - DELAY:
                    assert one.manager.errored() is None
                if step % EVERY == 0:
                    commits.append(one.manager.current_step() > before)
        one.manager.shutdown()
        return commits, bits(one.agreed)

    first, second = side_by_side(2, body)
    assert first[0] == [True] * 6
    assert second[0] == [True, True, False, True, True, True, True]
    assert first[1] == second[1]


def test_a_fragment_that_is_on_its_way_at_the_end_arrives_and_is_taken_in_by_those_who_go_on():
    store = MemoryStore()

    def begin(rank: int) -> None:
        one = Streaming(store, rank)
        with one.loop, one.manager:
            for step in range(2 * EVERY - DELAY):
                one.gradients(step)
                one.inner.step()
            assert one.manager.current_step() == 1

    def go_on(rank: int) -> tuple[int, bytes]:
        one = Streaming(store, rank, attempt=1)
        found = one.manager.current_step(), bits(one.agreed)
        one.manager.shutdown()
        return found

    side_by_side(2, begin)
    (first, agreed), (second, same) = side_by_side(2, go_on)
    assert (first, second) == (2, 2)
    assert agreed == same


@pytest.mark.parametrize(("least", "is_asked"), [(None, False), (1, True)])
def test_only_a_replica_that_can_be_left_out_asks_before_its_round_whether_it_was(least, is_asked):
    """It waits for the answer instead of training."""
    shared = MemoryStore()

    def body(rank: int) -> bool:
        store = FaultyStore(shared)
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0, min_replica_size=least)
        manager.start_quorum()
        manager.allreduce(torch.ones(3)).wait()
        assert manager.should_commit()
        before = store.traffic.requests.total()
        manager.start_quorum()
        asked = store.traffic.requests.total() > before
        manager.shutdown()
        return asked

    assert side_by_side(2, body) == [is_asked] * 2


def test_a_tensor_too_many_is_an_error_of_its_round_and_of_no_other():
    manager = Manager(MemoryStore(), 0, 1, tuning=QUICK)

    def one_round(*sizes: int) -> bool:
        manager.start_quorum()
        for work in [manager.allreduce(torch.ones(size)) for size in sizes]:
            work.wait()
        return manager.should_commit()

    assert one_round(3, 2)
    assert not one_round(3, 2, 1)
    assert isinstance(manager.errored(), ConfigError)
    assert one_round(3, 2, 0), "an empty one more does no harm"
    manager.shutdown()


@pytest.mark.parametrize("name", codec_names())
def test_with_every_codec_replicas_agree_to_the_bit_and_with_the_mean_within_its_bound(name):
    given = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    true = np.mean([tensor.double().numpy() for tensor in given], axis=0)
    update, mean = codec(name), codec(recommended_mean(name))
    bound = np.mean([update.error_bound(tensor.numpy()) for tensor in given], axis=0) + 1e-6
    bound = bound + mean.error_bound((np.abs(true) + bound).astype(np.float32))

    def body(rank: int) -> tuple[np.ndarray, bytes]:
        with Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0, codec=name, run_id="mean") as manager:
            manager.start_quorum()
            manager.allreduce(tensor := given[rank].clone()).wait()
            assert manager.should_commit()
        one = Streaming(store, rank, codec=name, run_id="streaming")
        with one.loop, one.manager:
            for step in range(4 * EVERY):
                one.gradients(step)
                one.inner.step()
        return tensor.numpy(), bits(one.agreed)

    store = MemoryStore()
    (first, agreed), (second, same) = side_by_side(2, body)
    assert first.tobytes() == second.tobytes()
    assert (np.abs(first - true) <= bound).all()
    assert agreed == same != bits(weights(small_model()))


def test_the_live_views_see_step_loss_bytes_and_waiting(tmp_path):
    ctx = ReplicaContext("a", 0, 1, MemoryStore("torchft-progress").uri, spool=str(tmp_path))
    one = Streaming(ctx, 0)
    assert one.manager.counters.bytes_up == 0
    with one.loop, one.manager:
        for step in range(2 * EVERY):
            one.manager.log(loss=one.gradients(step))
            one.inner.step()
        seen = json.loads((Path(tmp_path) / "progress.json").read_text())
        assert seen["round_no"] == 2
        metrics = seen["metrics"]
        assert metrics["bytes_up"] == one.manager.counters.bytes_up > 0
        assert metrics["bytes"] == metrics["bytes_up"] + metrics["bytes_down"]
        assert 0 < metrics["wait_share"] <= 1
        assert 0 <= metrics["hidden_share"] <= 1
        assert metrics["loss"] > 0


def test_waiting_inside_of_waiting_is_not_counted_twice():
    clock = FakeClock()
    meter = RoundMeter(Manager(MemoryStore(), 0, 1)._rounds, None, clock=clock)
    clock.advance(8.0)
    with meter.waiting():
        clock.advance(1.0)
        with meter.waiting():
            clock.advance(1.0)
    assert meter.wait_share == 0.2
    assert meter.hidden_share == 0.0
