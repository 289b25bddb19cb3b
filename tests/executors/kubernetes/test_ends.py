"""How ranks end on the real control plane: state, reason, exit code, host and attempt of each."""

from __future__ import annotations

import signal

import pytest

from atoll.context import TIMED_OUT
from atoll.status import Reason, ReplicaState
from services.kubernetes.scenario import HOLD, Scenario, rows

PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST
NODES = {"node-1", "node-2"}


def test_all_ranks_succeed(scenario: Scenario):
    run = scenario.program("echo $REPLICA_RANK of $WORLD_SIZE", 3)
    status = scenario.ended(run)
    assert rows(status) == [(SUCCEEDED, Reason.OK, 0, 0)] * 3
    assert {row.host for row in status.replicas} <= NODES
    assert all(row.started_at is not None and row.ended_at is not None for row in status.replicas)
    assert [scenario.logs(run, rank) for rank in range(3)] == [[f"{rank} of 3"] for rank in range(3)]
    assert [row.state for row in run.status().replicas] == [SUCCEEDED] * 3


def test_one_rank_fails_and_the_others_go_on(scenario: Scenario):
    run = scenario.program("[ $REPLICA_RANK != 1 ] || { echo broken; exit 3; }", 3)
    status = scenario.ended(run)
    good = (SUCCEEDED, Reason.OK, 0, 0)
    assert rows(status) == [good, (FAILED, Reason.USER_ERROR, 3, 0), good]
    assert "broken" in status.replicas[1].message
    assert status.replicas[1].host in NODES


def test_one_rank_fails_and_the_run_ends_with_it(scenario: Scenario):
    script = f"[ $REPLICA_RANK != 1 ] || {{ sleep 0.5; exit 3; }}; {HOLD}"
    run = scenario.program(script, 3, fail_fast=True)
    status = scenario.ended(run)
    assert rows(status)[1] == (FAILED, Reason.USER_ERROR, 3, 0)
    for row in (status.replicas[0], status.replicas[2]):
        assert (row.state, row.reason) == (CANCELLED, Reason.CANCELLED)
        assert "stopped because rank 1 failed" in row.message


def test_the_decision_of_the_job_counts_before_its_pods_have_ended(scenario: Scenario):
    number = scenario.namespace.fault("ignore-sigterm")
    script = f"[ $REPLICA_RANK != 1 ] || exit 3; {HOLD}"
    run = scenario.program(script, fail_fast=True, grace_s=60)
    status = scenario.until(run, lambda found: "rank 1 failed" in found.replicas[0].message)
    kinds = {each["type"] for each in scenario.job(run)["status"]["conditions"]}
    assert "FailureTarget" in kinds
    assert "Failed" not in kinds
    assert rows(status)[1] == (FAILED, Reason.USER_ERROR, 3, 0)
    assert (status.replicas[0].state, status.replicas[0].reason) == (RUNNING, Reason.STOPPING)
    scenario.namespace.cluster.kubelet("remove_fault", number=number)
    scenario.namespace.send_signal(signal.SIGKILL, job=run.handle.native_id, index=0)
    assert rows(scenario.ended(run))[0][:2] == (CANCELLED, Reason.CANCELLED)


def test_a_rank_that_fails_is_started_again_as_often_as_allowed(scenario: Scenario):
    run = scenario.program("exit $((4 + REPLICA_RANK))", max_restarts=1)
    again = scenario.with_reason(run, Reason.RESTARTING)
    assert (again.state, again.attempt, again.exit_code) == (PENDING, 1, None)
    assert "exit code 4" in again.message
    status = scenario.ended(run)
    assert rows(status) == [(FAILED, Reason.USER_ERROR, 4, 1), (FAILED, Reason.USER_ERROR, 5, 1)]


def test_signals_and_lack_of_memory(scenario: Scenario):
    run = scenario.program("echo ready; exec sleep 1000", 4)
    scenario.running(run)
    job = run.handle.native_id
    scenario.namespace.send_signal(signal.SIGKILL, job=job, index=0, out_of_memory=True)
    scenario.namespace.send_signal(signal.SIGKILL, job=job, index=1)
    scenario.namespace.send_signal(signal.SIGSEGV, job=job, index=2)
    scenario.namespace.send_signal(signal.SIGTERM, job=job, index=3)
    status = scenario.ended(run)
    assert rows(status) == [
        (FAILED, Reason.OOM, 137, 0),
        (FAILED, Reason.KILLED, 137, 0),
        (FAILED, Reason.KILLED, 139, 0),
        (FAILED, Reason.KILLED, 143, 0),
    ]
    words = ("OOMKilled", "SIGKILL", "SIGSEGV", "SIGTERM")
    assert all(word in row.message for word, row in zip(words, status.replicas, strict=True))


