from __future__ import annotations

import random

import pytest
from rounds_simulator import Simulation
from rounds_toy import Toy, fault_free

from atoll.rounds.io import Create, Get, List, Op, Open, Put, Read
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock


def run_with_kills(toys: list[Toy], victim: str, moments: dict[int, str], choose=None) -> dict[str, bytes]:
    """Run to the end, killing the victim at those of its requests; a new attempt starts each time."""
    clock, store = toys[0].clock, MemoryStore()
    simulation = Simulation(clock, choose)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.before = lambda name, number, op: moments.get(number) if name == victim else None
    attempt = 0
    while True:
        simulation.run()
        if victim in simulation.tasks:
            return simulation.results()
        attempt += 1
        clock.advance(1.0)
        simulation.start(victim, toys[int(victim[1:])].again(attempt=attempt).train(), store)


def requests_of(victim: str, toys: list[Toy]) -> list[Op]:
    made: list[Op] = []
    simulation = Simulation(toys[0].clock)
    simulation.before = lambda name, _, op: made.append(op) if name == victim else None
    store = MemoryStore()
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    return made


def toys_for(count: int, **options: object) -> list[Toy]:
    clock = FakeClock()
    options = {"rounds": 2, "snapshot_every": 1, "is_retiring": True, "is_exact": True, **options}
    return [Toy(rank, count, clock, seed=-rank, **options) for rank in range(count)]  # whoever starts, the same start


@pytest.mark.parametrize("victim", ["r0", "r1"])
@pytest.mark.parametrize("how", ["kill", "kill after"])
def test_killed_at_any_request_and_restarted_ends_with_the_bits_of_the_quiet_run(victim: str, how: str) -> None:
    wanted = fault_free(toys_for(3))
    requests = requests_of(victim, toys_for(3))
    assert {Get, Open, Read, Put, Create, List} <= set(map(type, requests))
    for moment in range(len(requests)):
        finals = run_with_kills(toys_for(3), victim, {moment: how})
        assert set(finals.values()) == {wanted}, f"{how} of {victim} at request {moment}"


def test_killed_again_and_again_still_ends_right() -> None:
    for seed in range(15):
        rng = random.Random(seed)
        toys = toys_for(rng.choice([2, 3]))
        moments = {rng.randrange(10, 250): rng.choice(["kill", "kill after"]) for _ in range(6)}
        finals = run_with_kills(toys, "r1", moments, lambda n, rng=rng: rng.randrange(n))
        assert set(finals.values()) == {fault_free(toys)}, f"seed {seed}"


def test_all_killed_and_resumed_ends_right() -> None:
    for moment in range(15, 200, 23):
        toys = toys_for(3)
        clock, store, simulation = toys[0].clock, MemoryStore(), Simulation(toys[0].clock)
        for toy in toys:
            simulation.start(f"r{toy.rank}", toy.train(), store)
        simulation.run(until=lambda s=simulation, m=moment: sum(s.requests.values()) >= m)
        again = Simulation(clock)
        for toy in toys:  # the same attempt number: a person started the same command once more
            again.start(f"r{toy.rank}", toy.again().train(), store)
        again.run()
        assert set(again.results().values()) == {fault_free(toys)}
