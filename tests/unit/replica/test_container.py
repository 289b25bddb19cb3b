"""A container of a replica: its version, and the time that earlier containers of its rank have used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from atoll import journal
from atoll.context import CLAIMED, TIMED_OUT, TOO_OLD, RunContext, rank_environment
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.replica.container import ran_s
from atoll.spec import RunSpec
from atoll.status import Reason, ReplicaState
from atoll.stores.memory import MemoryStore

KEYS = RunKeys("exp")
JOBS = "atoll.testing.contract_jobs"


def put(store, key: str, **record: object) -> None:
    store.put(key, json.dumps(record).encode())


def test_the_time_of_an_attempt_ends_with_its_outcome_or_its_last_heartbeat():
    store = MemoryStore()
    assert ran_s(store, KEYS, 0, 0) == 0.0
    put(store, KEYS.start(0, 0), at=100.0)
    assert ran_s(store, KEYS, 0, 0) == 0.0
    put(store, KEYS.beat(0), beat_at=130.0, attempt=0)
    assert ran_s(store, KEYS, 0, 0) == 30.0
    put(store, KEYS.outcome(0, 0), ended_at=150.5)
    assert ran_s(store, KEYS, 0, 0) == 50.5
    put(store, KEYS.start(0, 1), at=500.0)
    assert ran_s(store, KEYS, 0, 1) == 0.0
    store.put(KEYS.outcome(0, 1), b"[]")
    assert ran_s(store, KEYS, 0, 1) == 0.0


@pytest.mark.parametrize(
    ("record", "is_old"),
    [
        ({}, False),
        ({"format": 1, "atoll": "0.1.0"}, False),
        ({"atoll": "0.1.99"}, False),
        ({"atoll": "0.0.1"}, False),
        ({"atoll": "unknown"}, False),
        ({"atoll": "0.2.0"}, True),
        ({"atoll": "1.0.0rc1"}, True),
        ({"format": 2, "atoll": "0.1.0"}, True),
    ],
)
def test_a_replica_is_too_old_for_a_launcher_of_a_later_series(record, is_old, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "0.1.0")
    assert (journal.version_problem(record) is not None) is is_old


def run_container(uri: str, entry: str, **variables: str) -> tuple[int, dict[str, object]]:
    """Run one replica as a container does. Returns its exit code, and its newest outcome."""
    store = open_store(uri)
    journal.record_run(store, RunSpec.build(f"{JOBS}:{entry}", run_id="exp"), executor="container")
    given = {**RunContext("exp", uri).environment(1), **rank_environment(0), **variables}
    done = subprocess.run([sys.executable, "-m", "atoll.replica"], env={**os.environ, **given}, capture_output=True)
    return done.returncode, json.loads(bytes(store.get(list(store.list(KEYS.outcomes_prefix()))[-1])))


@pytest.mark.process
def test_a_replica_that_is_too_old_ends_before_the_entry_point_and_is_not_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "999.0.0")
    code, outcome = run_container(tmp_path.as_uri(), "hold", ATOLL_MAX_RESTARTS="3")
    assert code == TOO_OLD
    assert (outcome["state"], outcome["reason"], outcome["attempt"]) == (ReplicaState.FAILED, Reason.IMAGE, 0)


@pytest.mark.process
def test_the_time_limit_counts_earlier_containers_of_the_rank(tmp_path):
    uri = tmp_path.as_uri()
    put(open_store(uri), KEYS.start(0, 0), at=1000.0)
    put(open_store(uri), KEYS.outcome(0, 0), ended_at=5000.0)
    code, outcome = run_container(uri, "hold", ATOLL_TIMEOUT_S="4000", ATOLL_GRACE_S="1")
    assert code == TIMED_OUT
    assert (outcome["reason"], outcome["attempt"]) == (Reason.TIMEOUT, 1)


@pytest.mark.process
def test_a_container_of_an_earlier_launch_runs_nothing(tmp_path):
    store = open_store(tmp_path.as_uri())
    journal.record_undone(store, "exp", "a rank could not be started")
    journal.record_undone(store, "exp", "the same", launch=2)
    variables = {**RunContext("exp", store.uri).environment(1), **rank_environment(0), "ATOLL_CLAIM": "ID", "ID": "a"}
    done = subprocess.run([sys.executable, "-m", "atoll.replica"], env={**os.environ, **variables}, capture_output=True)
    assert done.returncode == CLAIMED
    assert list(store.list(KEYS.starts_prefix())) == []


@pytest.mark.process
def test_a_rank_that_a_cancel_has_barred_is_run_by_no_container(tmp_path):
    store = open_store(tmp_path.as_uri())
    assert journal.bar_rank(store, "exp", 0)
    assert journal.bar_rank(store, "exp", 0), "again"
    variables = {**RunContext("exp", store.uri).environment(1), **rank_environment(0), "ATOLL_CLAIM": "ID", "ID": "a"}
    done = subprocess.run([sys.executable, "-m", "atoll.replica"], env={**os.environ, **variables}, capture_output=True)
    assert done.returncode == CLAIMED
    put(store, KEYS.start(1, 0), job="a")
    assert not journal.bar_rank(store, "exp", 1), "a container has claimed it"


@pytest.mark.process
def test_a_request_in_the_store_stops_a_rank_for_good(tmp_path):
    store = open_store(tmp_path.as_uri())
    journal.record_stop(store, "exp", 0)
    code, outcome = run_container(store.uri, "hold", ATOLL_STORE_STOPS="1", ATOLL_MAX_RESTARTS="3")
    assert code != 0
    assert (outcome["state"], outcome["reason"]) == (ReplicaState.CANCELLED, Reason.CANCELLED)
    assert outcome["attempt"] == 0
