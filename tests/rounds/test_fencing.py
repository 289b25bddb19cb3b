from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, fault_free

from atoll.errors import Conflict, Fenced
from atoll.rounds.keys import RoundKeys
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock


def test_a_zombie_is_fenced_wherever_it_was_stopped_and_nothing_it_wrote_counts() -> None:
    for moment in range(3, 60):
        clock, store = FakeClock(), MemoryStore()
        toys = [Toy(rank, 3, clock, rounds=2) for rank in range(3)]
        simulation = Simulation(clock)
        for toy in toys:
            simulation.start(f"r{toy.rank}", toy.train(), store)
        simulation.before = lambda name, n, _, m=moment: "pause" if (name, n) == ("r1", m) else None
        simulation.run(until=lambda s=simulation: "r1" in s.paused or all(t.is_over for t in s.tasks.values()))
        if "r1" not in simulation.paused:
            break
        simulation.before = None
        simulation.start("new r1", toys[1].again(attempt=1).train(), store)
        # Strict: the others cannot go on without the newcomer, and they finish before the zombie wakes.
        simulation.run(until=lambda s=simulation: all(t.is_over for n, t in s.tasks.items() if n != "r1"))
        before = {key: bytes(store.get(key)) for key in store.list("") if "/commits/" in key}
        simulation.paused.clear()
        simulation.run()
        after = {key: bytes(store.get(key)) for key in store.list("") if "/commits/" in key}
        zombie = simulation.tasks.pop("r1")
        assert before == after
        assert set(simulation.results().values()) == {fault_free(toys)}
        # One that slept while it was only following may follow to the end; it may not lead.
        assert isinstance(zombie.error, Fenced) or zombie.value == fault_free(toys), f"stopped at {moment}"


def test_a_zombie_that_would_publish_is_told_before_it_writes() -> None:
    clock, store = FakeClock(), MemoryStore()
    old, new = Toy(0, 1, clock), Toy(0, 1, clock, attempt=1, rounds=0)
    simulation = Simulation(clock)
    simulation.start("old", old.train(), store)
    joined = RoundKeys("toy").claim(0, 0)
    simulation.run(until=lambda: joined in list(store.list(joined)))
    simulation.paused.add("old")
    simulation.start("new", new.train(), store)
    simulation.run()
    simulation.paused.clear()
    written = set(store.list(""))
    simulation.run()
    assert isinstance(simulation.tasks["old"].error, Fenced)
    assert set(store.list("")) == written


def test_an_offer_written_after_its_process_was_replaced_is_not_committed() -> None:
    """The zombie was stopped between looking at the claims and creating its offer."""
    clock, store = FakeClock(), MemoryStore()
    tuning = replace(FAST, claims_age_s=0.0)  # else a zombie replaced in the last two seconds may count once more
    toys = [Toy(rank, 3, clock, rounds=2, tuning=tuning, is_exact=True) for rank in range(3)]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    its_offer = RoundKeys("toy").offer(1, 1, 0)
    simulation.before = lambda name, _, op: "pause" if name == "r1" and getattr(op, "key", "") == its_offer else None
    simulation.run(until=lambda: "r1" in simulation.paused)
    simulation.before = None
    newcomer = toys[1].again(attempt=1)
    simulation.start("new r1", newcomer.train(), store)
    simulation.run(until=lambda: len(newcomer.history) == 1)
    simulation.paused = {"new r1"}
    simulation.run(until=lambda: its_offer in list(store.list(its_offer)))
    steps = iter(range(200))
    simulation.run(until=lambda: next(steps, None) is None)
    assert len(commits(store)) == 1, "only a dead incarnation has offered for rank 1"
    simulation.paused = set()
    simulation.run()
    zombie = simulation.tasks.pop("r1")
    assert isinstance(zombie.error, Fenced)
    assert set(simulation.results().values()) == {fault_free(toys)}
    assert [c.incarnation for c in commits(store)[1].contributions] == [0, 1, 0]
    assert [c.slot for c in commits(store)[1].contributions] == [0, 1, 0]


def test_a_process_that_was_built_differently_does_not_fence_the_right_one() -> None:
    clock, store = FakeClock(), MemoryStore()
    simulation = Simulation(clock)
    right = Toy(0, 1, clock, rounds=3)
    simulation.start("right", right.train(), store)
    simulation.run(until=lambda: len(right.history) == 1)
    simulation.start("wrong", Toy(0, 1, clock, size=99, attempt=5).train(), store)
    simulation.run()
    assert isinstance(simulation.tasks.pop("wrong").error, Conflict)
    assert set(simulation.results().values()) == {fault_free([right])}


def test_an_older_attempt_that_starts_late_is_refused() -> None:
    clock, store = FakeClock(), MemoryStore()
    simulation = Simulation(clock)
    simulation.start("new", Toy(0, 1, clock, attempt=2, rounds=0).train(), store)
    simulation.run()
    simulation.start("old", Toy(0, 1, clock, attempt=1, rounds=0).train(), store)
    simulation.run()
    assert isinstance(simulation.tasks["old"].error, Fenced)
    assert "attempt 2" in str(simulation.tasks["old"].error)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 3))
def test_two_processes_with_one_rank_give_one_update_in_each_round(seed: int, count: int) -> None:
    clock, store, rng = FakeClock(), MemoryStore(), random.Random(seed)
    toys = [Toy(rank, count, clock, rounds=3) for rank in range(count)]
    simulation = Simulation(clock, lambda n: rng.randrange(n))
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.start("twin", toys[1].again().train(), store)
    simulation.run()
    pair = [simulation.tasks.pop("r1"), simulation.tasks.pop("twin")]
    assert set(simulation.results().values()) == {fault_free(toys)}
    assert sum(task.error is None for task in pair) >= 1
    assert all(task.error is None or isinstance(task.error, Fenced) for task in pair)
    for commit in commits(store):
        assert commit.ranks == tuple(range(count))


@pytest.mark.parametrize("seed", range(5))
def test_many_incarnations_at_once_end_with_one_that_counts(seed: int) -> None:
    clock, store, rng = FakeClock(), MemoryStore(), random.Random(seed)
    simulation = Simulation(clock, lambda n: rng.randrange(n))
    for attempt in range(6):
        simulation.start(f"try{attempt}", Toy(0, 1, clock, attempt=attempt, rounds=2).train(), store)
    simulation.run()
    winners = [task for task in simulation.tasks.values() if task.error is None]
    assert winners
    assert {task.value for task in winners} == {fault_free([Toy(0, 1, clock, rounds=2)])}
