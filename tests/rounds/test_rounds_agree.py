from __future__ import annotations

import pytest

from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore
from rounds_simulator import Simulation
from rounds_toy import Toy, fault_free


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_replicas_end_with_the_bits_of_the_plain_formula(count: int) -> None:
    clock, store = FakeClock(), FaultyStore(MemoryStore())
    toys = [Toy(rank, count, clock) for rank in range(count)]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}
    print(count, store.traffic, clock.monotonic())