def test_a_program_that_the_image_does_not_have(scenario: Scenario):
    run = scenario.program(["no-such-program"])
    status = scenario.ended(run)
    assert rows(status) == [(FAILED, Reason.IMAGE, 128, 0)] * 2
    assert all("StartError" in row.message and row.started_at is None for row in status.replicas)
    assert all(row.host in NODES for row in status.replicas)


def test_an_image_without_atoll(scenario: Scenario):
    run = scenario.entry("echo", image="python:3.11", python="python3")
    status = scenario.ended(run)
    assert [(row.state, row.reason, row.exit_code) for row in status.replicas] == [(FAILED, Reason.IMAGE, 1)] * 2
    assert "bootstrap" in status.replicas[0].message


def test_a_program_that_runs_for_too_long(scenario: Scenario):
    run = scenario.program(HOLD, timeout_s=1)
    status = scenario.ended(run)
    assert [row[:2] for row in rows(status)] == [(FAILED, Reason.TIMEOUT)] * 2
    assert "DeadlineExceeded" in status.replicas[0].message


def test_a_replica_that_runs_for_too_long_is_not_started_again(scenario: Scenario):
    run = scenario.entry("hold", 1, timeout_s=1, max_restarts=2)
    assert rows(scenario.ended(run)) == [(FAILED, Reason.TIMEOUT, TIMED_OUT, 0)]
    name = run.handle.native_id
    job = scenario.namespace.until("jobs", name, lambda found: bool(found and found["status"].get("failedIndexes")))
    assert job is not None
    assert job["status"]["failedIndexes"] == "0"


def test_a_run_that_waits_and_runs_for_too_long_is_ended_by_the_job(scenario: Scenario):
    run = scenario.program(HOLD, cpus=100_000, timeout_s=1, grace_s=0, queue_timeout_s=1)
    status = scenario.ended(run)
    assert [row[:2] for row in rows(status)] == [(FAILED, Reason.TIMEOUT)] * 2
    assert "DeadlineExceeded" in status.replicas[0].message


def test_a_finished_run_that_kubernetes_removed_is_answered_from_the_store(scenario: Scenario):
    run = scenario.entry("say", args={"lines": ["a"]})
    path = scenario.namespace.path("jobs", run.handle.native_id)
    scenario.namespace.api.patch(path, {"spec": {"ttlSecondsAfterFinished": 1}})
    scenario.namespace.until("jobs", run.handle.native_id, lambda job: job is None)
    scenario.namespace.until_pods(run.handle.native_id, lambda pods: not pods)
    assert [row.state for row in scenario.status(run).replicas] == [LOST] * 2
    status = run.status()
    assert [(row.state, row.reason, row.exit_code) for row in status.replicas] == [(SUCCEEDED, Reason.OK, 0)] * 2
    run.result().raise_for_failures()
    assert list(run.logs(1)) == ["a"]
    run.cancel()
    assert [row.state for row in run.status().replicas] == [SUCCEEDED] * 2


def test_two_runs_at_once_do_not_see_each_other(scenario: Scenario):
    one = scenario.program("exit 3", run_id=f"{scenario.name}-a")
    other = scenario.program("echo fine", run_id=f"{scenario.name}-b")
    assert rows(scenario.ended(one)) == [(FAILED, Reason.USER_ERROR, 3, 0)] * 2
    assert rows(scenario.ended(other)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2
    one.cancel()
    assert scenario.logs(other, 0) == ["fine"]


@pytest.mark.parametrize("replicas", [1, 2, 11])
def test_names_that_are_as_long_as_kubernetes_allows(scenario: Scenario, replicas: int):
    run = scenario.program("true", replicas, run_id="x" * 63)
    assert len(run.handle.native_id) + len(str(replicas - 1)) <= 62
    assert rows(scenario.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 0)] * replicas
    scenario.transcripts.clear()  # the run has the name of no scenario
