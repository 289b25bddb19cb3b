"""Ranks that machines claim: what the records in the store mean, and when a machine counts as silent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll import journal
from atoll.errors import StoreError
from atoll.executors.join.status import replica_status
from atoll.keys import RunKeys
from atoll.replica.joined import Condition, JoinedRanks, JoinPart, RankRow, read_part, read_parts
from atoll.status import Reason, ReplicaState
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock

KEYS = RunKeys("exp")
LINE = "atoll join exp"


def part(**changes: Any) -> JoinPart:
    fields: dict[str, Any] = {
        "first_rank": 0,
        "replicas": 2,
        "world_size": 2,
        "environment": {},
        "secrets": {},
        "rank_env": "REPLICA_RANK",
        "timeout_s": 100.0,
        "grace_s": 1.0,
        "max_restarts": 0,
        "silent_s": 60.0,
    }
    return JoinPart(**{**fields, **changes})


class Records:
    """The records of a run, and a process that reads them."""

    def __init__(self, **changes: Any) -> None:
        self.store, self.clock = MemoryStore(), FakeClock()
        self.ranks = self.reader(**changes)

    def reader(self, **changes: Any) -> JoinedRanks:
        return JoinedRanks(self.store, KEYS, part(**changes), self.clock)

    def put(self, key: str, **record: Any) -> None:
        self.store.put(key, json.dumps(record).encode())

    def start(self, rank: int = 0, attempt: int = 0, **more: Any) -> None:
        self.put(KEYS.start(rank, attempt), host=f"m{attempt}", pid=7, at=self.clock.time(), **more)

    def beat(self, rank: int = 0, attempt: int = 0, skew_s: float = 0.0) -> None:
        self.put(KEYS.beat(rank), attempt=attempt, beat_at=self.clock.time() + skew_s)

    def end(self, state: ReplicaState, reason: Reason, attempt: int = 0, **more: Any) -> None:
        self.put(KEYS.outcome(0, attempt), state=state, reason=reason, message="why", **more)

    def condition(self) -> Condition:
        return self.ranks.read()[0].condition(self.ranks.part.max_restarts)


def test_a_rank_waits_then_runs_then_is_over():
    records = Records()
    assert records.condition() is Condition.WAITING
    records.start()
    assert records.condition() is Condition.RUNNING
    records.beat()
    records.end(ReplicaState.SUCCEEDED, Reason.OK)
    assert records.condition() is Condition.OVER
    assert records.ranks.read()[1].condition(0) is Condition.WAITING


@pytest.mark.parametrize(
    ("max_restarts", "reason", "more", "wanted"),
    [
        (0, Reason.PREEMPTED, {}, Condition.LEFT),
        (0, Reason.USER_ERROR, {}, Condition.OVER),
        (1, Reason.USER_ERROR, {}, Condition.RESTARTING),
        (1, Reason.USER_ERROR, {"is_final": True}, Condition.OVER),
        (1, Reason.TIMEOUT, {}, Condition.OVER),
    ],
)
def test_a_machine_that_leaves_frees_its_rank_and_a_failure_uses_restarts(max_restarts, reason, more, wanted):
    records = Records(max_restarts=max_restarts)
    records.start()
    records.beat()
    records.end(ReplicaState.FAILED, reason, **more)
    assert records.condition() is wanted


def test_only_failures_of_the_code_use_up_the_restarts():
    records = Records(max_restarts=1)
    for attempt, reason in enumerate([Reason.PREEMPTED, Reason.USER_ERROR, Reason.PREEMPTED]):
        records.start(attempt=attempt)
        records.end(ReplicaState.FAILED, reason, attempt)
        assert records.condition().is_free or reason is Reason.USER_ERROR
    records.start(attempt=3)
    records.end(ReplicaState.FAILED, Reason.USER_ERROR, 3)
    assert records.condition() is Condition.OVER


def test_a_restart_whose_machine_is_gone_is_free_for_another():
    records = Records(max_restarts=1)
    records.start()
    records.beat()
    records.end(ReplicaState.FAILED, Reason.USER_ERROR)
    assert records.condition() is Condition.RESTARTING
    records.clock.advance(61)
    assert records.condition() is Condition.LEFT


def test_a_barred_rank_is_over_and_the_bar_is_a_claim():
    records = Records()
    assert records.ranks.bar(0, 0)
    assert not records.ranks.claim(0, 0, {})
    assert records.condition() is Condition.OVER
    records.start(1)
    assert not records.ranks.bar(1, 0)


def test_a_machine_is_silent_when_its_heartbeat_does_not_change():
    records = Records()
    records.start()
    records.beat()
    assert records.condition() is Condition.RUNNING
    records.clock.advance(59)
    assert records.condition() is Condition.RUNNING
    records.clock.advance(2)
    assert records.condition() is Condition.SILENT
    records.beat()
    assert records.condition() is Condition.RUNNING


def test_a_new_reader_believes_the_time_in_the_heartbeat():
    records = Records()
    records.start()
    records.beat()
    records.clock.advance(61)
    assert records.reader().read()[0].is_silent


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_wrong_clock_deceives_only_the_first_look(skew_s):
    records = Records()
    records.start()
    records.beat(skew_s=skew_s)
    records.ranks.read()
    for _ in range(20):
        records.clock.advance(10)
        records.beat(skew_s=skew_s)
        assert records.condition() is Condition.RUNNING
    records.clock.advance(61)
    assert records.condition() is Condition.SILENT


def test_silence_is_confirmed_by_waiting_for_heartbeats():
    records = Records()
    records.start()
    records.beat(skew_s=-3600)
    assert records.reader().is_confirmed_silent(0)
    records.clock.call_at(records.clock.monotonic() + 9, lambda: records.beat(skew_s=-3600))
    assert not records.reader().is_confirmed_silent(0)


def test_a_heartbeat_of_an_earlier_attempt_says_nothing_about_the_newest():
    records = Records()
    records.start(attempt=0)
    records.clock.advance(100)
    records.start(attempt=1)
    records.beat(attempt=0, skew_s=-100)
    row = records.ranks.read()[0]
    assert (row.attempt, row.host, row.is_silent) == (1, "m1", False)


def test_parts_of_a_launch_are_read_in_order():
    store = MemoryStore()
    for first in (3, 0):
        store.put(KEYS.join_part(first), json.dumps(part(first_rank=first).to_json()).encode())
    assert [list(each.ranks) for each in read_parts(store, KEYS)] == [[0, 1], [3, 4]]
    assert read_part(store, KEYS, 3) == part(first_rank=3)
    assert read_part(store, KEYS, 1) is None
    assert read_parts(store, RunKeys("exp", 2)) == []


def test_the_status_says_what_a_rank_needs():
    records = Records()
    records.start()
    records.beat()

    def status() -> Any:
        return replica_status(0, records.ranks.read()[0], records.ranks.part, LINE)

    assert (status().state, status().host, status().native_id) == (ReplicaState.RUNNING, "m0", "joined m0:7")
    journal.record_stop(records.store, "exp", 0)
    assert status().reason is Reason.STOPPING
    records.store.delete(KEYS.stop(0))
    records.clock.advance(61)
    assert (status().state, status().reason, status().native_id) == (ReplicaState.PENDING, Reason.WAITING, None)
    assert LINE in status().message
    records.start(attempt=1, barred=True)
    assert (status().state, status().reason) == (ReplicaState.CANCELLED, Reason.CANCELLED)
    waiting = replica_status(1, RankRow(1), records.ranks.part, LINE)
    assert (waiting.state, waiting.reason) == (ReplicaState.PENDING, Reason.WAITING)
    assert LINE in waiting.message


def test_a_rank_that_was_cancelled_before_a_machine_joined_has_no_time():
    records = Records()
    records.ranks.bar(0, 0)
    status = replica_status(0, records.ranks.read()[0], records.ranks.part, LINE)
    assert (status.state, status.started_at, status.native_id) == (ReplicaState.CANCELLED, None, None)


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"{}", b"null", json.dumps({**part().to_json(), "replicas": "2"}).encode()],
)
def test_a_damaged_part_is_an_error_and_not_a_part_without_machines(data):
    store = MemoryStore()
    store.put(KEYS.join_part(0), data)
    with pytest.raises(StoreError) as caught:
        read_part(store, KEYS, 0)
    assert caught.value.reason == "damaged"


def test_another_object_beside_the_parts_is_an_error_that_names_it():
    store = MemoryStore()
    store.put(f"{KEYS.join_parts_prefix()}odd.json", b"{}")
    with pytest.raises(StoreError, match=r"join/odd\.json"):
        read_parts(store, KEYS)


@pytest.mark.parametrize("outcome", [b"{", b"[]", b'{"state": "odd", "reason": "ok"}', b'{"state": "failed"}'])
def test_a_rank_with_a_damaged_outcome_is_over_and_says_so(outcome):
    records = Records()
    records.start()
    records.store.put(KEYS.outcome(0, 0), outcome)
    found = replica_status(0, records.ranks.read()[0], records.ranks.part, LINE)
    assert found.state is ReplicaState.LOST
    assert "damaged" in found.message


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_new_reader_does_not_believe_a_clock_that_is_far_away(skew_s):
    records = Records()
    records.start()
    records.beat(skew_s=skew_s)
    assert records.condition() is Condition.SILENT
    assert not records.ranks.was_watched(0)
    records.clock.advance(30)
    records.beat(skew_s=skew_s)
    assert records.condition() is Condition.RUNNING
    assert not records.ranks.was_watched(0)
    records.clock.advance(61)
    assert records.condition() is Condition.SILENT
    assert records.ranks.was_watched(0)
