from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rounds_simulator import Simulation
from rounds_toy import Toy, commits, events, fault_free, run_all

from atoll.errors import Conflict, CorruptUpdate, LeftBehind, QuorumLost, RoundError
from atoll.rounds import quorum
from atoll.rounds.catch_up import LoadedSnapshot
from atoll.rounds.client import RoundSteps
from atoll.rounds.io import List
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector
from atoll.rounds.metrics import Outlook, Waiting, waiting_for
from atoll.rounds.quorum import Quorum, adaptive, at_least, strict
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock


def start(simulation: Simulation, toys: list[Toy], store: MemoryStore) -> None:
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)


def test_too_few_updates_end_with_an_error_that_names_the_ranks() -> None:
    clock, store = FakeClock(), MemoryStore()
    for policy in (strict(deadline_s=60.0), at_least(3, deadline_s=60.0)):
        toys = [Toy(rank, 4, clock, quorum=policy, run_id=f"run{policy.least}") for rank in (0, 3)]
        simulation = Simulation(clock)
        start(simulation, toys, store)
        began = clock.monotonic()
        simulation.run()
        for task in simulation.tasks.values():
            assert isinstance(task.error, QuorumLost)
            assert task.error.missing == (1, 2)
            assert "1, 2" in str(task.error)
        assert clock.monotonic() - began <= 65.0


def test_a_dead_rank_costs_the_grace_and_then_nothing() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 4, clock, quorum=at_least(3, grace_s=10.0), rounds=6) for rank in (0, 1, 2)]
    assert len(set(run_all(toys, store).values())) == 1
    assert all(commit.ranks == (0, 1, 2) for commit in commits(store))
    # The first rounds wait for rank 3; then it counts as away until it shows up.
    assert 20.0 <= clock.monotonic() <= 26.0
    late = [event for event in events(store) if event["event"] == "rank_late"]
    assert {event["rank"] for event in late} == {3}


@pytest.mark.parametrize(
    ("policy", "outlook"),
    [
        (strict(deadline_s=60.0), Outlook(60.0, False, None)),
        (at_least(4, deadline_s=70.0), Outlook(70.0, False, 4)),
        (at_least(2, grace_s=30.0), Outlook(30.0, True, 2)),
    ],
)
def test_who_waits_says_how_the_wait_will_end(policy: Quorum, outlook: Outlook) -> None:
    clock, store = FakeClock(), MemoryStore()
    simulation = Simulation(clock)
    start(simulation, [Toy(rank, 4, clock, quorum=policy) for rank in (0, 1)], store)
    began = clock.time()
    simulation.run(until=lambda: clock.time() - began > 20.0)
    told = waiting_for(store, "toy", 4)
    assert told is not None
    assert told.outlook is not None
    assert replace(told, outlook=None) == Waiting(0, (0, 1), (2, 3))
    assert replace(told.outlook, until=0.0) == replace(outlook, until=0.0)
    assert told.outlook.until - began == pytest.approx(outlook.until, abs=1.0)
    assert told.needed == (0 if outlook.goes_on else 2)
    said = [event["by"] for event in events(store) if event["event"] == "waiting"]
    assert sorted(said) == [0, 1], "once"


def test_a_short_wait_is_not_worth_a_word() -> None:
    clock, store = FakeClock(), MemoryStore()
    run_all([Toy(rank, 3, clock, quorum=at_least(2, grace_s=4.0)) for rank in (0, 1)], store)
    assert [event for event in events(store) if event["event"] == "waiting"] == []


def test_a_joiner_at_round_k_catches_up_and_is_counted_from_the_next_round() -> None:
    clock, store = FakeClock(), MemoryStore()
    policy = at_least(2, grace_s=5.0)
    toys = [Toy(rank, 3, clock, quorum=policy, rounds=9, snapshot_every=2, is_retiring=True) for rank in range(3)]
    simulation = Simulation(clock)
    start(simulation, toys[:2], store)
    simulation.run(until=lambda: any(commit.round_no == 4 for commit in commits(store)))
    start(simulation, toys[2:], store)
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert commits(store)[-1].ranks == (0, 1, 2)
    assert toys[2].history == toys[0].history[-len(toys[2].history) :]


