"""What SageMaker says about a job, in our words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from atoll.executors.sagemaker.status import failure, is_over, needs_description, replica_status
from atoll.status import Reason, ReplicaState
from services.sagemaker.validation import service_model


def job(status: str, secondary: str | None = None, **more: Any) -> dict[str, Any]:
    found = {"TrainingJobName": "j", "TrainingJobStatus": status, "SecondaryStatus": secondary, **more}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("status", "secondary", "state", "reason"),
    [
        ("InProgress", "Starting", ReplicaState.PENDING, Reason.STARTING),
        ("InProgress", "Pending", ReplicaState.PENDING, Reason.WAITING),
        ("InProgress", "Downloading", ReplicaState.PENDING, Reason.STARTING),
        ("InProgress", "Training", ReplicaState.RUNNING, Reason.OK),
        ("InProgress", "Uploading", ReplicaState.RUNNING, Reason.OK),
        ("InProgress", "Interrupted", ReplicaState.PENDING, Reason.RESTARTING),
        ("InProgress", "Restarting", ReplicaState.PENDING, Reason.RESTARTING),
        ("InProgress", "SomethingNew", ReplicaState.RUNNING, Reason.OK),
        ("InProgress", None, ReplicaState.RUNNING, Reason.OK),
        ("Completed", "Completed", ReplicaState.SUCCEEDED, Reason.OK),
        ("Failed", "Failed", ReplicaState.FAILED, Reason.USER_ERROR),
        ("Stopping", "Stopping", ReplicaState.RUNNING, Reason.STOPPING),
        ("Stopped", "Stopped", ReplicaState.CANCELLED, Reason.CANCELLED),
        ("Stopped", "MaxRuntimeExceeded", ReplicaState.FAILED, Reason.TIMEOUT),
        ("Stopped", "MaxWaitTimeExceeded", ReplicaState.FAILED, Reason.TIMEOUT),
        ("Stopped", "Interrupted", ReplicaState.FAILED, Reason.PREEMPTED),
        ("Deleting", "Completed", ReplicaState.LOST, Reason.LOST),
        ("SomethingNew", "Other", ReplicaState.RUNNING, Reason.OK),
    ],
)
def test_states_and_secondary_states(status, secondary, state, reason):
    found = replica_status(3, job(status, secondary))
    assert (found.rank, found.state, found.reason, found.native_id) == (3, state, reason, "j")
    assert status in found.message
    assert is_over(job(status, secondary)) is state.is_terminal


def test_every_state_the_service_model_knows_has_an_answer():
    for status in service_model().shape_for("TrainingJobStatus").enum:
        for secondary in service_model().shape_for("SecondaryStatus").enum:
            assert replica_status(0, job(status, secondary)).message


def test_nothing_known_is_lost():
    assert replica_status(0, None).state is ReplicaState.LOST


def test_a_time_out_is_found_in_the_past_of_a_described_job():
    past = [{"Status": "Training"}, {"Status": "MaxRuntimeExceeded"}, {"Status": "Stopped"}]
    assert replica_status(0, job("Stopped", "Stopped", SecondaryStatusTransitions=past)).reason is Reason.TIMEOUT
    calm = [{"Status": "Interrupted"}, {"Status": "Training"}, {"Status": "Stopped"}]
    assert replica_status(0, job("Stopped", "Stopped", SecondaryStatusTransitions=calm)).reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        ("AlgorithmError: , exit code: 3", Reason.USER_ERROR, 3),
        ("AlgorithmError: Exit Code: 139", Reason.KILLED, 139),
        ("AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage \"boom\"", Reason.USER_ERROR, 1),
        ("AlgorithmError: CUDA out of memory, exit code: 1", Reason.OOM, 1),
        ("AlgorithmError: , exit code: 137", Reason.KILLED, 137),
        ("AlgorithmError: , exit code: 255", Reason.USER_ERROR, 255),
        ("ClientError: Please use an instance type with more memory, exit code: 137", Reason.OOM, 137),
        ("ClientError: Cannot pull image from ECR repository", Reason.IMAGE, None),
        ("ClientError: Data download failed", Reason.USER_ERROR, None),
        ("CapacityError: Unable to provision requested ML compute capacity.", Reason.CAPACITY, None),
        ("ResourceLimitExceeded: no more ml.p5", Reason.QUOTA, None),
        ("InternalServerError: We encountered an internal error. Please try again.", Reason.BACKEND, None),
        ("", Reason.USER_ERROR, None),
    ],
)  # fmt: skip
def test_why_a_job_failed_is_read_from_its_words(words, reason, code):
    assert failure(words) == (reason, code)
    found = replica_status(0, job("Failed", "Failed", FailureReason=words))
    assert (found.state, found.reason, found.exit_code) == (ReplicaState.FAILED, reason, code)


def test_a_description_is_needed_only_for_why():
    assert needs_description(job("Failed", "Failed"))
    assert not needs_description(job("Failed", "Failed", FailureReason="AlgorithmError"))
    assert needs_description(job("Stopped"))
    for other in (job("Stopped", "Stopped"), job("InProgress", "Training"), job("Completed", "Completed")):
        assert not needs_description(other)


def test_times_and_the_bill_are_told():
    moments = {
        "TrainingStartTime": datetime(2025, 1, 1, tzinfo=UTC),
        "TrainingEndTime": datetime(2025, 1, 2, tzinfo=UTC),
    }
    found = replica_status(0, job("Completed", "Completed", BillableTimeInSeconds=77, **moments))
    assert found.ended_at is not None
    assert found.started_at is not None
    assert found.ended_at - found.started_at == 86_400
    assert "77 s" in found.message
    assert replica_status(0, job("InProgress", "Training", **moments)).ended_at is None
