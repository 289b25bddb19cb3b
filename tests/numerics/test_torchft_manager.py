"""What torchft may expect of its manager: one exchange for each round, no error where it cannot bear one."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp
from torchft_replicas import QUICK, bits, our_managers, side_by_side, small_model, train_step, weights

import atoll
from atoll.errors import ConfigError, Conflict, Fenced, QuorumLost, RoundError, StoreRefused
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FaultyStore
from atoll.training.allreduce import ObjectStoreAllReduce
from atoll.training.torchft import Manager, MockManager


def averaged(manager: Manager, *tensors: torch.Tensor) -> bool:
    """One round as LocalSGD has it."""
    manager.start_quorum()
    for work in [manager.allreduce(tensor) for tensor in tensors]:
        work.wait()
    return manager.should_commit()


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(5.0) + 10 * rank


@pytest.mark.process
def test_it_needs_no_torchft():
    code = "import sys, atoll.training.torchft; print([m for m in sys.modules if m.split('.')[0] == 'torchft'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert MockManager is Manager
    assert Manager._use_async_quorum is False


def test_a_round_of_many_tensors_is_one_exchange():
    store = FaultyStore(MemoryStore())

    def body(rank: int) -> Any:
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        tensors = [torch.full((i,), float(rank + i)) for i in range(1, 31)]
        assert averaged(manager, *tensors)
        before = manager._rounds.client.counters.requests["create"]
        assert averaged(manager, *tensors)
        creates = manager._rounds.client.counters.requests["create"] - before
        manager.shutdown()
        return [tensor.unique().tolist() for tensor in tensors], creates

    found = side_by_side(2, body)
    assert [means for means, _ in found] == [[[i + 0.5] for i in range(1, 31)]] * 2
    assert sum(creates for _, creates in found) <= 4, "an offer from each, and one or two proposals of the commit"


def test_nothing_is_sent_before_it_is_waited_for():
    store = MemoryStore()
    manager = Manager(store, 0, 1, tuning=QUICK)
    manager.start_quorum()
    manager.allreduce(torch.ones(3))
    assert list(store.list()) == []
    assert manager.should_commit()
    assert any("commits" in key for key in store.list())
    manager.shutdown()


def test_the_last_tensor_is_the_start_signal_and_nobody_waits_until_asked_to():
    """With a delay the exchange goes on while the model trains."""
    shared = MemoryStore()

    def body(rank: int) -> Any:
        store, announced, may_go_on = FaultyStore(shared), threading.Event(), threading.Event()

        def hold(verb: str, key: str) -> None:
            if verb == "create" and "rounds/0000000001/offer/" in key:
                announced.set()
                may_go_on.wait(30)

        store.before = hold
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        assert averaged(manager, numbers(rank))
        manager.start_quorum()
        first, last = (tensor := numbers(rank)).split(3)
        works = [manager.allreduce(first)]
        assert not announced.is_set()
        works.append(manager.allreduce(last))  # comes back though the exchange cannot go on
        assert announced.wait(30), "nobody has waited yet, and it is on its way"
        manager.disallow_state_dict_read()
        manager.allow_state_dict_read()
        assert not any(work.is_completed() for work in works)
        assert tensor.tolist() == numbers(rank).tolist(), "nothing changes under the caller's feet"
        may_go_on.set()
        assert all(work.wait() for work in works)
        assert manager.should_commit()
        manager.shutdown()
        return tensor.tolist()

    assert side_by_side(2, body) == [(numbers(0) + 5).tolist()] * 2


def test_callbacks_have_run_when_waiting_is_over():
    def body(rank: int) -> Any:
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        order = []
        for _ in range(20):
            manager.start_quorum()
            tensor = numbers(rank)
            work = manager.allreduce(tensor)
            copy = torch.empty(5)
            last = work.get_future().then(lambda f, copy=copy: copy.copy_(f.value())).then(lambda f: f.value() * 2)
            work.wait()
            order.append((copy.tolist(), last.done(), last.wait().tolist()))
            assert manager.should_commit()
        manager.shutdown()
        return order

    store = MemoryStore()
    mean = (numbers(0) + 5).tolist()
    assert side_by_side(2, body) == [[(mean, True, [2 * x for x in mean])] * 20] * 2


def test_waiting_for_a_future_alone_is_enough():
    manager = Manager(MemoryStore(), 0, 1, tuning=QUICK)
    manager.start_quorum()
    future = manager.allreduce(torch.ones(2)).get_future().then(lambda f: f.value() + 1)
    assert future.wait().tolist() == [2.0, 2.0]
    late = []
    future.add_done_callback(lambda f: late.append(f.value()))
    assert len(late) == 1
    manager.shutdown()


def test_parameters_and_other_dtypes_are_averaged_in_place():
    def body(rank: int) -> Any:
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        leaf = torch.full((2, 2), float(rank), requires_grad=True)
        half, strided = torch.full((3,), float(rank), dtype=torch.bfloat16), torch.full((4, 2), float(rank)).t()
        assert averaged(manager, leaf, half, strided)
        manager.shutdown()
        return leaf.tolist(), half.tolist(), strided.tolist(), leaf.requires_grad

    store = MemoryStore()
    assert side_by_side(2, body) == [([[0.5] * 2] * 2, [0.5] * 3, [[0.5] * 4] * 2, True)] * 2


def test_a_commit_without_tensors_only_counts():
    manager = Manager(MemoryStore(), 0, 2, tuning=QUICK)
    manager.start_quorum()
    manager.wait_quorum()
    assert manager.should_commit()
    assert manager.should_commit()
    assert manager.current_step() == 2
    assert manager.batches_committed() == 4
    manager.shutdown()


def test_counters_and_places():
    def body(rank: int) -> Any:
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        before = manager.participating_rank(), manager.is_participating()
        assert averaged(manager, numbers(rank))
        after = manager.participating_rank(), manager.is_participating(), manager.num_participants()
        state = manager.state_dict()
        manager.load_state_dict({"step": 40, "batches_committed": 80})
        manager.shutdown()
        return before, after, state, manager.state_dict()

    store = MemoryStore()
    for rank, found in enumerate(side_by_side(2, body)):
        assert found == (
            (None, False),
            (rank, True, 2),
            {"step": 1, "batches_committed": 2},
            {"step": 40, "batches_committed": 80},
        )


# ---- what goes wrong


def refusing(pattern: str, *, times: int = 1, verb: Any = "create") -> FaultyStore:
    store = FaultyStore(MemoryStore())
    store.fail(verb, pattern, times=times, error=StoreRefused)
    return store


def test_an_exchange_that_fails_is_no_error_until_the_commit_says_no():
    manager = Manager(refusing("*/offer/*"), 0, 1, tuning=QUICK)
    manager.start_quorum()
    work = manager.allreduce(tensor := numbers(0))
    assert work.wait() is False
    assert isinstance(manager.errored(), StoreRefused)
    assert tensor.tolist() == numbers(0).tolist()
    assert manager.allreduce(torch.ones(1)).wait() is False, "after an error nothing more is tried"
    assert manager.should_commit() is False
    assert manager.current_step() == 0
    assert averaged(manager, numbers(0)), "the next round is a new try"
    assert manager.errored() is None
    assert manager.current_step() == 1
    manager.shutdown()


def test_what_cannot_be_averaged_is_kept_for_the_commit_to_tell():
    manager = Manager(MemoryStore(), 0, 1, tuning=QUICK)
    for tensor, operation in ((torch.ones(2, dtype=torch.int64), None), (torch.ones(2), ReduceOp.MAX)):
        manager.start_quorum()
        manager.allreduce(tensor, reduce_op=operation).wait()
        assert isinstance(manager.errored(), ConfigError)
        assert manager.should_commit() is False
    assert averaged(manager, torch.ones(2))
    manager.start_quorum()
    manager.allreduce(torch.ones(7)).wait()
    assert "7 values" in str(manager.errored())
    assert manager.should_commit() is False
    manager.shutdown()


def test_a_reported_error_stops_one_commit_and_the_round_is_made_up_for():
    """The others apply the round, so this replica must have it before the next one."""

    def body(rank: int) -> Any:
        model = small_model()
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0, model=model)
        for round_no in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank + round_no)
            manager.start_quorum()
            means = [tensor.clone() for tensor in weights(model)]
            for work in [manager.allreduce(tensor) for tensor in means]:
                work.wait()
            if rank == 1 and round_no == 1:
                manager.report_error(RuntimeError("cosmic ray"))
            if manager.should_commit():
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    parameter.data.copy_(mean)
        if rank == 1:  # one round behind, so far
            manager.start_quorum()
        manager.shutdown()
        return manager.current_step(), bits(weights(model))

    store = MemoryStore()
    first, second = side_by_side(2, body)
    assert first[0] == 4
    assert second[0] == 4
    assert second[1] == first[1]


def test_after_enough_failures_in_a_row_it_does_raise():
    manager = Manager(refusing("*/offer/*", times=None), 0, 1, tuning=QUICK, max_retries=2)
    assert [averaged(manager, torch.ones(2)) for _ in range(2)] == [False, False]
    with pytest.raises(RoundError, match=r"\b3 rounds\b") as caught:
        averaged(manager, torch.ones(2))
    assert isinstance(caught.value.__cause__, StoreRefused)
    manager.shutdown()


def test_a_replica_that_does_not_come_is_a_failed_round_not_a_hang():
    def body(rank: int) -> Any:
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=5.0 if rank == 0 else 60.0)
        assert averaged(manager, numbers(rank))
        if rank == 1:
            return None
        assert not averaged(manager, numbers(rank))
        error = manager.errored()
        manager.shutdown(wait=False)
        return error

    store = MemoryStore()
    error = side_by_side(2, body)[0]
    assert isinstance(error, QuorumLost)
    assert error.missing == (1,)


def test_a_round_that_is_tried_again_counts_what_was_announced_first():
    """The others may have used it already; writing other values over it would spoil the round for everybody."""
    failed, tries_again = threading.Event(), threading.Event()
    chunked = replace(QUICK, inline_bytes=0)

    def body(rank: int) -> Any:
        manager = Manager(
            watched if rank == 1 else store, rank, 2, tuning=chunked, timeout_s=5.0 if rank == 1 else 60.0
        )
        assert averaged(manager, numbers(rank))
        first, second = numbers(rank) + 1, numbers(rank) + 2
        if rank == 1:
            assert not averaged(manager, first)
            failed.set()
        else:
            tries_again.wait(30)  # not before: else the round may be over when rank 1 comes back
        for _ in range(20):
            if averaged(manager, tensor := second.clone()):
                break
        manager.shutdown()
        return tensor.tolist()

    store = MemoryStore()
    watched = FaultyStore(store)
    watched.before = lambda _verb, _key: tries_again.set() if failed.is_set() else None
    assert side_by_side(2, body) == [((numbers(0) + 2 + numbers(1) + 1) / 2).tolist()] * 2


def test_with_a_smaller_quorum_the_others_go_on():
    def body(rank: int) -> Any:
        manager = Manager(store, rank, 3, tuning=QUICK, timeout_s=60.0, quorum=atoll_quorum)
        assert averaged(manager, numbers(rank))
        if rank == 2:
            manager.shutdown()
            left.set()
            return None
        left.wait(30)
        tensor = numbers(rank)
        assert averaged(manager, tensor)
        found = manager.num_participants(), tensor.tolist()
        manager.shutdown()
        return found

    from atoll.rounds.quorum import at_least

    atoll_quorum, store, left = at_least(2, grace_s=30.0), MemoryStore(), threading.Event()
    assert side_by_side(3, body)[:2] == [(2, (numbers(0) + 5).tolist())] * 2


def test_a_process_whose_rank_was_taken_over_is_told_to_stop():
    store = MemoryStore()
    old = Manager(store, 0, 1, tuning=QUICK)
    assert averaged(old, torch.ones(2))
    new = Manager(store, 0, 1, tuning=QUICK)
    assert averaged(new, torch.ones(2))
    old.start_quorum()
    old.allreduce(torch.ones(2)).wait()
    with pytest.raises(Fenced):
        old.should_commit()
    for manager in (old, new):
        manager.shutdown(leave=False)


# ---- how it is made


def test_it_takes_what_knows_where_to_meet():
    uri = f"memory://{uuid.uuid4().hex}"
    made = [
        Manager(uri, 0, 1, run_id="a"),
        Manager(atoll.ReplicaContext("b", 0, 1, uri)),
        Manager(ObjectStoreAllReduce(uri, 0, 1, round_id="c")),
        Manager(ObjectStoreAllReduce(uri, 0, 1)),
    ]
    assert [(m.run_id, m.rank, m.world_size) for m in made] == [
        ("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("torchft", 0, 1),
    ]  # fmt: skip
    for manager in made:
        assert averaged(manager, torch.ones(1))
        manager.shutdown()


@pytest.mark.parametrize("arguments", [(), (0,), (2, 2), (-1, 2)])
def test_a_rank_that_cannot_be_is_refused(arguments):
    with pytest.raises(ConfigError, match="world_size"):
        Manager(MemoryStore(), *arguments)


def test_replicas_that_average_different_tensors_are_told_apart():
    store = MemoryStore()
    first, second = Manager(store, 0, 1, tuning=QUICK), Manager(store, 0, 1, tuning=QUICK)
    assert averaged(first, torch.ones(3))
    assert not averaged(second, torch.ones(4))
    assert isinstance(second.errored(), Conflict)
    for manager in (first, second):
        manager.shutdown(leave=False)


def test_the_state_is_not_read_in_the_middle_of_a_step():
    manager = Manager(MemoryStore(), 0, 1, tuning=QUICK)
    manager.register_state_dict_fn("mine", lambda _: None, lambda: {"x": 1})
    manager.disallow_state_dict_read()
    manager.disallow_state_dict_read()
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.append(manager._manager_state_dict()))
    reader.start()
    assert read == []
    manager.allow_state_dict_read()
    manager.allow_state_dict_read()
    reader.join(30)
    assert read == [{"user": {"mine": {"x": 1}}, "torchft": {"step": 0, "batches_committed": 0}}]
    with pytest.raises(ConfigError) as caught:
        manager.register_state_dict_fn("mine", lambda _: None, dict)
    assert caught.value.reason == "registered"


# ---- with torchft itself


def diloco(manager: Manager, model: nn.Module, **options: Any) -> Any:
    from torchft import local_sgd

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return inner, local_sgd.DiLoCo(manager, [model], inner, outer, **{"sync_every": 2, **options})


@pytest.mark.training
def test_buckets_that_would_lose_tensors_are_refused_and_a_needless_one_is_warned_of():
    with our_managers(1) as make:
        with pytest.raises(ConfigError) as caught:
            diloco(make(0), small_model(), use_bucketization=True, bucket_cap_mb=0.0001)
        assert caught.value.reason == "buckets"
        with pytest.warns(UserWarning, match="use_bucketization"):
            inner, loop = diloco(manager := make(0), model := small_model(), use_bucketization=True)
        with loop:
            for step in range(4):
                train_step(model, inner, 0, step)
        assert manager.current_step() == 2
        manager.shutdown()
    with our_managers(1) as make:
        inner, loop = diloco(manager := make(0), plain := small_model())
        with loop:
            for step in range(4):
                train_step(plain, inner, 0, step)
        manager.shutdown()
    assert bits(weights(plain)) == bits(weights(model)), "one bucket is averaged rightly"


@pytest.mark.training
def test_training_goes_on_after_a_failed_exchange_and_replicas_still_agree():
    """Replica 1 cannot publish one of its rounds: it goes back to the global weights, trains on and tries again."""
    shared = MemoryStore()

    def body(rank: int) -> Any:
        store = FaultyStore(shared)
        if rank == 1:
            store.fail("create", "*/rounds/0000000002/offer/*", error=StoreRefused)
        manager = Manager(store, rank, 2, tuning=QUICK, timeout_s=60.0)
        inner, loop = diloco(manager, model := small_model())
        commits, step = [], 0
        with loop:
            while manager.current_step() < 5:
                before = manager.current_step()
                train_step(model, inner, rank, step)
                step += 1
                if step % 2 == 0:
                    commits.append(manager.current_step() > before)
        agreed = [tensor.clone() for tensor in loop._fragments[0].original_parameters.values()]
        manager.shutdown()
        return commits, bits(agreed), bits(weights(model))

    first, second = side_by_side(2, body)
    assert first[0] == [True] * 5
    assert second[0] == [True, True, False, True, True, True]
    assert first[1:] == second[1:]


def test_a_manager_serves_one_diloco():
    with our_managers(1) as make:
        manager = make(0)
        diloco(manager, small_model())
        with pytest.raises(ConfigError) as caught:
            diloco(manager, small_model())
        assert caught.value.reason == "registered"
        manager.shutdown()


def test_a_torchft_that_is_not_known_is_refused():
    manager = Manager(MemoryStore(), 0, 1)
    with pytest.raises(ConfigError) as caught:
        manager.register_state_dict_fn("StreamingDiLoCoFragment_0", lambda _: None, dict)
    assert caught.value.reason == "version"
    assert "[torchft]" in (caught.value.hint or "")
