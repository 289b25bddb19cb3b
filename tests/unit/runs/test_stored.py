"""Heartbeats in the store, from replicas of this version and of earlier ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll import disk
from atoll.errors import StoreError
from atoll.keys import RunKeys
from atoll.runs.stored import Beat, StoredRun
from atoll.status import LOADING, Progress, Reason, ReplicaState, ReplicaStatus, RunStatus, with_progress
from atoll.stores.memory import MemoryStore

OLD = {"attempt": 0, "round_no": 6, "metrics": {"loss": 1.5}, "last_line": "step", "beat_at": 1010.0}
PACE = {"rounds_total": 40, "round_s": 20.0, "round_at": 1000.0}
RUNNING = ReplicaStatus(0, ReplicaState.RUNNING)


def progress_of(beat: dict[str, Any]) -> Progress:
    store = MemoryStore()
    store.put(RunKeys("r").beat(0), json.dumps(beat).encode())
    return StoredRun(store, "r").beats(1)[0].progress


def test_a_heartbeat_of_an_earlier_version_is_read():
    assert progress_of(OLD) == Progress(6, {"loss": 1.5}, "step", 1010.0)


def test_the_time_left_is_counted_from_the_last_heartbeat():
    found = progress_of({**OLD, **PACE, "phase": "running", "problem": "disk full: /x"})
    assert (found.rounds_total, found.eta_s) == (40, 34 * 20.0 - 10.0)
    assert (found.phase, found.problem, found.is_line_open) == ("running", "disk full: /x", False)
    assert progress_of({**OLD, "is_line_open": True}).is_line_open


@pytest.mark.parametrize(
    ("change", "eta_s"),
    [
        ({"beat_at": 9000.0}, 33 * 20.0),  # the round in progress takes longer than the last ones
        ({"beat_at": 990.0}, 34 * 20.0),
        ({"round_no": 40}, None),
        ({"round_no": 41}, None),
        ({"round_no": None}, None),
        ({"round_s": None}, None),
        ({"round_s": "fast"}, None),
        ({"round_s": float("nan")}, None),
        ({"rounds_total": 10**400}, None),
        ({"round_at": [1]}, None),
    ],
)
def test_a_time_left_that_cannot_be_computed_is_none(change, eta_s):
    assert progress_of({**OLD, **PACE, **change}).eta_s == eta_s


def test_a_running_replica_without_a_heartbeat_is_loading():
    assert with_progress(RUNNING, None).progress.phase == LOADING
    assert with_progress(RUNNING, Progress(3, phase="running")).progress.phase == "running"
    assert with_progress(RUNNING, Progress(3)).progress.phase is None  # an earlier version did not send it
    pending = ReplicaStatus(0, ReplicaState.PENDING, Reason.STARTING)
    assert with_progress(pending, None).progress.phase is None


def test_what_the_backend_knows_is_newer_than_the_heartbeat():
    own = ReplicaStatus(0, ReplicaState.RUNNING, progress=Progress(phase="running", problem="disk full: /spool"))
    found = with_progress(own, Progress(3, phase=LOADING, problem="disk full: /tmp")).progress
    assert (found.round_no, found.phase, found.problem) == (3, "running", "disk full: /spool")


@pytest.mark.parametrize("state", [ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.LOST])
def test_a_replica_that_has_ended_has_rounds_and_no_time_left(state):
    beat = Progress(6, rounds_total=40, eta_s=12.0, phase="running", problem="disk full: /x")
    found = with_progress(ReplicaStatus(0, state), beat)
    assert found.progress == Progress(6, rounds_total=40)
    assert RunStatus((found,)).problems() == {}


def test_a_full_folder_of_the_store_is_a_problem_of_every_rank(monkeypatch, tmp_path):
    from atoll.registry import open_store

    store = open_store(tmp_path.as_uri())
    store.put(RunKeys("r").beat(0), json.dumps(OLD).encode())
    stored = StoredRun(store, "r")
    assert stored.beats(2) == {0: Beat(0, progress_of(OLD))}
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    text = f"disk full: {tmp_path}"
    assert {rank: beat.progress.problem for rank, beat in stored.beats(2).items()} == {0: text, 1: text}
    running = RunStatus((RUNNING, ReplicaStatus(1, ReplicaState.SUCCEEDED)))
    beats = stored.beats(2)
    shown = running.with_replicas(with_progress(r, beats[r.rank].progress) for r in running.replicas)
    assert shown.problems() == {text: [0]}


DAMAGED = [b"", b"{", b"[]", b"7", b'{"attempt": 0}', b'{"rank": 0, "attempt": 0, "state": "odd", "reason": "ok"}']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_heartbeat_is_none(data):
    store = MemoryStore()
    store.put(RunKeys("r").beat(0), data)
    assert StoredRun(store, "r").beats(1) == {}


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_outcome_is_an_error_of_the_store_that_names_it(data):
    store = MemoryStore()
    store.put(RunKeys("r").outcome(0, 0), data)
    with pytest.raises(StoreError, match=r"outcome/00000.000.json` is damaged") as caught:
        StoredRun(store, "r").outcomes()
    assert caught.value.reason == "damaged"
