from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, events, fault_free, run_all

from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore

orders = st.lists(st.integers(0, 30), min_size=1, max_size=400)


def in_order(numbers: list[int]):
    """A scheduler that follows the numbers, again and again."""
    position = iter(range(10**9))
    return lambda _: numbers[next(position) % len(numbers)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_replicas_end_with_the_bits_of_the_plain_formula(count: int) -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, count, clock) for rank in range(count)]
    assert set(run_all(toys, store).values()) == {fault_free(toys)}
    assert {commit.mode for commit in commits(store)} == {"whole" if count <= 2 else "scatter"}


@settings(max_examples=40, deadline=None)
@given(orders, st.integers(2, 5), st.integers(1, 5000))
def test_any_interleaving_of_requests_gives_the_same_bits(order: list[int], count: int, size: int) -> None:
    clock = FakeClock()
    toys = [Toy(rank, count, clock, size=size + 7, rounds=2) for rank in range(count)]
    assert set(run_all(toys, MemoryStore(), in_order(order)).values()) == {fault_free(toys)}
    assert len({tuple(toy.history) for toy in toys}) == 1


@pytest.mark.parametrize("changes", [{}, {"inline_bytes": 1 << 20}, {"latency_s": 10.0}, {"list_from": 1}])
def test_the_way_of_exchanging_does_not_change_the_bits(changes: dict[str, float]) -> None:
    clock = FakeClock()
    toys = [Toy(rank, 4, clock, tuning=replace(FAST, **changes)) for rank in range(4)]
    assert set(run_all(toys, MemoryStore()).values()) == {fault_free(toys)}


def test_lossy_codecs_still_give_every_replica_the_same_bits() -> None:
    clock = FakeClock()
    for size in (2, 4):
        toys = [Toy(rank, size, clock, codec="bf16", run_id=f"n{size}") for rank in range(size)]
        assert len(set(run_all(toys, MemoryStore()).values())) == 1


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_replicas_that_expect_different_ways_of_exchanging_end_with_the_same_bits(codec: str) -> None:
    """Tuning need not be equal everywhere, so whoever commits may choose another way than others had prepared for."""
    clock, store = FakeClock(), MemoryStore()
    whole = replace(FAST, bandwidth_bytes_s=1e12, latency_s=1.0)
    toys = [Toy(rank, 3, clock, rounds=5, codec=codec, size=9000) for rank in range(3)]
    for toy in toys:
        toy.tuning = whole if toy.rank == 1 else replace(FAST, skip_upload=False)
    assert len(set(run_all(toys, store).values())) == 1
    assert clock.monotonic() < FAST.patience_s, "means that were foreseen in another way are published all the same"


def test_replicas_with_different_seeds_start_from_the_first_ones_weights() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 2, clock, seed=10 * rank, rounds=0) for rank in range(2)]
    finals = run_all(toys, store)
    assert finals["r0"] == finals["r1"] == b"".join(toys[0].initial())


def test_requests_and_bytes_of_a_round_match_the_formula() -> None:
    clock, store = FakeClock(), FaultyStore(MemoryStore())
    count, chunks, rounds = 4, 40, 5
    size = 1024 * chunks
    toys = [Toy(rank, count, clock, size=size, rounds=0) for rank in range(count)]
    run_all(toys, store)
    before = store.traffic.bytes_down["get"], sum(store.traffic.bytes_up.values()), dict(store.traffic.requests)
    toys = [toy.again(rounds=rounds) for toy in toys]
    run_all(toys, store)
    down = store.traffic.bytes_down["get"] - before[0]
    up = sum(store.traffic.bytes_up.values()) - before[1]
    ideal_up = rounds * 4 * size * (count + 1)
    ideal_down = rounds * 4 * size * 2 * (count - 1)
    assert up / ideal_up < 1.13  # small chunks: a 4 KiB chunk has a header of 350 bytes
    assert down / ideal_down < 1.25
    puts = store.traffic.requests["put"] - before[2]["put"]
    assert puts <= rounds * (count * chunks + chunks + 2)


def test_the_winner_tells_of_each_round() -> None:
    clock, store = FakeClock(), MemoryStore()
    run_all([Toy(rank, 3, clock) for rank in range(3)], store)
    told = [event for event in events(store) if event["event"] == "round_committed"]
    assert [event["round"] for event in told] == [0, 1, 2]
    assert all(event["ranks"] == [0, 1, 2] for event in told)


@pytest.mark.parametrize("seed", range(20))
def test_when_several_propose_initial_weights_all_take_the_first(seed: int) -> None:
    rng, clock, store = random.Random(seed), FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, rounds=0, tuning=replace(FAST, init_patience_s=0.0)) for rank in range(3)]
    finals = set(run_all(toys, store, lambda n: rng.randrange(n)).values())
    assert len(finals) == 1
    assert finals <= {b"".join(toy.initial()) for toy in toys}


@pytest.mark.parametrize("seed", range(8))
def test_when_several_choose_a_chunk_size_all_take_the_first(seed: int) -> None:
    """One of them is near the store and wants few chunks; the others are not, and want more."""
    rng, clock, inner = random.Random(seed), FakeClock(), MemoryStore()
    far = FaultyStore(inner, clock=clock)
    far.delay(0.01, "get")
    short_timeout = replace(FAST, init_patience_s=0.0)
    toys = [Toy(rank, 3, clock, size=5_000_000, chunk=0, tuning=short_timeout) for rank in range(3)]
    protocols = [toy.protocol() for toy in toys]
    simulation = Simulation(clock, lambda n: rng.randrange(n))
    for toy, protocol in zip(toys, protocols, strict=True):
        simulation.start(f"r{toy.rank}", protocol.join(toy.initial()), inner if toy.rank == 0 else far)
    simulation.run()
    simulation.results()
    assert len({protocol.member.agreement.chunk for protocol in protocols}) == 1
