"""Why a machine cannot join a run: each error has its reason, and nothing is changed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import atoll
from atoll import journal, registry
from atoll.context import RunContext
from atoll.errors import ConfigError, Conflict, InvalidSpec, RunNotFound, StoreError
from atoll.keys import RunKeys, bundle
from atoll.runs.joinable import find_target
from atoll.status import Reason, ReplicaState

KEYS = RunKeys("exp")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> atoll.Run:
    """A run of two ranks that waits for machines."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    return launched(tmp_path)


def launched(folder: Path, **options: object) -> atoll.Run:
    given = {"run_id": "exp", "replicas": 2, "args": {"s": "{}"}, **options}
    return atoll.launch("json:loads", on="join", store=str(folder / "store"), **given)  # type: ignore[arg-type]


def refused(run: atoll.Run, rank: int | None = None) -> str:
    """The reason of the refusal. Asserts that it changed nothing."""
    before = {key: bytes(run.store.get(key)) for key in run.store.list()}
    with pytest.raises(ConfigError) as caught:
        atoll.join(run.id, rank=rank, store=run.store.uri)
    assert {key: bytes(run.store.get(key)) for key in run.store.list()} == before
    assert caught.value.hint or isinstance(caught.value, InvalidSpec)
    return caught.value.reason


def end(run: atoll.Run, rank: int) -> None:
    run.store.put(KEYS.start(rank, 0), json.dumps({"host": "m", "at": 1.0}).encode())
    outcome = {"state": ReplicaState.SUCCEEDED, "reason": Reason.OK}
    run.store.put(KEYS.outcome(rank, 0), json.dumps(outcome).encode())


def claim(run: atoll.Run, rank: int) -> None:
    run.store.put(KEYS.start(rank, 0), json.dumps({"host": "m", "at": time.time()}).encode())


def test_a_run_that_waits_can_be_joined(run):
    target = find_target(run.store, "exp", None)
    assert [row.rank for _, row in target.rows()] == [0, 1]
    assert [row.rank for _, row in find_target(run.store, "exp", 1).rows()] == [1]
    assert {r.state for r in run.status().replicas} == {ReplicaState.PENDING}


def test_a_run_or_a_rank_that_is_over(run):
    end(run, 0)
    assert refused(run, 0) == "over"
    end(run, 1)
    assert refused(run) == "over"


def test_a_full_run_and_a_taken_rank(run):
    claim(run, 0)
    assert refused(run, 0) == "taken"
    end(run, 1)
    assert refused(run) == "full"


def test_a_cancelled_run(run):
    run.cancel()
    assert refused(run) == "cancelled"
    assert {r.state for r in run.status().replicas} == {ReplicaState.CANCELLED}


def test_a_cancelled_rank(run):
    run.cancel([1])
    assert refused(run, 1) == "over"
    assert find_target(run.store, "exp", None).rows()[0][1].attempt is None


@pytest.mark.parametrize("rank", [2, -1, True, "0"])
def test_a_rank_that_the_run_does_not_have(run, rank):
    with pytest.raises(InvalidSpec) as caught:
        atoll.join("exp", rank=rank, store=run.store.uri)
    assert caught.value.fields == ("rank",)


def test_a_run_of_a_later_version(run, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "0.0.1")
    assert refused(run) == "too_old"


def test_a_run_on_another_backend(run):
    record = json.loads(bytes(run.store.get(KEYS.run())))
    run.store.put(KEYS.run(), json.dumps({**record, "executor": "local"}).encode())
    run.store.delete(KEYS.join_part(0))
    assert refused(run) == "not_for_machines"


def test_a_run_that_was_not_started(run):
    run.store.delete(KEYS.join_part(0))
    run.store.delete(KEYS.handle())
    assert refused(run) == "not_started"
    journal.record_undone(run.store, "exp", "a part was refused")
    assert refused(run) == "not_started"


def test_a_run_that_is_being_deleted(run):
    journal.record_deleted(run.store, "exp")
    assert refused(run) == "deleted"


