"""The peer behaves as the service is known to, seen with nothing but boto3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import boto3
import pytest
from botocore import exceptions as vendor

from atoll.testing.bench import Call, Fault
from repository import TESTS


def body(name: str = "job", **more: Any) -> dict[str, Any]:
    code = more.pop("code", "print('hello', flush=True)")
    return {
        "TrainingJobName": name,
        "RoleArn": "arn:aws:iam::123456789012:role/replicas",
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", "-c", code],
        },
        "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        **more,
    }


@pytest.fixture
def sagemaker(peer) -> Any:
    return boto3.client("sagemaker")


def ended(sagemaker: Any, name: str = "job") -> dict[str, Any]:
    waiter = sagemaker.get_waiter("training_job_completed_or_stopped")
    with suppress(vendor.WaiterError):  # that is how it says "Failed"
        waiter.wait(TrainingJobName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 5000})
    return dict(sagemaker.describe_training_job(TrainingJobName=name))


def refused(call: Any, **request: Any) -> tuple[str, str]:
    with pytest.raises(vendor.ClientError) as caught:
        call(**request)
    return caught.value.response["Error"]["Code"], caught.value.response["Error"]["Message"]


def test_a_job_walks_through_the_states_to_its_end(sagemaker):
    sagemaker.create_training_job(**body())
    found = ended(sagemaker)
    assert found["TrainingJobStatus"] == "Completed"
    seen = [each["Status"] for each in found["SecondaryStatusTransitions"]]
    assert seen == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert found["BillableTimeInSeconds"] >= 1


def test_output_is_in_the_log_group_under_the_jobs_name(sagemaker):
    sagemaker.create_training_job(**body())
    ended(sagemaker)
    logs, group = boto3.client("logs"), "/aws/sagemaker/TrainingJobs"
    (stream,) = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix="job/algo-1-")["logStreams"]
    events = logs.get_log_events(logGroupName=group, logStreamName=stream["logStreamName"], startFromHead=True)
    assert [event["message"] for event in events["events"]] == ["hello"]
    by_time = {"logGroupName": group, "logStreamNamePrefix": "job/", "orderBy": "LastEventTime"}
    assert refused(logs.describe_log_streams, **by_time)[0] == "InvalidParameterException"


def test_failure_tells_the_exit_code(sagemaker):
    sagemaker.create_training_job(**body(code="raise SystemExit(5)"))
    assert "exit code: 5" in ended(sagemaker)["FailureReason"]


FAREWELL = """
import pathlib, signal, sys, time
def leave(*_):
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(60)
"""


def test_stop_gives_grace_and_a_second_one_is_refused_by_status(sagemaker, tmp_path):
    script = tmp_path / "farewell.py"
    script.write_text(FAREWELL)
    logs, group = boto3.client("logs"), "/aws/sagemaker/TrainingJobs"
    request = body(f"stop-{tmp_path.name.replace('_', '-')}")
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["python", str(script)]
    name = request["TrainingJobName"]

    def lines() -> list[str]:
        streams = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/")["logStreams"]
        pages = [logs.get_log_events(logGroupName=group, logStreamName=s["logStreamName"]) for s in streams]
        return [event["message"] for page in pages for event in page["events"]]

    sagemaker.create_training_job(**request)
    while lines() != ["up"]:
        assert sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "InProgress"
    sagemaker.stop_training_job(TrainingJobName=name)
    assert ended(sagemaker, name)["TrainingJobStatus"] == "Stopped"
    assert lines() == ["up", "bye"]
    assert refused(sagemaker.stop_training_job, TrainingJobName=name) == (
        "ValidationException",
        "The request was rejected because the training job is in status Stopped.",
    )


def test_past_its_limit_a_job_is_stopped_and_says_so(sagemaker):
    limit = {"StoppingCondition": {"MaxRuntimeInSeconds": 1}}
    sagemaker.create_training_job(**body(code="import time; time.sleep(60)", **limit))
    found = ended(sagemaker)
    assert (found["TrainingJobStatus"], found["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")


def test_refusals_are_worded_as_the_service_words_them(sagemaker):
    sagemaker.create_training_job(**body())
    assert refused(sagemaker.create_training_job, **body())[0] == "ResourceInUse"
    for bad in ({"name": "a" * 64}, {"name": "a.b"}, {"Environment": {"A": "x" * 513}}):
        code, message = refused(sagemaker.create_training_job, **body(**{"name": "other", **bad}))
        assert code == "ValidationException"
        assert " detected: Value " in message
    missing = ("ValidationException", "Requested resource not found.")
    assert refused(sagemaker.describe_training_job, TrainingJobName="gone") == missing
    assert refused(sagemaker.stop_training_job, TrainingJobName="gone") == missing
    with pytest.raises(vendor.ParamValidationError):
        sagemaker.create_training_job(**body(StoppingCondition={"MaxRuntimeInSeconds": 0}))


def test_a_deleted_job_gives_its_name_back(sagemaker):
    sagemaker.create_training_job(**body())
    ended(sagemaker)
    sagemaker.delete_training_job(TrainingJobName="job")
    made = sagemaker.create_training_job(**body())
    assert made["TrainingJobArn"].endswith("/job")


@pytest.mark.process
def test_it_starts_by_itself_and_leaves_when_told():
    command = [sys.executable, "-m", "services.sagemaker"]
    process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert process.stdout is not None
        name, _, endpoint = process.stdout.readline().strip().removeprefix("export ").partition("=")
        assert name == "AWS_ENDPOINT_URL"
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
        found = boto3.client("sagemaker", endpoint_url=endpoint, **keys).list_training_jobs()
        assert found["TrainingJobSummaries"] == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_answer_that_is_replaced_after_the_effect_is_the_one_that_was_asked_for(peer, sagemaker):
    peer.engine.admits.clear()
    peer.faults.fail(Call.CREATE, Fault.FORBIDDEN, after_effect=True)
    assert refused(sagemaker.create_training_job, **body())[0] == "AccessDeniedException"
    assert sagemaker.describe_training_job(TrainingJobName="job")["TrainingJobStatus"] == "InProgress"


def test_a_job_is_hidden_from_as_many_looks_as_asked_and_a_list_may_be_stale(peer, sagemaker):
    peer.engine.admits.clear()
    peer.engine.unseen_looks = {"ListTrainingJobs": 2, "DescribeTrainingJob": 1, "StopTrainingJob": 1}
    sagemaker.create_training_job(**body())
    listed = [len(sagemaker.list_training_jobs()["TrainingJobSummaries"]) for _ in range(3)]
    assert listed == [0, 0, 1]
    for call in (sagemaker.describe_training_job, sagemaker.stop_training_job):
        assert refused(call, TrainingJobName="job")[1] == "Requested resource not found."
    peer.engine.stale_lists = 1
    sagemaker.stop_training_job(TrainingJobName="job")
    (stale,) = sagemaker.list_training_jobs()["TrainingJobSummaries"]
    assert stale["TrainingJobStatus"] == "InProgress"
    assert ended(sagemaker)["TrainingJobStatus"] == "Stopped"
