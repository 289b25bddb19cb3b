"""Dead ranks: how the replicas that wait for one learn of its death, and what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
from rounds_records import KEYS, beat, ended, launched
from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, events

from atoll.errors import QuorumLost, StoreRefused
from atoll.rounds.io import Get, Op, Put, Sleep
from atoll.rounds.quorum import Quorum, at_least, strict
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock

RECORDS = tuple(f"{KEYS.prefix}{kind}" for kind in ("run.json", "beat/", "outcome/", "start/"))
LONG = 1800.0


def beating(clock: FakeClock, rank: int, until: float) -> Generator[Op, Any, None]:
    """A supervisor whose machine has a clock of its own, far from ours."""
    while clock.monotonic() < until:
        yield Put(KEYS.beat(rank), json.dumps({"attempt": 0, "beat_at": -1e6 + clock.monotonic()}).encode())
        yield Sleep(10.0)


def survivors(
    clock: FakeClock, store: MemoryStore, *ranks: int, replicas: int = 3, policy: Quorum | None = None, **options: Any
) -> Simulation:
    simulation = Simulation(clock)
    for rank in ranks:
        toy = Toy(rank, replicas, clock, quorum=policy or strict(LONG), **options)
        simulation.start(f"r{rank}", toy.train(), store)
    return simulation


def errors(simulation: Simulation) -> list[QuorumLost]:
    simulation.run()
    found = [task.error for name, task in simulation.tasks.items() if name.startswith("r")]
    assert all(isinstance(error, QuorumLost) for error in found), found
    return found  # type: ignore[return-value]


def record_reads(simulation: Simulation) -> list[str]:
    """The keys of the records of replicas that are read from now on."""
    seen: list[str] = []

    def note(_name: str, _number: int, op: Op) -> None:
        if isinstance(op, Get) and op.key.startswith(RECORDS):
            seen.append(op.key)

    simulation.before = note
    return seen


class TickingClock(FakeClock):
    """Moves at every look at it, as a real clock does."""

    def monotonic(self) -> float:
        self.advance(1e-6)
        return super().monotonic()


@pytest.mark.parametrize("clock_type", [FakeClock, TickingClock])
def test_the_others_of_a_strict_run_end_five_minutes_after_a_final_failure(clock_type: type[FakeClock]) -> None:
    clock, store = clock_type(), launched(3)
    ended(store, 2)
    for error in errors(survivors(clock, store, 0, 1)):
        assert (error.reason, error.dead, error.missing, error.timed_out) == ("dead", (2,), (2,), False)
        assert error.round_no == 0
        assert "killed by SIGKILL" in error.message
        for step in ("`atoll logs toy --rank 2`", "`--max-restarts N`", "`--on-dead wait`"):
            assert step in str(error.hint)
    assert 300.0 <= clock.monotonic() <= 330.0


def test_a_silent_machine_is_dead_after_two_minutes_and_ends_the_others_after_five() -> None:
    clock, store = FakeClock(), launched(3)
    simulation = survivors(clock, store, 0, 1)
    simulation.start("machine of rank 2", beating(clock, 2, until=60.0), store)
    for error in errors(simulation):
        assert error.dead == (2,)
        assert "no heartbeat" in error.message
    assert 50.0 + 300.0 <= clock.monotonic() <= 50.0 + 330.0, "the last heartbeat was sent after 50 s"


def test_a_slow_rank_that_sends_heartbeats_is_waited_for() -> None:
    clock, store = FakeClock(), launched(3)
    simulation = survivors(clock, store, 0, 1)
    simulation.start("machine of rank 2", beating(clock, 2, until=1000.0), store)
    simulation.run(until=lambda: clock.monotonic() > 1000.0)
    simulation.start("r2", Toy(2, 3, clock, quorum=strict(LONG)).train(), store)
    simulation.run()
    assert all(commit.ranks == (0, 1, 2) for commit in commits(store))
    assert len({simulation.tasks[f"r{rank}"].value for rank in range(3)}) == 1


def test_a_rank_that_has_not_started_is_never_dead() -> None:
    clock, store = FakeClock(), launched(3)
    for error in errors(survivors(clock, store, 0, 1)):
        assert (error.dead, error.missing, error.timed_out) == ((), (2,), True)
    assert clock.monotonic() >= LONG


def test_a_container_that_started_and_never_sent_a_heartbeat_is_dead() -> None:
    clock, store = FakeClock(), launched(3)
    store.create(KEYS.start(2, 0), b"{}")
    assert [error.dead for error in errors(survivors(clock, store, 0, 1))] == [(2,), (2,)]


def test_replicas_that_no_launcher_started_wait_until_the_deadline() -> None:
    clock, store = FakeClock(), MemoryStore()
    ended(store, 2)
    for error in errors(survivors(clock, store, 0, 1)):
        assert (error.dead, error.timed_out) == ((), True)


def test_the_records_of_an_earlier_launch_say_nothing_about_this_one() -> None:
    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    for error in errors(survivors(clock, store, 0, 1, launch=2)):
        assert (error.dead, error.timed_out) == ((), True)


def test_a_failed_rank_with_a_restart_to_come_is_not_dead_until_it_is_silent() -> None:
    clock, store = FakeClock(), launched(3, max_restarts=2)
    ended(store, 2, attempt=1)
    simulation = survivors(clock, store, 0, 1)
    simulation.run(until=lambda: clock.monotonic() > 200.0)
    beat(store, 2, attempt=2)
    for error in errors(simulation):
        assert error.dead == (2,)
        assert "no heartbeat" in error.message
    assert clock.monotonic() >= 500.0


@pytest.mark.parametrize("record", [{"attempt": 2}, {"is_final": True}, {"state": "cancelled"}, {"state": "succeeded"}])
def test_a_rank_that_is_not_restarted_is_dead_at_once(record: dict[str, Any]) -> None:
    clock, store = FakeClock(), launched(3, max_restarts=2, on_dead_after_s=20.0)
    ended(store, 2, **record)
    for error in errors(survivors(clock, store, 0, 1)):
        assert str(record.get("state", "failed")) in error.message
    assert clock.monotonic() <= 40.0


def test_a_rank_that_is_replaced_in_time_is_alive() -> None:
    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    simulation = survivors(clock, store, 0, 1)
    simulation.run(until=lambda: clock.monotonic() > 250.0)
    beat(store, 2, attempt=1)
    simulation.run(until=lambda: clock.monotonic() > 400.0)
    simulation.start("r2", Toy(2, 3, clock, attempt=1, quorum=strict(LONG)).train(), store)
    simulation.run()
    assert all(commit.ranks == (0, 1, 2) for commit in commits(store))


def cancelled(store: MemoryStore, rank: int) -> None:
    store.create(KEYS.cancelled_rank(rank), json.dumps({"why": "cancelled on request", "was_over": False}).encode())


@pytest.mark.parametrize("records", ["none", "a heartbeat that goes on", "preempted, with restarts left", "cancelled"])
def test_a_cancelled_rank_is_dead_at_once_whatever_its_records_say(records: str) -> None:
    clock, store = FakeClock(), launched(3, max_restarts=5)
    simulation = survivors(clock, store, 0, 1)
    if records == "a heartbeat that goes on":
        simulation.start("machine of rank 2", beating(clock, 2, until=100.0), store)
    elif records == "cancelled":
        ended(store, 2, state="cancelled", message="cancelled on request")
    elif records != "none":
        ended(store, 2, reason="preempted")
    if records != "cancelled":
        cancelled(store, 2)
    for error in errors(simulation):
        assert (error.reason, error.dead, error.missing, error.timed_out) == ("dead", (2,), (2,), False)
        assert "rank 2" in error.message
        assert "cancelled" in error.message
        assert "--max-restarts" not in str(error.hint), "a restart does not bring back a cancelled rank"
    assert clock.monotonic() <= 110.0 if records == "a heartbeat that goes on" else clock.monotonic() <= 20.0


def test_a_rank_that_is_cancelled_while_the_others_wait_ends_them() -> None:
    clock, store = FakeClock(), launched(3)
    simulation = survivors(clock, store, 0, 1)
    simulation.start("machine of rank 2", beating(clock, 2, until=200.0), store)
    simulation.run(until=lambda: clock.monotonic() > 100.0)
    cancelled(store, 2)
    simulation.run(until=lambda: clock.monotonic() > 120.0)
    found = [simulation.tasks[name].error for name in ("r0", "r1")]
    assert [error.dead for error in found if isinstance(error, QuorumLost)] == [(2,), (2,)]


def test_a_cancelled_rank_is_waited_for_where_the_run_says_so() -> None:
    clock, store = FakeClock(), launched(3, on_dead="wait")
    cancelled(store, 2)
    for error in errors(survivors(clock, store, 0, 1)):
        assert (error.dead, error.missing, error.timed_out) == ((), (2,), True)


def test_a_quorum_that_can_go_on_goes_on_without_a_cancelled_rank() -> None:
    clock, store = FakeClock(), launched(3)
    cancelled(store, 2)
    simulation = survivors(clock, store, 0, 1, policy=at_least(2, grace_s=20.0, deadline_s=LONG))
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert all(commit.ranks == (0, 1) for commit in commits(store))


def test_the_cancellation_of_a_rank_of_an_earlier_launch_says_nothing_about_this_one() -> None:
    clock, store = FakeClock(), launched(3)
    cancelled(store, 2)
    for error in errors(survivors(clock, store, 0, 1, launch=2)):
        assert (error.dead, error.timed_out) == ((), True)


def test_a_store_that_hides_the_records_of_cancellations_hides_no_death() -> None:
    def refuse(_clock: FakeClock, key: str) -> None:
        if "/cancelled/" in key:
            raise StoreRefused(f"no permission for {key}")

    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    assert [error.dead for error in errors(survivors(clock, broken(refuse, clock, store), 0))] == [(2,)]


@pytest.mark.parametrize(
    ("of_run", "of_quorum"),
    [({"on_dead": "wait"}, {}), ({}, {"on_dead": "wait"}), ({"on_dead": "wait"}, {"on_dead": "wait"})],
)
def test_wait_waits_for_a_dead_rank_until_the_deadline(of_run: dict[str, Any], of_quorum: dict[str, Any]) -> None:
    clock, store = FakeClock(), launched(3, **of_run)
    ended(store, 2)
    simulation = survivors(clock, store, 0, policy=replace(strict(LONG), **of_quorum))
    (error,) = errors(simulation)
    assert (error.dead, error.timed_out) == ((), True)
    assert clock.monotonic() >= LONG


def test_the_quorum_of_a_replica_overrides_the_setting_of_the_run() -> None:
    clock, store = FakeClock(), launched(3, on_dead="wait", on_dead_after_s=900.0)
    ended(store, 2)
    policy = replace(strict(LONG), on_dead="fail", on_dead_after_s=60.0)
    assert [error.dead for error in errors(survivors(clock, store, 0, 1, policy=policy))] == [(2,), (2,)]
    assert 60.0 <= clock.monotonic() <= 80.0


def test_an_earlier_deadline_of_the_round_still_applies() -> None:
    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    for error in errors(survivors(clock, store, 0, 1, policy=strict(100.0))):
        assert (error.dead, error.timed_out) == ((), True)
    assert clock.monotonic() <= 110.0


def test_a_quorum_that_can_go_on_does_not_mind_a_dead_rank() -> None:
    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    simulation = survivors(clock, store, 0, 1, policy=at_least(2, grace_s=20.0, deadline_s=LONG))
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert all(commit.ranks == (0, 1) for commit in commits(store))
    assert clock.monotonic() < 60.0


def test_an_error_about_a_dead_rank_also_names_the_updates_that_were_rejected() -> None:
    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    policy = at_least(2, deadline_s=LONG)
    simulation = survivors(clock, store, 0, policy=policy)
    spoilt = Toy(1, 3, clock, quorum=policy, spoil=lambda _round, update: update * float("nan"))
    simulation.start("r1", spoilt.train(), store)
    for error in errors(simulation):
        assert (error.dead, error.missing) == ((2,), (1, 2))
        assert "rank 1 failed the check `finite`" in error.message


def test_a_quorum_that_dead_ranks_make_unreachable_gives_up_early() -> None:
    clock, store = FakeClock(), launched(4)
    ended(store, 2)
    ended(store, 3)
    for error in errors(survivors(clock, store, 0, 1, replicas=4, policy=at_least(3, deadline_s=LONG))):
        assert error.dead == (2, 3)
    assert 300.0 <= clock.monotonic() <= 330.0


def test_status_shows_when_the_wait_for_a_dead_rank_ends() -> None:
    clock, store = FakeClock(), launched(3)
    beat(store, 2)
    began = clock.time()
    simulation = survivors(clock, store, 0, 1)
    simulation.run(until=lambda: clock.time() - began > 30.0)
    ended(store, 2)
    errors(simulation)
    waits = [event["until"] - began for event in events(store) if event["event"] == "waiting" and event["by"] == 0]
    assert waits == pytest.approx([LONG, 30.0 + 300.0], abs=15.0), "at first the death is not known"


def test_records_are_read_only_during_a_long_wait_and_at_a_slow_rate() -> None:
    clock, store = FakeClock(), launched(3)
    simulation = survivors(clock, store, 0, 1, 2)
    seen = record_reads(simulation)
    simulation.run()
    assert seen == []
    clock, store = FakeClock(), launched(3)
    beat(store, 2)
    simulation = survivors(clock, store, 0, 1, policy=strict(110.0))
    seen = record_reads(simulation)
    errors(simulation)
    assert seen.count(KEYS.run()) == 2, "once by each replica"
    assert 2 * 5 <= seen.count(KEYS.beat(2)) <= 2 * 10
    assert {key for key in seen if key.startswith(f"{KEYS.prefix}beat/")} == {KEYS.beat(2)}, "only the missing rank"


def broken(fault: Callable[[FakeClock, str], None], clock: FakeClock, store: MemoryStore) -> MemoryStore:
    class Broken(MemoryStore):
        def get(self, key: str, **span: Any) -> Any:
            if key.startswith((*RECORDS[1:], KEYS.cancelled_ranks_prefix())):
                fault(clock, key)
            return store.get(key, **span)

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name) if name in ("get", "__class__") else getattr(store, name)

    return Broken()


def test_a_store_that_refuses_to_show_the_records_ends_nothing() -> None:
    def refuse(_clock: FakeClock, key: str) -> None:
        raise StoreRefused(f"no permission for {key}")

    clock, store = FakeClock(), launched(3)
    ended(store, 2)
    for error in errors(survivors(clock, broken(refuse, clock, store), 0)):
        assert (error.dead, error.timed_out) == ((), True)


def test_time_in_which_a_replica_could_not_look_counts_only_in_part() -> None:
    """After an outage the newest heartbeat is old for everybody: that alone is no sign of death."""

    def outage(clock: FakeClock, _key: str) -> None:
        if 50.0 < clock.monotonic() < 550.0:
            raise StoreRefused("the store is down")

    clock, store = FakeClock(), launched(3)
    beat(store, 2)
    (error,) = errors(survivors(clock, broken(outage, clock, store), 0))
    assert error.dead == (2,)
    assert clock.monotonic() > 550.0 + 200.0


def test_records_that_are_not_json_end_nothing() -> None:
    clock, store = FakeClock(), launched(3)
    store.put(KEYS.beat(2), b"\xff{")
    store.put(KEYS.outcome(2, 0), b"[]")
    simulation = survivors(clock, store, 0, tuning=replace(FAST, silent_s=1e6))
    assert [error.dead for error in errors(simulation)] == [()]
