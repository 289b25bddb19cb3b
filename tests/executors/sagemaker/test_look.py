"""Looking over the wire: few calls, the right word for each state, logs of every start."""

from __future__ import annotations

from threading import Thread
from typing import Any

import boto3
import pytest

from atoll.context import RunContext
from atoll.errors import AuthError, BackendError, StopFailed
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Call, Fault, entered, launched, let_go, over, until

CONTEXT = RunContext("exp", "s3://nowhere/exp")


def seeded(peer: Any, executor: Any, states: list[tuple[str, str]], **more: Any) -> Any:
    """A run whose jobs are in these states and never run."""
    made = executor()
    plan = made.plan(CONTEXT, Placement(replicas=len(states)))
    for body, (status, secondary) in zip(plan.request["jobs"], states, strict=True):
        peer.engine.seed(body, status, secondary, **more)
    return RunHandle(made.name, plan.request["region"], plan.request["label"], plan.replicas)


def counted(peer: Any, act: Any) -> dict[str, int]:
    peer.calls.clear()
    act()
    return {operation: count for (_, operation), count in peer.calls.items()}


@pytest.mark.parametrize(("replicas", "pages"), [(1, 1), (100, 1), (250, 3)])
def test_calls_of_a_status_round_grow_with_pages_and_not_with_replicas(peer, executor, replicas, pages):
    handle = seeded(peer, executor, [("InProgress", "Training")] * replicas)
    assert counted(peer, lambda: executor().status(handle)) == {"ListTrainingJobs": pages}


def test_jobs_that_are_over_well_or_stopped_need_no_description(peer, executor):
    handle = seeded(
        peer, executor, [("Completed", "Completed"), ("Stopped", "Stopped"), ("Stopped", "MaxRuntimeExceeded")]
    )
    assert counted(peer, lambda: executor().status(handle)) == {"ListTrainingJobs": 1}
    reasons = [replica.reason for replica in executor().status(handle).replicas]
    assert reasons == [Reason.OK, Reason.CANCELLED, Reason.TIMEOUT]


def test_why_a_job_failed_is_asked_once(peer, executor):
    states = [("Failed", "Failed"), ("InProgress", "Training")]
    handle = seeded(peer, executor, states, failure="AlgorithmError: , exit code: 7")
    asked = executor()
    first = counted(peer, lambda: asked.status(handle))
    again = counted(peer, lambda: asked.status(handle))
    assert (first, again) == ({"ListTrainingJobs": 1, "DescribeTrainingJob": 1}, {"ListTrainingJobs": 1})
    assert asked.status(handle).replicas[0].exit_code == 7


