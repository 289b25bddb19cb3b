"""The status of a replica from what the service says about its job."""

from __future__ import annotations

import pytest

from atoll.context import GRACE, TIMED_OUT, TIMEOUT, RunContext
from atoll.executors.hf_jobs.request import job_body
from atoll.executors.hf_jobs.settings import JobSettings
from atoll.executors.hf_jobs.status import Job, replica_status
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState

FAILED, CANCELLED = ReplicaState.FAILED, ReplicaState.CANCELLED
ENVIRONMENT = {TIMEOUT: "3600", GRACE: "10"}
SERVICE_LIMIT_S = 3600 + 10 + 60


def test_the_service_ends_a_job_later_than_its_supervisor():
    body = job_body(RunContext("r", "s3://b/x"), Placement(timeout_s=3600), JobSettings(), "cpu-basic", 0)
    assert body["timeout"] == SERVICE_LIMIT_S
    assert {name: body["env"][name] for name in ENVIRONMENT} == ENVIRONMENT


@pytest.mark.parametrize(
    ("stage", "message", "running_s", "end"),
    [
        ("ERROR", f"Job failed with exit code: {TIMED_OUT}. Reason: Error", 3600, (FAILED, Reason.TIMEOUT)),
        ("ERROR", "Job failed with exit code: 3. Reason: Error", 3605, (FAILED, Reason.USER_ERROR)),
        ("ERROR", "", 3605, (FAILED, Reason.TIMEOUT)),
        ("ERROR", "", 3599, (FAILED, Reason.USER_ERROR)),
        ("ERROR", "Job failed with exit code: 137. Reason: Error", SERVICE_LIMIT_S, (FAILED, Reason.TIMEOUT)),
        ("ERROR", "Job was preempted", 100, (FAILED, Reason.PREEMPTED)),
        ("ERROR", "The machine was evicted", 100, (FAILED, Reason.PREEMPTED)),
        ("ERROR", "Job failed with exit code: 139. Reason: Error", 100, (FAILED, Reason.KILLED)),
        ("ERROR", "Job failed with exit code: 255. Reason: Error", 100, (FAILED, Reason.USER_ERROR)),
        ("CANCELED", "", 3605, (CANCELLED, Reason.CANCELLED)),
        ("CANCELED", "", SERVICE_LIMIT_S - 0.5, (FAILED, Reason.TIMEOUT)),
        ("CANCELED", "Job timeout", 100, (FAILED, Reason.TIMEOUT)),
    ],
)
def test_the_reason_of_an_end_comes_from_the_message_and_the_running_time(stage, message, running_s, end):
    status = replica_status(0, Job("id", stage, message, environment=ENVIRONMENT, running_s=running_s))
    assert (status.state, status.reason) == end