def test_code_that_is_not_on_this_machine(run):
    record = json.loads(bytes(run.store.get(KEYS.run())))
    for entry in ("nowhere_to_be_found:main", "missing_script.py"):
        record["spec"]["task"]["entry"] = entry
        run.store.put(KEYS.run(), json.dumps(record).encode())
        assert refused(run) == "code"
    digest = "0" * 64
    record["spec"]["task"] |= {"entry": "job:main", "code": {**record["spec"]["task"]["code"], "kind": "bundle"}}
    record["spec"]["task"]["code"]["digest"] = digest
    run.store.put(KEYS.run(), json.dumps(record).encode())
    assert refused(run) == "code"
    run.store.put(bundle(digest), b"")
    assert find_target(run.store, "exp", None).launch == 1


def test_a_secret_that_this_machine_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    run = launched(tmp_path, secrets={"TOKEN": "env:NOT_SET_HERE"})
    with pytest.raises(InvalidSpec) as caught:
        atoll.join("exp", store=run.store.uri)
    assert caught.value.fields == ("secrets.TOKEN",)
    assert list(run.store.list(KEYS.starts_prefix())) == []


def test_an_unknown_run(run):
    with pytest.raises(RunNotFound):
        atoll.join("other", store=run.store.uri)


def test_another_plan_of_the_same_launch_is_a_conflict(run):
    other = registry.executor("join", silent_after_s=5)
    plan = other.plan(RunContext("exp", run.store.uri), run.spec.placement)
    with pytest.raises(Conflict) as caught:
        other.submit(plan)
    assert len(caught.value.differences) == 1
    assert run.executor.submit(run.plan()) == run.handle


def test_a_part_of_a_run_on_several_backends_gives_only_its_own_ranks(run):
    record = json.loads(bytes(run.store.get(KEYS.run())))
    run.store.put(KEYS.run(), json.dumps({**record, "executor": "several"}).encode())
    run.store.delete(KEYS.join_part(0))
    plan = run.executor.plan(RunContext("exp", run.store.uri, first_rank=3, world_size=5), run.spec.placement)
    handle = run.executor.submit(plan)
    target = find_target(run.store, "exp", None)
    assert [row.rank for _, row in target.rows()] == [3, 4]
    assert target.parts[0].part.world_size == 5
    with pytest.raises(InvalidSpec):
        atoll.join("exp", rank=0, store=run.store.uri)
    run.executor.cancel(handle, [1])
    states = [replica.state for replica in run.executor.status(handle).replicas]
    assert states == [ReplicaState.PENDING, ReplicaState.CANCELLED]
    assert refused(run, 4) == "over"


@pytest.mark.parametrize(
    "record",
    [
        {"spec": [], "executor": "join"},
        {"spec": {}, "executor": 7},
        {"spec": {}, "executor": "join"},
        {"spec": {"task": {"code": {"kind": "image"}, "entry": 7}}, "executor": "join"},
        {"spec": {"task": {"code": {"kind": "image"}, "entry": "::"}}, "executor": "join"},
    ],
)
def test_a_damaged_record_is_an_error_of_the_store(run, record):
    run.store.put(KEYS.run(), json.dumps(record).encode())
    for look in (lambda: find_target(run.store, "exp", None), lambda: atoll.attach("exp", store=run.store.uri)):
        with pytest.raises(StoreError) as caught:
            look()
        assert caught.value.reason == "damaged"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"spec": {}, "executor": "join", "rounds_of": "x"}'])
def test_a_damaged_record_of_a_resume_is_an_error_of_the_store(run, data):
    run.store.put(RunKeys("exp", 2).resume(), data)
    for look in (lambda: find_target(run.store, "exp", None), lambda: journal.newest_rounds(run.store, "exp")):
        with pytest.raises(StoreError) as caught:
            look()
        assert caught.value.reason == "damaged"


@pytest.mark.parametrize("format_no", [None, "seven"])
def test_a_format_that_is_not_a_number_is_of_a_later_version(run, format_no):
    record = {**journal.read_run(run.store, "exp"), "format": format_no}
    run.store.put(KEYS.run(), json.dumps(record).encode())
    assert refused(run) == "too_old"
