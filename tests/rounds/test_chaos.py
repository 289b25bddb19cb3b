"""Everything at once: random interleavings, kills with restarts, pauses, lost answers and spoiled reads.

Whatever happens, replicas that finish agree to the bit after every round they both saw, and what is in the store
verifies. Strict runs also end with the bits of the quiet run.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_simulator import Simulation
from rounds_toy import Toy, commits, fault_free

from atoll.errors import AtollError, Fenced
from atoll.rounds.quorum import Quorum, at_least
from atoll.rounds.verify import verify
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore


def chaos(seed: int, quorum: Quorum, count: int, rounds: int) -> tuple[list[Toy], Simulation, MemoryStore]:
    rng, clock, inner = random.Random(seed), FakeClock(), MemoryStore()
    store = FaultyStore(inner)
    for _ in range(rng.randrange(8)):
        nth, key = rng.randrange(1, 400), rng.choice(["*", "*/commits/*", "*/offer/*", "*/update/*", "*/mean/*"])
        match rng.randrange(3):
            case 0:
                store.fail(rng.choice(["get", "put", "create", "list"]), key, nth=nth, after_effect=rng.random() < 0.5)
            case 1:
                store.flip(key, bit=rng.randrange(1 << 14), nth=nth)
            case 2:
                store.truncate(key, nth=nth)
    simulation = Simulation(clock, lambda n: rng.randrange(n))
    toys: list[Toy] = []

    def start(rank: int, attempt: int) -> None:
        toy = Toy(
            rank, count, clock, rounds=rounds, attempt=attempt, quorum=quorum, size=2100, seed=-rank,
            snapshot_every=rng.choice([0, 2]) if quorum.is_strict else 2, is_retiring=rng.random() < 0.5, lease_s=30.0,
            is_exact=quorum.is_strict,
        )  # fmt: skip
        toys.append(toy)
        simulation.start(f"r{rank}", toy.train(), store)

    attempts = [0] * count
    for rank in range(count):
        start(rank, 0)
    doom = {(f"r{rng.randrange(count)}", rng.randrange(5, 300)): rng.choice(["kill", "kill after"]) for _ in range(4)}
    simulation.before = lambda name, number, _: doom.pop((name, number), None)
    while True:
        killed = len(simulation.killed)
        simulation.run(max_steps=60_000)
        if len(simulation.killed) == killed:
            return toys, simulation, inner
        rank = int(simulation.killed[-1][1:])
        attempts[rank] += 1
        clock.advance(rng.choice([0.0, 1.0, 20.0]))
        start(rank, attempts[rank])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_a_strict_run_ends_with_the_bits_of_the_quiet_run(seed: int, count: int) -> None:
    toys, simulation, store = chaos(seed, Quorum(deadline_s=900.0), count, rounds=3)
    assert set(simulation.results().values()) == {fault_free(toys[:count])}
    assert verify(store, "toy").difference is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 5))
def test_a_run_with_a_quorum_agrees_after_every_round(seed: int, count: int) -> None:
    _, simulation, store = chaos(seed, at_least(max(1, count - 1), grace_s=4.0, deadline_s=900.0), count, rounds=4)
    assert len(set(simulation.results().values())) == 1
    assert verify(store, "toy").difference is None
    assert all(len(commit.ranks) >= max(1, count - 1) for commit in commits(store))


@pytest.mark.parametrize("seed", range(20))
def test_pauses_of_any_length_do_not_break_agreement(seed: int) -> None:
    rng, clock, store = random.Random(seed), FakeClock(), MemoryStore()
    toys = [Toy(r, 4, clock, rounds=6, quorum=at_least(2, grace_s=2.0), snapshot_every=2, is_retiring=True, lease_s=5.0,
                size=40) for r in range(4)]  # fmt: skip
    simulation = Simulation(clock, lambda n: rng.randrange(n))
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    for _ in range(12):
        steps = iter(range(rng.randrange(5, 120)))
        simulation.run(until=lambda steps=steps: next(steps, None) is None)
        simulation.paused = {f"r{rank}" for rank in range(4) if rng.random() < 0.4}
        if len(simulation.paused) == 4:
            simulation.paused.pop()
        if rng.random() < 0.3:
            clock.advance(rng.choice([1.0, 10.0, 100.0]))
    simulation.paused = set()
    simulation.run()
    finals = set()
    for task in simulation.tasks.values():
        assert not isinstance(task.error, Fenced)
        if task.error is None:
            finals.add(task.value)
        else:
            assert isinstance(task.error, AtollError)
    assert len(finals) == 1
    assert verify(store, "toy").difference is None
