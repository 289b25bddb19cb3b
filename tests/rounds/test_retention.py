from __future__ import annotations

from dataclasses import replace

from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, run_all

from atoll.rounds.io import Create
from atoll.rounds.keys import RoundKeys
from atoll.rounds.quorum import at_least
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore


def test_a_thousand_rounds_keep_a_bounded_number_of_objects() -> None:
    clock, store = FakeClock(), FaultyStore(MemoryStore())
    tuning = replace(FAST, inline_bytes=1 << 20)
    toys = [
        Toy(rank, 2, clock, size=20, rounds=1000, snapshot_every=10, is_retiring=True, tuning=tuning)
        for rank in range(2)
    ]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    most = 0
    for stop in range(50, 1050, 50):
        simulation.run(until=lambda stop=stop: len(toys[0].history) >= stop)
        most = max(most, len(list(store.inner.list(""))))
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert len(toys[0].history) == 1000
    assert most < 150
    assert store.traffic.requests["list"] < 1000 * 12


def test_what_a_slow_live_replica_has_not_acknowledged_is_kept() -> None:
    clock, store = FakeClock(), MemoryStore()
    policy = at_least(2, grace_s=1.0)
    toys = [
        Toy(rank, 3, clock, quorum=policy, rounds=9, snapshot_every=2, is_retiring=True, size=20) for rank in range(3)
    ]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run(until=lambda: len(toys[2].history) >= 4)
    simulation.paused.add("r2")
    simulation.run(until=lambda: len(toys[0].history) >= 8)
    assert min(commit.round_no for commit in commits(store)) <= 4
    simulation.paused.clear()
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert len(toys[2].history) == 9, "it could replay every round; no snapshot was needed"


def test_a_replica_that_was_away_past_its_lease_comes_back_by_a_snapshot() -> None:
    clock, store = FakeClock(), MemoryStore()
    policy = at_least(2, grace_s=1.0)
    toys = [
        Toy(
            rank, 3, clock, quorum=policy, rounds=30, snapshot_every=2, is_retiring=True, size=20, lease_s=3.0
        )
        for rank in range(3)
    ]  # fmt: skip
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run(until=lambda: len(toys[2].history) >= 4)
    simulation.paused.add("r2")
    simulation.run(until=lambda: len(toys[0].history) >= 12)
    clock.advance(10.0)
    simulation.run(until=lambda: len(toys[0].history) >= 20)
    assert min(commit.round_no for commit in commits(store)) > 4
    simulation.paused.clear()
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert len(toys[2].history) < 30


def test_a_crash_while_retiring_is_harmless() -> None:
    for moment in range(12):
        clock, store = FakeClock(), FaultyStore(MemoryStore())
        toys = [Toy(rank, 2, clock, rounds=6, snapshot_every=1, is_retiring=True, size=20) for rank in range(2)]
        simulation = Simulation(clock)
        for toy in toys:
            simulation.start(f"r{toy.rank}", toy.train(), store)
        deletes = iter(range(10**6))

        def dies(name: str, _: int, op: object, deletes=deletes, moment=moment) -> str | None:
            if name == "r0" and type(op).__name__ == "Delete" and next(deletes) == moment:
                return "kill"
            return None

        simulation.before = dies
        simulation.run()
        assert "r0" in simulation.killed
        simulation.start("r0", toys[0].again(attempt=1).train(), store)
        simulation.run()
        assert len(set(simulation.results().values())) == 1
        quiet = [Toy(rank, 2, FakeClock(), rounds=6, size=20) for rank in range(2)]
        assert simulation.results()["r0"] == run_all(quiet, MemoryStore())["r0"]


def test_a_commit_made_where_an_old_one_was_retired_is_taken_back() -> None:
    """A replica was stopped just before it created a commit, for so long that the round came and went without it."""
    clock, store = FakeClock(), MemoryStore()
    toys = [
        Toy(
            rank, 2, clock, quorum=at_least(1, grace_s=1.0), rounds=12, snapshot_every=2, is_retiring=True, size=20,
            lease_s=3.0, tuning=replace(FAST, turn_s=0.0),
        )
        for rank in range(2)
    ]  # fmt: skip
    simulation = Simulation(clock)
    for toy in reversed(toys):
        simulation.start(f"r{toy.rank}", toy.train(), store)
    its_commit = RoundKeys("toy").commit(2)
    simulation.before = lambda name, _, op: (
        "pause" if name == "r1" and isinstance(op, Create) and op.key == its_commit else None
    )
    simulation.run(until=lambda: "r1" in simulation.paused)
    simulation.run(until=lambda: len(toys[0].history) >= 8)
    clock.advance(10.0)
    simulation.run()
    assert simulation.tasks["r0"].is_over
    assert its_commit not in list(store.list(its_commit))
    simulation.before = None
    simulation.paused = set()
    simulation.run()
    assert its_commit not in list(store.list(its_commit))
    assert len(set(simulation.results().values())) == 1
    assert len(toys[1].history) < 12


def test_a_replica_whose_round_is_gone_while_it_waits_finds_out_and_catches_up() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [
        Toy(rank, 3, clock, quorum=at_least(2, grace_s=1.0), rounds=14, snapshot_every=2, is_retiring=True, size=20,
            lease_s=3.0)
        for rank in range(3)
    ]  # fmt: skip
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    # Stopped after it saw that round 2 was not committed, before it wrote anything.
    its_update = RoundKeys("toy").update(2, 2, 0, 0)
    simulation.before = lambda name, _, op: "pause" if name == "r2" and getattr(op, "key", "") == its_update else None
    simulation.run(until=lambda: len(toys[0].history) >= 8)
    clock.advance(10.0)
    simulation.run(until=lambda: len(toys[0].history) >= 12)
    simulation.before = None
    simulation.paused = set()
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert len(toys[2].history) < 14