def test_a_rank_beyond_the_world_may_join_and_is_counted() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 2, clock, quorum=at_least(2, grace_s=5.0), rounds=6) for rank in range(2)]
    extra = Toy(2, 3, clock, quorum=at_least(2, grace_s=5.0), rounds=6)
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run(until=lambda: any(commit.round_no == 1 for commit in commits(store)))
    start(simulation, [extra], store)
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert commits(store)[-1].ranks == (0, 1, 2)


def test_a_straggler_is_left_out_and_still_ends_with_the_same_bits() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 4, clock, quorum=at_least(3, grace_s=2.0), rounds=5) for rank in range(4)]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.before = lambda name, n, _: "pause" if (name, n) == ("r2", 25) else None
    simulation.run(until=lambda: any(commit.round_no == 2 for commit in commits(store)))
    simulation.before = None
    simulation.paused.clear()
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert any(2 not in commit.ranks for commit in commits(store))


def test_a_commit_names_the_ranks_that_were_decided_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that leaves out a rank whose update has arrived holds: the record, the mean and the wait obey it."""
    clock, store = FakeClock(), MemoryStore()
    decide, left_out = quorum.decide, []

    def without_rank_1(*args: Any, **seen: Any) -> quorum.Decision:
        decision = decide(*args, **seen)
        if not isinstance(decision, quorum.CommitDecision):
            return decision
        left_out.append(1 in seen["arrived"])
        return quorum.CommitDecision(tuple(rank for rank in decision.ranks if rank != 1))

    monkeypatch.setattr(quorum, "decide", without_rank_1)
    toys = [Toy(rank, 3, clock, quorum=at_least(3)) for rank in range(3)]
    assert len(set(run_all(toys, store).values())) == 1
    assert any(left_out)
    assert [commit.ranks for commit in commits(store)] == [(0, 2)] * 3
    assert {event["rank"] for event in events(store) if event["event"] == "rank_late"} == {1}


@pytest.mark.parametrize("quorum", [Quorum(deadline_s=600.0), at_least(1, grace_s=100.0)])
def test_a_replica_that_left_in_an_earlier_launch_is_waited_for(quorum: Quorum) -> None:
    clock, store = FakeClock(), MemoryStore()

    def run_and_leave(toy: Toy):
        protocol = toy.protocol()
        yield from protocol.join(toy.initial())
        yield from protocol.leave()

    toys = [Toy(rank, 2, clock, quorum=quorum) for rank in range(2)]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"launch 1 of {toy.rank}", run_and_leave(toy), store)
    simulation.run()
    resumed = [toy.again(launch=2, rounds_of=1) for toy in toys]
    simulation.start("r0", resumed[0].train(), store)
    simulation.run(until=lambda: clock.monotonic() > 50.0)
    assert commits(store) == []
    simulation.start("r1", resumed[1].train(), store)
    simulation.run()
    assert {name: task.value for name, task in simulation.tasks.items() if name in ("r0", "r1")} == {
        "r0": fault_free(toys),
        "r1": fault_free(toys),
    }


def test_a_replica_that_left_is_not_waited_for() -> None:
    clock, store = FakeClock(), MemoryStore()

    def visit(toy: Toy):
        protocol = toy.protocol()
        yield from protocol.join(toy.initial())
        yield from protocol.leave()

    toys = [Toy(rank, 3, clock, quorum=at_least(1, grace_s=100.0), rounds=3) for rank in range(3)]
    simulation = Simulation(clock)
    simulation.start("visitor", visit(toys[2]), store)
    simulation.run()
    start(simulation, toys[:2], store)
    simulation.run()
    assert clock.monotonic() < 50.0
    assert all(commit.ranks == (0, 1) for commit in commits(store))


def test_the_adaptive_grace_learns_from_past_arrivals() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, quorum=adaptive(2, grace_s=300.0), rounds=8) for rank in range(3)]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run(until=lambda: any(commit.round_no == 5 for commit in commits(store)))
    now = clock.monotonic()
    simulation.kill("r2")
    simulation.run(until=lambda: any(commit.round_no == 6 for commit in commits(store)))
    simulation.run(until=lambda: any(commit.round_no == 6 for commit in commits(store)))
    assert clock.monotonic() - now < 60.0, "rank 2 was never a minute late, so nobody waits that long"


def nan_in_round_one(round_no: int, update: np.ndarray) -> np.ndarray:
    return np.where(np.arange(update.size) == 1500, np.float32("nan"), update) if round_no == 1 else update


def inf_in_round_one(round_no: int, update: np.ndarray) -> np.ndarray:
    return np.where(np.arange(update.size) == 3, np.float32("inf"), update) if round_no == 1 else update


def huge_in_round_five(round_no: int, update: np.ndarray) -> np.ndarray:
    return update * np.float32(1e4) if round_no == 5 else update


@pytest.mark.parametrize(
    ("spoil", "round_no", "check"),
    [(nan_in_round_one, 1, "finite"), (inf_in_round_one, 1, "finite"), (huge_in_round_five, 5, "norm")],
)
def test_an_unfit_update_is_left_out_with_an_event_and_training_goes_on(spoil, round_no: int, check: str) -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, rounds=7) for rank in range(3)]
    toys[1].spoil = spoil
    assert len(set(run_all(toys, store).values())) == 1
    for commit in commits(store):
        assert commit.ranks == ((0, 2) if commit.round_no == round_no else (0, 1, 2))
        assert [(r.rank, r.check) for r in commit.rejected] == ([(1, check)] if commit.round_no == round_no else [])
    told = [event for event in events(store) if event["event"] == "update_rejected"]
    assert {(event["round"], event["rank"], event["check"]) for event in told} == {(round_no, 1, check)}


@pytest.mark.parametrize(
    ("replicas", "policy"),
    [
        (1, strict(600.0)),
        (2, strict(600.0)),
        (1, at_least(1, deadline_s=600.0)),
        (2, at_least(1, deadline_s=600.0)),
        (1, replace(strict(600.0), on_rejected="stop")),
    ],
)
def test_a_round_without_any_finite_update_is_reported_as_divergence(replicas: int, policy: Quorum) -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, replicas, clock, spoil=nan_in_round_one, quorum=policy) for rank in range(replicas)]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    for task in simulation.tasks.values():
        assert type(task.error) is RoundError
        assert (task.error.reason, task.error.round_no) == ("diverged", 1)
        assert task.error.hint
    assert clock.monotonic() < 60.0, "no replica waited for the deadline"


def test_a_round_whose_updates_are_not_finite_or_outliers_is_divergence_too() -> None:
    def nan_in_round_five(round_no: int, update: np.ndarray) -> np.ndarray:
        return update * np.float32("nan") if round_no == 5 else update

    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 2, clock, rounds=7) for rank in range(2)]
    toys[0].spoil, toys[1].spoil = nan_in_round_five, huge_in_round_five
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    for task in simulation.tasks.values():
        assert isinstance(task.error, RoundError)
        assert (task.error.reason, task.error.round_no) == ("diverged", 5)


def test_a_round_whose_updates_are_all_outliers_has_diverged() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 2, clock, rounds=7, spoil=huge_in_round_five) for rank in range(2)]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    for task in simulation.tasks.values():
        assert isinstance(task.error, RoundError)
        assert (task.error.reason, task.error.round_no) == ("diverged", 5)


def test_an_unfit_update_stops_the_run_when_the_policy_says_so() -> None:
    from dataclasses import replace

    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, quorum=replace(strict(600.0), on_rejected="stop")) for rank in range(3)]
    toys[1].spoil = nan_in_round_one
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    for task in simulation.tasks.values():
        assert isinstance(task.error, CorruptUpdate)
        assert (task.error.rank, task.error.check) == (1, "finite")


def test_a_replica_with_another_layout_or_setting_is_refused_with_the_difference() -> None:
    clock, store = FakeClock(), MemoryStore()
    run_all([Toy(0, 1, clock, rounds=0)], store)
    for odd, words in (
        (Toy(0, 1, clock, size=2501), r".*\[2494\] float32"),
        (Toy(0, 1, clock, settings={"inner_steps": 4}), r"inner_steps: .*\b3\b.*\b4\b"),
        (Toy(0, 1, clock, settings={"inner_steps": 3, "outer": {"lr": 1}}), r"outer\.lr: .*None.*\b1\b"),
        (Toy(0, 1, clock, codec="bf16"), "codec: .*'fp32'.*'bf16'"),
        (Toy(0, 2, clock), r"world_size: .*\b1\b.*\b2\b"),
    ):
        simulation = Simulation(clock)
        simulation.start("odd", odd.train(), store)
        simulation.run()
        error = simulation.tasks["odd"].error
        assert isinstance(error, Conflict)
        assert any(re.match(words, line) for line in error.differences), error.differences
        assert "rank 0" in error.message
        assert error.hint


def test_a_replica_whose_state_drifted_is_found_out() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, rounds=4) for rank in range(3)]
    original = Toy.advance

    class Drifting(Toy):
        def advance(self, protocol, round_no):
            round_no = yield from original(self, protocol, round_no)
            self.state = self.state + np.float32(1e-3 if round_no == 2 else 0.0)
            return round_no

    toys[2] = Drifting(2, 3, clock, rounds=4)
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    error = simulation.tasks.pop("r2").error
    assert isinstance(error, CorruptUpdate)
    assert (error.rank, error.check) == (2, "base")


def test_a_replica_whose_state_drifted_takes_over_a_snapshot_only_if_it_says_so() -> None:
    clock, store = FakeClock(), MemoryStore()
    options = {"rounds": 4, "quorum": at_least(2, grace_s=1.0), "snapshot_every": 2}
    original = Toy.advance
    used: list[RoundSteps] = []

    class Drifting(Toy):
        def advance(self, protocol, round_no):
            used[:] = [protocol]
            round_no = yield from original(self, protocol, round_no)
            self.state = self.state + np.float32(1e-3 if round_no == 2 else 0.0)
            return round_no

    drifted = Drifting(2, 3, clock, **options)
    toys = [Toy(rank, 3, clock, **options) for rank in range(2)] + [drifted]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    simulation.run()
    assert isinstance(simulation.tasks.pop("r2").error, CorruptUpdate)

    def catch_up(**options: bool):
        mean = np.empty_like(drifted.state)

        def load(snapshot: LoadedSnapshot) -> None:
            drifted.state = np.frombuffer(snapshot.buffers["state"], dtype=np.float32).copy()

        steps = used[0].catch_up(2, lambda _: ArrayVector([mean]), lambda _: drifted.apply(mean), load, **options)
        task = simulation.start("r2", steps, store)
        simulation.run()
        return task

    error = catch_up().error
    assert isinstance(error, CorruptUpdate)
    assert error.check == "base"
    assert catch_up(replace_diverged=True).value == 4
    assert drifted.state.tobytes() == simulation.tasks["r0"].value


def test_a_replica_that_stood_still_after_its_commit_does_not_take_it_back() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 2, clock, quorum=at_least(1, grace_s=4.0), rounds=5, snapshot_every=2) for rank in range(2)]
    simulation = Simulation(clock)
    start(simulation, toys, store)
    made = RoundKeys("toy").commit(1)
    is_made = lambda name: name == "r0" and made in store.list(RoundKeys("toy").commits_prefix())  # noqa: E731
    simulation.before = lambda name, _, op: "pause" if is_made(name) and isinstance(op, List) else None
    simulation.run(until=lambda: len(toys[1].history) == 3)
    assert simulation.paused == {"r0"}
    simulation.paused, simulation.before = set(), None
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert [commit.round_no for commit in commits(store)] == [0, 1, 2, 3, 4]


def test_a_round_that_is_gone_without_a_snapshot_after_it_is_an_error_and_no_endless_search() -> None:
    clock, store = FakeClock(), MemoryStore()
    toys = [Toy(rank, 3, clock, quorum=at_least(2, grace_s=1.0), rounds=4) for rank in range(3)]
    run_all(toys[:2], store)
    store.delete(RoundKeys("toy").commit(1))
    simulation = Simulation(clock)
    start(simulation, toys[2:], store)
    simulation.run()
    assert isinstance(simulation.tasks["r2"].error, LeftBehind)
