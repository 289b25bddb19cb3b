"""Chunks that a rank kept to itself, when what it expected does not happen: another party, its end, a second try."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from rounds_records import ended, launched
from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, events, run_all, update_of

from atoll.errors import LeftBehind, QuorumLost
from atoll.rounds.client import RoundSteps
from atoll.rounds.io import Create, Op, Put
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector
from atoll.rounds.metrics import waiting_for
from atoll.rounds.quorum import Quorum, at_least, strict
from atoll.rounds.verify import verify
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock

STRICT, LOOSE = strict(deadline_s=200.0), at_least(2, grace_s=5.0, deadline_s=200.0)


def not_finite(round_no: int, update: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.full_like(update, np.nan) if round_no == 2 else update


def killed_before_it_released(quorum: Quorum, store: MemoryStore) -> tuple[Simulation, list[Toy]]:
    """Round 2 goes on without rank 1, so others need what rank 0 kept; it dies as it is about to write that."""
    clock = FakeClock()
    few = replace(FAST, connections=3)
    toys = [
        Toy(r, 4, clock, rounds=4, quorum=quorum, size=9000, is_exact=quorum.is_strict, tuning=few) for r in range(4)
    ]
    toys[1].spoil = not_finite
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)

    def is_released(op: Op) -> bool:
        is_own = isinstance(op, Put) and "/0000000002/update/00000" in op.key
        return is_own and any(commit.round_no == 2 for commit in commits(store))

    simulation.before = lambda name, _, op: "kill" if name == "r0" and is_released(op) else None
    simulation.run()
    assert simulation.killed == ["r0"]
    simulation.before = None
    return simulation, toys


def test_a_strict_run_has_what_was_kept_from_the_replica_that_is_started_again() -> None:
    store = MemoryStore()
    simulation, toys = killed_before_it_released(STRICT, store)
    simulation.start("r0", toys[0].again(attempt=1).train(), store)
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    report = verify(store, "toy")
    assert (report.difference, report.left_out) == (None, 0)


def killed_before_its_mean(store: MemoryStore) -> tuple[Simulation, list[Toy]]:
    """Every replica is needed, and rank 1 dies with chunks that only it has, when the others need no more to commit."""
    clock = FakeClock()
    few = replace(FAST, connections=3)
    toys = [Toy(r, 3, clock, rounds=4, quorum=STRICT, size=60 * 1024, is_exact=True, tuning=few) for r in range(3)]
    return _killed_at_a_mean(toys, 1, store), toys


def _killed_at_a_mean(toys: list[Toy], rank: int, store: MemoryStore) -> Simulation:
    """All train until this rank, whose offer of round 2 is there, is about to publish a mean of it, and dies."""
    simulation = Simulation(toys[0].clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)

    def is_late_mean(op: Op) -> bool:
        is_mean = isinstance(op, Create) and "/0000000002/mean/" in op.key
        return is_mean and bool(list(store.list(RoundKeys("toy").offer(2, rank, 0))))

    simulation.before = lambda name, _, op: "kill" if name == f"r{rank}" and is_late_mean(op) else None
    simulation.run()
    assert simulation.killed == [f"r{rank}"]
    simulation.before = None
    return simulation


def waits(store: MemoryStore) -> list[dict[str, Any]]:
    return [event for event in events(store) if event["event"] == "waiting"]


def test_who_waits_for_what_a_dead_replica_kept_says_for_whom_and_until_when() -> None:
    store = MemoryStore()
    simulation, toys = killed_before_its_mean(store)
    clock, died_at = simulation.clock, simulation.clock.time()
    assert waits(store) == []
    simulation.run(until=lambda: clock.time() - died_at > 30.0)
    told = waiting_for(store, "toy", 3)
    assert told is not None
    assert told.outlook is not None
    assert (told.round_no, told.arrived, told.missing, told.needed) == (2, (0, 2), (1,), 1)
    assert not told.outlook.goes_on
    assert told.outlook.until - died_at == pytest.approx(STRICT.deadline_s, abs=1.0)
    assert sorted(event["by"] for event in waits(store)) == [0, 2], "once"
    simulation.start("r1", toys[1].again(attempt=1).train(), store)
    simulation.run(until=lambda: len(commits(store)) > 3 or any(event["for"] == [] for event in waits(store)))
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert waiting_for(store, "toy", 3) is None
    assert [event["for"] for event in waits(store)] == [[1], [], [1], []]


def test_who_waits_for_parts_that_a_dead_replica_was_to_write_says_for_whom() -> None:
    store = MemoryStore()
    simulation, _ = killed_before_it_released(STRICT, store)
    clock, died_at = simulation.clock, simulation.clock.time()
    simulation.run(until=lambda: clock.time() - died_at > 60.0)
    told = waiting_for(store, "toy", 4)
    assert told is not None
    assert told.missing == (0,)


def test_a_strict_run_ends_when_a_dead_replica_has_the_only_copy_of_its_chunks() -> None:
    store = launched(3, on_dead_after_s=60.0)
    simulation, _ = killed_before_its_mean(store)
    died_at = simulation.clock.time()
    ended(store, 1)
    simulation.run()
    for rank in (0, 2):
        error = simulation.tasks[f"r{rank}"].error
        assert isinstance(error, QuorumLost)
        assert (error.reason, error.dead, error.round_no) == ("dead", (1,), 2)
    assert 60.0 <= simulation.clock.time() - died_at < 100.0
    assert [event["for"] for event in waits(store)] == [[1], [1]], "once by each replica"
    assert waits(store)[-1]["until"] - died_at == pytest.approx(60.0, abs=15.0)


def test_a_strict_run_ends_when_a_dead_replica_did_not_upload_parts_that_it_kept() -> None:
    store = launched(4, on_dead_after_s=60.0)
    simulation, _ = killed_before_it_released(STRICT, store)
    ended(store, 0)
    simulation.run()
    for rank in (1, 2, 3):
        error = simulation.tasks[f"r{rank}"].error
        assert isinstance(error, QuorumLost)
        assert (error.dead, error.round_no) == ((0,), 2)


def test_a_round_in_which_nobody_has_to_wait_long_says_nothing() -> None:
    clock, store = FakeClock(), MemoryStore()
    run_all([Toy(rank, 3, clock, rounds=4, quorum=STRICT, size=9000) for rank in range(3)], store)
    assert waits(store) == []
    assert waiting_for(store, "toy", 3) is None


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_run_with_a_quorum_goes_on_without_what_was_kept(is_started_again: bool) -> None:
    store = MemoryStore()
    simulation, toys = killed_before_it_released(LOOSE, store)
    if is_started_again:
        simulation.start("r0", toys[0].again(attempt=1).train(), store)
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    report = verify(store, "toy")
    assert report.difference is None
    assert report.left_out > 0


def test_a_dead_owner_is_waited_for_once_and_not_with_each_of_its_chunks() -> None:
    clock, store = FakeClock(), MemoryStore()
    few = replace(FAST, connections=3, skip_upload=False)
    toys = [Toy(r, 4, clock, rounds=4, quorum=LOOSE, size=60 * 1024, tuning=few) for r in range(4)]
    simulation = _killed_at_a_mean(toys, 0, store)
    means = store.list(RoundKeys("toy").round_prefix(2) + "mean/")
    missing = 15 - sum(int(key.rpartition("/")[2]) % 4 == 0 for key in means)
    began = clock.monotonic()
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert missing > 6
    waits = FAST.patience_s + 2 * LOOSE.grace_s  # for its means; then for its offer of the last round
    assert clock.monotonic() - began < 2 * waits


@dataclass
class Stubborn(Toy):
    """Tries a round that failed again, with what it has trained by then."""

    tries: int = 0

    def advance(self, protocol: RoundSteps, round_no: int) -> Generator[Op, Any, int]:
        update, weight = update_of(self.rank, round_no, self.state)
        mean = np.empty_like(self.state)
        try:
            source = ArrayVector([update * np.float32(1 + self.tries)])
            yield from protocol.exchange(round_no, source, ArrayVector([mean]), weight=weight + self.more * self.tries)
        except QuorumLost:
            self.tries += 1
            return round_no
        self.apply(mean)
        return round_no + 1

    more: float = 0.0


@pytest.mark.parametrize("more", [0.0, 5.0])
@pytest.mark.parametrize("quorum", [STRICT, at_least(3, grace_s=5.0, deadline_s=60.0)])
def test_a_round_tried_again_leaves_what_was_announced_as_it_is(quorum: Quorum, more: float) -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Stubborn(rank, 3, clock, rounds=4, quorum=quorum, more=more) for rank in range(3)]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    is_update = lambda op: isinstance(op, Put) and "/0000000002/update/" in op.key  # noqa: E731
    simulation.before = lambda name, _, op: "pause" if name == "r2" and is_update(op) else None
    simulation.run(until=lambda: min(toys[0].tries, toys[1].tries) > 0)
    simulation.paused, simulation.before = set(), None
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert [toy.tries for toy in toys] == [1, 1, 0]
    assert verify(store, "toy").difference is None


def test_a_replica_that_comes_back_never_makes_a_second_mean_of_a_round() -> None:
    """Rank 0 takes in rounds it averaged a chunk of before it died, while their means are being retired."""
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, rounds=3, quorum=LOOSE) for rank in range(3)]
    run_all(toys, store)
    for key in list(store.list(RoundKeys("toy").rounds_prefix() + "0000000001/mean/")):
        store.delete(key)
    simulation = Simulation(clock)
    simulation.start("r0", toys[0].again(attempt=1).train(), store)
    is_mean = lambda op: isinstance(op, Create) and "/0000000001/mean/" in op.key  # noqa: E731
    simulation.before = lambda name, _, op: retire_parts(store) if is_mean(op) else None
    simulation.run()
    assert isinstance(simulation.tasks["r0"].error, LeftBehind)
    assert not list(store.list(RoundKeys("toy").rounds_prefix() + "0000000001/mean/"))


def retire_parts(store: MemoryStore) -> None:
    for key in list(store.list(RoundKeys("toy").rounds_prefix() + "0000000001/update/")):
        store.delete(key)
