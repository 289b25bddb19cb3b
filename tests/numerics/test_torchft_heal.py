"""Replicas that begin differently, die and come back: live weights, outer state and step are those of the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchft_replicas import QUICK, bits, local_sgd, side_by_side, small_model, train_step, weights

from atoll.errors import StoreRefused
from atoll.rounds.quorum import at_least
from atoll.stores.base import Store
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FaultyStore
from atoll.training.torchft.manager import Manager

pytestmark = pytest.mark.training

EVERY, ROUNDS = 4, 8


class Replica:
    """One process's life: a model, its optimizers, a manager, and DiLoCo or LocalSGD over them."""

    def __init__(
        self, store: Store, rank: int, kind: str, *, seed: int = 0, world_size: int = 2, **options: Any
    ) -> None:
        self.rank, self.model = rank, small_model(seed)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if kind == "local":
            options.setdefault("model", self.model)
        self.manager = Manager(store, rank, world_size, **{"tuning": QUICK, "timeout_s": 60.0, **options})
        if kind == "local":
            self.loop = local_sgd().LocalSGD(self.manager, self.model, self.inner, sync_every=EVERY)
            return
        fragments: list[nn.Module] = [self.model[0], self.model[2]] if kind == "streaming" else [self.model]
        self.outer = [torch.optim.SGD(one.parameters(), lr=0.7, momentum=0.9, nesterov=True) for one in fragments]
        more = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5} if kind == "streaming" else {}
        self.loop = local_sgd().DiLoCo(self.manager, fragments, self.inner, self.outer, sync_every=EVERY, **more)

    def train(self, until_step: int) -> None:
        """Batches are numbered by the step that they are for, so that one who comes back takes up the right ones."""
        with self.loop:
            while (at := self.manager.current_step()) < until_step:
                for i in range(EVERY):
                    train_step(self.model, self.inner, self.rank, at * EVERY + i)
                    if self.manager.current_step() > at:
                        break

    def die(self) -> None:
        self.manager.shutdown(wait=False, leave=False)

    @property
    def agreed(self) -> list[Tensor]:
        return [tensor for one in self.loop._fragments for tensor in one.original_parameters.values()]

    @property
    def momentum(self) -> list[Tensor]:
        return [state["momentum_buffer"] for outer in self.outer for state in outer.state.values()]


def fault_free(kind: str) -> list[bytes]:
    store = MemoryStore()

    def body(rank: int) -> bytes:
        replica = Replica(store, rank, kind)
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return bits(weights(replica.model))

    return side_by_side(2, body)


@pytest.mark.parametrize("kind", ["whole", "streaming", "local"])
def test_replicas_that_begin_differently_begin_with_the_weights_of_the_first(kind):
    def body(rank: int) -> Any:
        replica = Replica(store, rank, kind, seed=rank)
        replica.manager.current_step()
        began = bits(weights(replica.model))
        replica.train(2)
        replica.manager.shutdown()
        return began, bits(weights(replica.model)) if kind != "streaming" else bits(replica.agreed)

    store = MemoryStore()
    found = side_by_side(2, body)
    assert [began for began, _ in found] == [bits(weights(small_model(0)))] * 2
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", ["whole", "local"])
@pytest.mark.parametrize("died_at", [0, 1, 3])
def test_one_who_dies_and_comes_back_leaves_no_trace(kind, died_at):
    """It starts as a stranger, with other weights, and ends with the bits of a run in which nobody died."""

    def body(rank: int) -> Any:
        replica = Replica(store, rank, kind)
        if rank == 1:
            replica.train(died_at)
            replica.die()
            replica = Replica(store, rank, kind, seed=99)
            assert replica.manager.current_step() == died_at
            assert bits(weights(replica.model)) != bits(weights(small_model(99)))
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return bits(weights(replica.model))

    store = MemoryStore()
    assert side_by_side(2, body) == fault_free(kind)


def test_one_who_comes_back_while_fragments_stream_has_global_weights_outer_state_and_step():
    def body(rank: int) -> Any:
        replica = Replica(store, rank, "streaming", snapshot_every=3)
        if rank == 1:
            replica.train(4)
            was = bits(replica.agreed), bits(replica.momentum)
            replica.die()
            replica = Replica(store, rank, "streaming", seed=99, snapshot_every=3)
            assert replica.manager.current_step() == 4
            assert (bits(replica.agreed), bits(replica.momentum)) == was
            assert bits(weights(replica.model)) == bits(replica.agreed), "live weights are the global ones"
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return bits(replica.agreed), bits(replica.momentum)

    store = MemoryStore()
    first, second = side_by_side(2, body)
    assert first == second


