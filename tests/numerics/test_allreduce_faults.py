"""What goes wrong becomes an error that names it, in time; never a wrong mean."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from allreduce_ranks import bits, side_by_side, values

from atoll.errors import ConfigError, CorruptUpdate, QuorumLost, StoreRefused, StoreUnavailable
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore
from atoll.training.allreduce import ObjectStoreAllReduce, PartsDiffer

MEAN = bits((values(0) + values(1)) / 2)


def mean_of_two(ar):
    return bits(ar.allreduce(values(ar.rank), "w"))


def test_a_rank_that_never_comes_is_named_within_the_time_limit():
    clock = FakeClock()
    alone = ObjectStoreAllReduce(MemoryStore(), 1, 4, clock=clock)
    with pytest.raises(QuorumLost) as caught:
        alone.allreduce(tensor := values(1), "w")
    assert caught.value.missing == (0, 2, 3)
    assert isinstance(caught.value, TimeoutError)
    assert 1800 <= clock.monotonic() <= 1801
    assert bits(tensor) == bits(values(1))
    assert alone.counters.requests.total() < 2000, "waiting is cheap"


def test_a_rank_that_stops_half_way_is_named():
    def body(ar):
        ar.allreduce(values(ar.rank), "first")
        return ar.allreduce(values(ar.rank), "second") if ar.rank != 1 else None

    found = side_by_side(3, body, timeout_s=5.0)
    for error in (found[0], found[2]):
        assert isinstance(error, QuorumLost)
        assert isinstance(error, TimeoutError)
        assert error.missing == (1,)
        assert "`second`" in error.message


def test_a_rank_that_leaves_is_named_at_once():
    def body(ar):
        with ar:
            ar.allreduce(values(ar.rank), "first")
            if ar.rank == 1:
                raise RuntimeError("out of memory")
            ar.allreduce(values(ar.rank), "second")

    first, second = side_by_side(2, body, timeout_s=300.0)
    assert isinstance(second, RuntimeError)
    assert isinstance(first, QuorumLost)
    assert first.missing == (1,)
    assert not first.timed_out


def test_a_call_that_timed_out_can_be_made_again_and_gets_the_same_mean():
    store, is_waiting = MemoryStore(), threading.Event()

    def body(ar):
        ar.allreduce(torch.ones(1), "meet")
        if ar.rank == 1:
            is_waiting.wait(60)
            return bits(ar.allreduce(values(1), "w"))
        with pytest.raises(QuorumLost):
            ar.allreduce(values(0), "w")
        is_waiting.set()
        # What was given the first time stands: the others may have used it already.
        return bits(ar.allreduce(torch.zeros(64), "w"))

    quick, slow = (
        ObjectStoreAllReduce(store, r, 2, timeout_s=t, poll_interval_s=0.001) for r, t in ((0, 0.3), (1, 60))
    )
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, (quick, slow))) == [MEAN, MEAN]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: torch.zeros(4), "float32 [4]"),
        (lambda: torch.zeros(3, 1), "float32 [3, 1]"),
        (lambda: torch.zeros(3, dtype=torch.float64), "float64 [3]"),
    ],
)
def test_shapes_and_dtypes_that_differ_are_named_on_every_rank_and_the_next_mean_works(given, words):
    def body(ar):
        tensor = given() if ar.rank == 1 else torch.ones(3)
        with pytest.raises(PartsDiffer) as caught:
            ar.allreduce(tensor, "w")
        assert tensor.unique().numel() == 1, "nothing was written"
        ar.allreduce(torch.tensor(0.0), "everyone was there")
        assert ar.allreduce(torch.tensor(float(ar.rank)), "w").item() == 1.0
        return caught.value

    errors = side_by_side(3, body)
    assert [type(error) for error in errors] == [PartsDiffer] * 3, errors
    for error in errors:
        assert error.words[1].endswith(words)
        assert error.words[1] in error.message
        assert all(error.words[rank].endswith("float32 [3]") for rank in set(error.words) - {1})


def test_a_rank_that_counts_another_number_of_ranks_is_hinted_at():
    store, clock = MemoryStore(), FakeClock()
    with pytest.raises(QuorumLost):
        ObjectStoreAllReduce(store, 1, 3, clock=clock).allreduce(torch.ones(1), "w")
    with pytest.raises(QuorumLost, match=r"world_size 3\b"):
        ObjectStoreAllReduce(store, 0, 2, clock=clock).allreduce(torch.ones(1), "w")


@pytest.mark.parametrize("operation", ["get", "create", "list", "delete"])
@pytest.mark.parametrize("after_effect", [False, True], ids=["lost request", "lost answer"])
def test_a_store_that_fails_now_and_then_changes_nothing(operation, after_effect):
    store = FaultyStore(MemoryStore())
    for nth in (1, 3, 4, 7):
        store.fail(operation, nth=nth, after_effect=after_effect)

    def body(ar):
        return [bits(ar.allreduce(values(ar.rank), "w")) for _ in range(4)]

    assert side_by_side(2, body, store=store) == [[MEAN] * 4] * 2


def test_a_store_that_is_down_is_an_error_of_the_store_and_leaves_the_tensor_alone():
    clock = FakeClock()
    store = FaultyStore(MemoryStore(), clock=clock)
    store.fail("*", times=None)
    tensor = values(0)
    with pytest.raises(StoreUnavailable):
        ObjectStoreAllReduce(store, 0, 2, clock=clock, timeout_s=60.0).allreduce(tensor, "w")
    assert clock.monotonic() <= 60
    assert bits(tensor) == bits(values(0))


def test_missing_permission_is_told_at_once():
    clock = FakeClock()
    store = FaultyStore(MemoryStore(), clock=clock)
    store.fail("create", times=None, error=StoreRefused)
    with pytest.raises(StoreRefused):
        ObjectStoreAllReduce(store, 0, 2, clock=clock).allreduce(values(0), "w")
    assert clock.monotonic() == 0


@pytest.mark.parametrize("bit", [0, 37, 200, 900, 3000])
def test_a_bit_that_flips_on_the_way_is_noticed_and_read_again(bit):
    store = FaultyStore(MemoryStore())
    store.flip("*/parts/*", bit=bit, times=2)
    assert side_by_side(2, mean_of_two, store=store) == [MEAN, MEAN]


@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_a_part_that_stays_spoilt_is_never_averaged(harm):
    store = FaultyStore(MemoryStore())
    getattr(store, harm)("*/parts/*.00001", times=None)

    def body(ar):
        tensor = values(ar.rank)
        try:
            ar.allreduce(tensor, "w")
        except CorruptUpdate as exc:
            assert bits(tensor) == bits(values(ar.rank))
            return exc
        return bits(tensor)

    first, second = side_by_side(2, body, store=store)
    assert isinstance(first, CorruptUpdate)
    assert "00001" in first.message
    assert second == MEAN  # it needs no copy of its own part


def test_a_part_that_was_copied_from_elsewhere_is_refused():
    store = FaultyStore(MemoryStore())

    def body(ar):
        ar.allreduce(torch.full((64,), 7.0), "old")
        if ar.rank == 1:
            (old,) = (key for key in store.list() if key.endswith("old/0000000000.00001"))
            store.put(old.replace("/old/", "/new/"), store.get(old))
            return None
        return ar.allreduce(torch.full((64,), 1.0), "new")

    error = side_by_side(2, body, store=store)[0]
    assert isinstance(error, CorruptUpdate)
    assert error.check == "identity"
    assert error.rank == 1


def test_two_of_them_in_one_process_do_not_disturb_each_other():
    def body(ar):
        twin = ObjectStoreAllReduce(ar.store, ar.rank, 2, poll_interval_s=0.001, timeout_s=60.0)
        return [end.allreduce(torch.tensor(float(ar.rank + i)), "w").item() for i in range(2) for end in (ar, twin)]

    assert side_by_side(2, body) == [[0.5, 0.5, 1.5, 1.5]] * 2


def test_threads_of_a_rank_may_average_different_names_in_any_order():
    names = [f"n{i}" for i in range(6)]

    def body(ar):
        order = names if ar.rank == 0 else names[::-1]
        with ThreadPoolExecutor(len(names)) as pool:
            found = pool.map(lambda name: (name, ar.allreduce(torch.tensor(float(ar.rank)), name).item()), order)
            return dict(found)

    assert side_by_side(2, body) == [dict.fromkeys(names, 0.5)] * 2


def test_rounds_with_ids_of_their_own_are_apart():
    store = MemoryStore()

    def body(round_id):
        def on_rank(ar):
            with ar:
                return ar.allreduce(torch.tensor(float(ar.rank + round_id)), "w").item()

        return side_by_side(2, on_rank, store=store, round_id=round_id)

    assert [body(round_id) for round_id in (0, 1, 0)] == [[0.5, 0.5], [1.5, 1.5], [0.5, 0.5]]
    assert len(list(store.list())) == 2, "one mark for each id"


def test_what_was_closed_is_not_used_again():
    ar = ObjectStoreAllReduce(MemoryStore(), 0, 2)
    ar.close()
    ar.close()
    with pytest.raises(ConfigError) as caught:
        ar.allreduce(torch.ones(1), "w")
    assert caught.value.reason == "closed"
