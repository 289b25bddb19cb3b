"""Runs in AppWrappers on the real controller: how they end, restart, and what is left of them."""

from __future__ import annotations

import json

import pytest

from atoll.errors import Conflict, RunNotFound
from atoll.kube.appwrapper import PREFIX
from atoll.kube.names import ENDED
from atoll.runs.prepare import prepare
from atoll.status import Reason, ReplicaState
from services.kubernetes.scenario import HOLD, rows
from services.kubernetes.wrapper_scenario import WrapperScenario

SUCCEEDED, FAILED, CANCELLED = ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED
OK, USER_ERROR = Reason.OK, Reason.USER_ERROR
ONE_FAILS = f'if [ $REPLICA_RANK = 1 ]; then echo "no luck"; exit 3; fi; {HOLD}'


def test_every_replica_succeeds(wrapped: WrapperScenario):
    run = wrapped.program("echo hello from $REPLICA_RANK")
    assert rows(wrapped.ended(run)) == [(SUCCEEDED, OK, 0, 0)] * 2
    wrapped.until_phase(run, "Succeeded")
    assert rows(wrapped.status(run)) == [(SUCCEEDED, OK, 0, 0)] * 2
    assert list(run.executor.logs(run.handle, 1)) == ["hello from 1"]


def test_one_failed_rank_ends_all_and_its_end_outlives_its_pod(wrapped: WrapperScenario):
    run = wrapped.program(ONE_FAILS)
    ended = wrapped.ended(run)
    assert rows(ended) == [(CANCELLED, Reason.CANCELLED, None, 0), (FAILED, USER_ERROR, 3, 0)]
    wrapped.until_phase(run, "Failed")
    wrapped.namespace.until("jobs", run.handle.native_id, lambda job: job is None)
    after = wrapped.status(run)
    assert rows(after) == rows(ended)
    assert after.replicas[1].message == ended.replicas[1].message
    assert "no luck" in list(run.executor.logs(run.handle, 1))
    with pytest.raises(RunNotFound):
        list(run.executor.logs(run.handle, 0))


def test_the_limit_of_restarts_is_reached(wrapped: WrapperScenario):
    run = wrapped.program("echo try; exit 3", max_restarts=1)
    ended = wrapped.ended(run)
    assert {(row.state, row.attempt) for row in ended.replicas} <= {(FAILED, 1), (CANCELLED, 1)}
    found = wrapped.until_phase(run, "Failed")
    assert found["status"]["resettingCount"] == 1
    kept = wrapped.annotations(run)
    assert {3} == {way["exit_code"] for n in (0, 1) for way in json.loads(kept[f"{ENDED}{n}"]) if way["exit_code"]}
    assert list(run.executor.attempt_logs(run.handle, 0, 0)) == ["try"]


def test_a_restart_succeeds(wrapped: WrapperScenario, tmp_path):
    seen = f"{tmp_path}/seen-$REPLICA_RANK"
    run = wrapped.program(f"test -e {seen} || {{ touch {seen}; exit 5; }}", max_restarts=2)
    assert {(row.state, row.exit_code) for row in wrapped.ended(run).replicas} == {(SUCCEEDED, 0)}
    assert {row.attempt for row in wrapped.status(run).replicas} <= {1, 2}


def test_a_terminal_exit_code_is_not_retried(wrapped: WrapperScenario):
    run = wrapped.program(ONE_FAILS, max_restarts=2, terminal_exit_codes=[3, 4])
    assert rows(wrapped.ended(run)) == [(CANCELLED, Reason.CANCELLED, None, 0), (FAILED, USER_ERROR, 3, 0)]
    assert wrapped.until_phase(run, "Failed")["status"].get("resettingCount", 0) == 0


def test_only_retryable_exit_codes_are_retried(wrapped: WrapperScenario):
    run = wrapped.program("exit 3", 1, max_restarts=1, retryable_exit_codes=[4])
    assert rows(wrapped.ended(run)) == [(FAILED, USER_ERROR, 3, 0)]
    assert wrapped.until_phase(run, "Failed")["status"].get("resettingCount", 0) == 0


@pytest.mark.parametrize("kind", ["jobs", "services"])
def test_a_name_that_is_taken_is_refused_and_the_stranger_stays(wrapped: WrapperScenario, kind):
    executor = wrapped.executor(command=("true",), hostnames=True)
    draft = prepare("", on=executor, store=wrapped.store, run_id=wrapped.name, program=("true",), replicas=1)
    job, service = [each["template"] for each in draft.plan.request["appwrapper"]["spec"]["components"]]
    thing = job if kind == "jobs" else service
    thing = {**thing, "metadata": {"name": thing["metadata"]["name"]}}
    made = wrapped.namespace.make(kind, thing)
    with pytest.raises(Conflict):
        draft.submit()
    with pytest.raises(Conflict):
        executor.start(draft.plan)
    assert wrapped.namespace.get(kind, made["metadata"]["name"])["metadata"]["uid"] == made["metadata"]["uid"]
    assert wrapped.namespace.api.items(wrapped.namespace.path("appwrappers")) == []


def test_cancel_returns_when_the_pods_and_the_appwrapper_are_gone(wrapped: WrapperScenario):
    run = wrapped.program(HOLD)
    wrapped.running(run)
    run.cancel()
    assert wrapped.namespace.api.items(wrapped.namespace.path("appwrappers")) == []
    assert wrapped.namespace.api.items(wrapped.namespace.path("pods")) == []
    assert {row.state for row in run.status(progress=False).replicas} == {CANCELLED}


def test_every_annotation_is_as_it_was_sent(wrapped: WrapperScenario):
    run = wrapped.program("true", 1)
    wrapped.ended(run)
    sent = run.plan().request["appwrapper"]["metadata"]["annotations"]
    kept = wrapped.annotations(run)
    ours = {key: value for key, value in sent.items() if key.startswith(PREFIX)}
    assert ours == {key: kept[key] for key in ours}
    assert ours[f"{PREFIX}retryLimit"] == "0"