def test_a_job_missing_from_the_list_alone_is_not_lost(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")] * 3)
    peer.engine.jobs[f"{handle.native_id}-00001"].unseen["ListTrainingJobs"] = 10
    assert {replica.state for replica in executor().status(handle).replicas} == {ReplicaState.RUNNING}


def test_a_job_that_vanished_is_lost_and_the_others_are_not(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")] * 3)
    peer.engine.forget(f"{handle.native_id}-00001")
    states = [replica.state for replica in executor().status(handle).replicas]
    assert states == [ReplicaState.RUNNING, ReplicaState.LOST, ReplicaState.RUNNING]


def test_a_malformed_request_is_an_error_and_not_lost(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")])
    peer.faults.refuse(Call.DESCRIBE, "ValidationException", "1 validation error detected: Value 'x' at 'nameContains'")
    with pytest.raises(BackendError, match="1 validation error"):
        executor().status(handle)


def test_a_token_that_expires_in_the_middle_of_a_wait_is_an_error_to_act_on(bench, peer):
    with launched(bench, "hold") as run:
        entered(bench, run)
        peer.faults.refuse(Call.DESCRIBE, "ExpiredTokenException", "The security token is expired")
        with pytest.raises(AuthError, match="The security token is expired") as caught:
            over(bench, run)
        assert "`aws sso login`" in (caught.value.hint or "")
        peer.faults.heal()
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_stop_that_is_refused_for_another_reason_is_raised_after_the_others_were_stopped(peer, executor):
    peer.engine.admits.clear()
    made = executor()
    handle = made.submit(made.plan(CONTEXT, Placement(replicas=3)))
    peer.faults.fail(Call.STOP, Fault.FORBIDDEN, nth=2, times=1)
    with pytest.raises(StopFailed) as caught:
        executor().cancel(handle)
    assert caught.value.left_running == (f"{handle.native_id}-00001",)
    assert isinstance(caught.value.__cause__, AuthError)
    left = [job for job in peer.engine.jobs.values() if not job.is_over]
    assert [job.name for job in left] == [f"{handle.native_id}-00001"]


def test_an_unclear_validation_error_is_not_taken_for_stopped(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")])
    peer.faults.refuse(Call.STOP, "ValidationException", "1 validation error detected")
    with pytest.raises(BackendError, match="1 validation error"):
        executor().cancel(handle)


def test_a_stop_that_finds_nothing_is_not_believed_while_the_job_is_seen_to_run(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")])
    peer.faults.fail(Call.STOP, Fault.NOT_FOUND)
    with pytest.raises(BackendError, match="Requested resource not found"):
        executor().cancel(handle)


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_start_of_a_container_is_in_the_log_in_order_of_time(bench, peer):
    lines = ["from attempt"]
    with launched(bench, "say", args={"lines": lines, "then_hold": True}) as run:
        until(bench, "the first line is there", lambda: list(run.executor.logs(run.handle, 0)))
        next(iter(peer.engine.jobs.values())).interrupt()
        until(bench, "the second start is there", lambda: len(list(run.executor.logs(run.handle, 0))) == 2)
        let_go(bench, run)
        assert list(run.executor.logs(run.handle, 0)) == lines * 2
        assert list(run.executor.logs(run.handle, 0, tail=1)) == lines
        assert list(run.executor.logs(run.handle, 0, follow=True)) == lines * 2
    assert peer.calls["logs", "DescribeLogStreams"] > 0


@pytest.mark.parametrize("follow", [False, True])
def test_empty_pages_are_not_the_end_of_a_log(bench, peer, follow):
    lines = [f"line {number}" for number in range(5)]
    with launched(bench, "say", args={"lines": lines}) as run:
        over(bench, run)
        peer.empty_pages = 4
        assert list(run.executor.logs(run.handle, 0, follow=follow)) == lines
        assert peer.empty_pages == 0


def test_follow_waits_for_what_is_delivered_late(bench, peer):
    peer.log.lag_s = 0.4
    patient = bench.executor(log_lag_s=1.5)
    with launched(bench, "say", args={"lines": ["late"], "unfinished": "later"}, executor=patient) as run:
        over(bench, run)
        assert list(run.executor.logs(run.handle, 0, follow=True)) == ["late", "later"]


def test_the_stores_copy_is_shown_where_cloudwatch_has_none(bench, peer):
    with launched(bench, "say", args={"lines": ["kept"]}) as run:
        over(bench, run)
        peer.log.forget(run.handle.native_id)
        assert list(run.logs(0)) == ["kept"]
        assert list(run.logs(0, follow=True)) == ["kept"]
        peer.faults.fail(Call.LOG, Fault.FORBIDDEN)
        assert list(run.logs(0)) == ["kept"]


def test_a_long_log_is_complete_and_its_tail_is_read_from_the_end(bench, peer):
    lines = [f"{number}" for number in range(12_000)]
    with launched(bench, "say", args={"lines": lines}) as run:
        over(bench, run)
        assert list(run.executor.logs(run.handle, 0)) == lines
        peer.calls.clear()
        assert list(run.executor.logs(run.handle, 0, tail=3)) == lines[-3:]
        assert peer.calls["logs", "GetLogEvents"] == 1


def test_logs_are_read_in_the_region_of_the_handle(bench):
    with launched(bench, "say", args={"lines": ["here"]}) as run:
        over(bench, run)
        assert list(bench.executor(region="eu-west-3").logs(run.handle, 0)) == ["here"]


def test_following_ends_when_the_run_is_cancelled(bench):
    with launched(bench, "say", args={"lines": ["one"], "then_hold": True}) as run:
        seen: list[str] = []
        reader = Thread(target=lambda: seen.extend(run.executor.logs(run.handle, 0, follow=True)))
        reader.start()
        until(bench, "the line was followed", lambda: contract_jobs.starts(bench.store, run.id))
        run.executor.cancel(run.handle)
        reader.join(bench.patience_s)
        assert not reader.is_alive()
        assert seen[:1] == ["one"]


def test_a_job_that_was_stopped_by_hand_did_not_end_because_of_itself(bench):
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        stopped = run.executor.status(run.handle).replicas[1].native_id
        boto3.client("sagemaker").stop_training_job(TrainingJobName=stopped)
        run.wait(bench.patience_s, fail_fast=True)
        over(bench, run)
        words = [replica.message for replica in run.status().replicas]
        assert "rank 1" in words[0]
        assert words[1].startswith("Stopped")


def test_details_are_the_names_the_bill_and_the_model_of_jobs_that_are_over(bench, peer):
    with launched(bench, "echo", 2) as run:
        over(bench, run)
        names = [f"{run.handle.native_id}-0000{rank}" for rank in (1, 0)]
        rows: list[dict[str, Any]] = []
        calls = counted(peer, lambda: rows.extend(run.executor.details(run.handle, [1, 0])))
        assert calls == {"DescribeTrainingJob": 2}
        assert [row["training_job_name"] for row in rows] == names
        assert [row["model_artifacts"] for row in rows] == [
            f"s3://bucket/output/{name}/output/model.tar.gz" for name in names
        ]
        assert all(isinstance(row["billable_seconds"], int) and row["billable_seconds"] >= 1 for row in rows)


def test_details_of_a_job_that_runs_or_vanished_have_no_bill_and_no_model(peer, executor):
    handle = seeded(peer, executor, [("InProgress", "Training")] * 2)
    peer.engine.forget(f"{handle.native_id}-00001")
    names = [f"{handle.native_id}-0000{rank}" for rank in range(2)]
    assert executor().details(handle, range(2)) == [
        {"training_job_name": name, "billable_seconds": None} for name in names
    ]


def test_a_program_of_the_image_runs_with_the_variables_of_a_replica(bench):
    program = "import os; print(os.environ['REPLICA_RANK'], os.environ['WORLD_SIZE'], os.environ['LR'])"
    made = bench.executor(command=["python", "-c", program])
    plan = made.plan(RunContext("own", bench.store_uri), Placement(replicas=2, env={"LR": "0.1"}))
    handle = made.submit(plan)
    until(bench, "both have ended", lambda: made.status(handle).is_terminal)
    assert [replica.state for replica in made.status(handle).replicas] == [ReplicaState.SUCCEEDED] * 2
    assert [list(made.logs(handle, rank)) for rank in range(2)] == [["0 2 0.1"], ["1 2 0.1"]]