def test_one_who_comes_back_without_a_model_does_not_pull_the_others_back():
    """LocalSGD tells nothing of its weights; a stranger's must not go into the mean."""
    heavy = 1000.0

    def body(rank: int) -> Any:
        replica = Replica(store, rank, "local", model=None)
        if rank == 1:
            replica.train(3)
            replica.die()
            replica = Replica(store, rank, "local", model=None)
            with torch.no_grad():
                for parameter in replica.model.parameters():
                    parameter.fill_(heavy)
            # It cannot know where the others are until it says what it averages.
            assert replica.manager.current_step() == 0
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return weights(replica.model)

    store = MemoryStore()
    first, second = side_by_side(2, body)
    assert bits(first) == bits(second)
    assert max(tensor.abs().max().item() for tensor in first) < 10


@pytest.mark.parametrize("rounds", [18, 20], ids=["right at a snapshot", "two rounds after it"])
@pytest.mark.parametrize("kind", ["whole", "streaming"])
def test_one_who_was_away_for_long_loads_a_snapshot_and_old_rounds_are_gone(kind, rounds):
    gone, back = threading.Event(), threading.Event()
    options = {"quorum": at_least(1, grace_s=0.0, deadline_s=60.0), "snapshot_every": 3}

    def body(rank: int) -> Any:
        replica = Replica(store, rank, kind, **options)
        replica.manager.current_step()
        if rank == 1:
            replica.train(1)
            replica.manager.shutdown()
            gone.set()
            back.wait(60)
            replica = Replica(store, rank, kind, seed=99, **options)
            assert replica.manager.current_step() == rounds
            assert bits(weights(replica.model)) == bits(replica.agreed), "live weights are the global ones"
        else:
            gone.wait(60)
            replica.train(rounds)
        replica.manager.shutdown()
        back.set()
        return replica.manager.state_dict(), bits(replica.agreed), bits(replica.momentum)

    store = MemoryStore()
    first, second = side_by_side(2, body)
    assert first == second
    commits = sorted(key for key in store.list() if "/commits/" in key)
    assert len(commits) < 12, "rounds before the last two snapshots are deleted"
    assert not commits[0].endswith("0000000000.json")


def test_one_who_stood_still_until_its_next_round_was_deleted_loads_a_snapshot():
    """The missing commit shows in an exchange that fails; after that the replica looks for a snapshot."""
    rounds, stopped, over = 8, threading.Event(), threading.Event()
    options = {"quorum": at_least(1, grace_s=0.0, deadline_s=60.0), "snapshot_every": 3, "max_retries": 1}

    def body(rank: int) -> Any:
        replica = Replica(store, rank, "whole", **options)
        replica.manager.current_step()
        if rank == 1:
            replica.train(1)
            stopped.set()
            over.wait(60)
            replica.train(rounds + 1)
            replica.manager.shutdown()
            return bits(replica.agreed), bits(replica.momentum)
        stopped.wait(60)
        replica.train(rounds)
        replica.manager.shutdown()
        for key in [key for key in store.list() if "/commits/" in key]:
            if int(key.rsplit("/", 1)[1].removesuffix(".json")) < 6:
                store.delete(key)
        over.set()
        return None

    store = MemoryStore()
    _, healed = side_by_side(2, body)
    again = Replica(store, 0, "whole", seed=99, **options)
    assert again.manager.current_step() == rounds + 1, "the healed replica went on from where the other one ended"
    assert (bits(again.agreed), bits(again.momentum)) == healed
    again.manager.shutdown()


def test_one_who_could_not_read_a_round_takes_it_in_before_the_next(caplog):
    """Its update was announced, but it never saw the mean: the others are a round ahead, and wait."""
    shared = MemoryStore()

    def body(rank: int) -> Any:
        store = FaultyStore(shared)
        if rank == 1:  # the first look is before the round, the second before the update is announced
            store.fail("get", "*/commits/0000000002.json", nth=3, error=StoreRefused)
        replica = Replica(store, rank, "whole")
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return bits(replica.agreed), bits(weights(replica.model)), replica.manager.state_dict()

    first, second = side_by_side(2, body)
    assert first == second
    assert first[2] == {"step": ROUNDS, "batches_committed": 2 * ROUNDS}
    assert [record.args[:2] for record in caplog.records if "scripted fault" in record.getMessage()] == [(1, 2)]


def test_a_replica_whose_live_weights_were_not_healed_would_be_noticed():
    """The control: stale live weights are a huge false update, and the result is another."""

    def body(rank: int) -> Any:
        replica = Replica(store, rank, "whole")
        if rank == 1:
            replica.train(3)
            replica.die()
            replica = Replica(store, rank, "whole", seed=99)
            replica.manager.current_step()
            replica.model.load_state_dict(small_model(99).state_dict())
        replica.train(ROUNDS)
        replica.manager.shutdown()
        return bits(weights(replica.model))

    store = MemoryStore()
    assert side_by_side(2, body) != fault_free("whole")
