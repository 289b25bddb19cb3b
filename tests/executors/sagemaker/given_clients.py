"""Stand-ins for clients of boto3, and a program that uses all methods with them and refuses to import the SDK.

This module imports nothing that imports the SDK.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import MagicMock

from atoll.context import RunContext
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.request import job_name
from atoll.spec import Placement
from atoll.testing.fakes import FakeClock

CONTEXT = RunContext("exp", "s3://bucket/exp")
SETTINGS: dict[str, Any] = {
    "role_arn": "arn:aws:iam::123456789012:role/replicas",
    "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "output_s3_path": "s3://bucket/output",
    "region": "us-east-1",
}
_SDK = ("boto3", "botocore")


class Refusal(Exception):
    """An error with an answer, of a class that botocore does not have."""

    def __init__(self, code: str = "", message: str = "", status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Service:
    """Jobs in memory, with the three calls that are always needed."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []

    def create_training_job(self, **body: Any) -> None:
        self.calls.append("create")
        name = body["TrainingJobName"]
        if name in self.jobs:
            raise Refusal("ResourceInUse", "taken")
        self.jobs[name] = {"TrainingJobStatus": "InProgress", "Environment": body["Environment"]}

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803
        self.calls.append("describe")
        if TrainingJobName not in self.jobs:
            raise Refusal("ValidationException", "Requested resource not found.")
        return self.jobs[TrainingJobName]

    def stop_training_job(self, *, TrainingJobName: str) -> None:  # noqa: N803
        self.calls.append("stop")
        self.describe_training_job(TrainingJobName=TrainingJobName)["TrainingJobStatus"] = "Stopped"


def executor(client: Any, **settings: Any) -> SageMakerTrainingExecutor:
    return SageMakerTrainingExecutor(**{**SETTINGS, "clock": FakeClock(), "sagemaker_client": client, **settings})


class NoSdk:
    """An import hook that refuses the SDK."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in _SDK:
            raise AssertionError(f"imports {name}")


def log_client() -> MagicMock:
    """A client of CloudWatch with one line in one stream of every job."""
    logs = MagicMock()
    logs.describe_log_streams.side_effect = lambda logStreamNamePrefix="", **_: {  # noqa: N803
        "logStreams": [{"logStreamName": f"{logStreamNamePrefix}/algo-1"}]
    }
    logs.get_log_events.return_value = {"events": [{"timestamp": 1, "message": "hello"}], "nextForwardToken": "t"}
    return logs


def walk() -> dict[str, Any]:
    """What the methods return, in turn."""
    service = Service()
    made = executor(service, logs_client=log_client(), cpu_instance_type="ml.r8i.large")
    plan = made.plan(CONTEXT, Placement(replicas=2, max_restarts=1))
    handle = made.submit(plan)
    assert made.submit(plan) == handle, "the jobs are not adopted"
    first = job_name(handle.native_id, 0)

    def states() -> list[str]:
        return [str(replica.state) for replica in made.status(handle).replicas]

    def ends(names: list[str]) -> list[str]:
        return [name.removeprefix(handle.native_id) for name in names]

    said: dict[str, Any] = {"states": states(), "lines": list(made.logs(handle, 0))}
    said["last"] = list(made.logs(handle, 0, tail=5))
    origin = made.origin(handle)
    said["run"] = origin and origin.run_id
    service.jobs[first] |= {"TrainingJobStatus": "Failed", "FailureReason": "InternalServerError: x"}
    made.replace(plan, 0, first)
    said["replaced"] = states()
    said["details"] = ends([row["training_job_name"] for row in made.details(handle, [0, 1])])
    made.cancel(handle)
    said["cancelled"] = states()
    said["checks"] = {check.name: check.ok for check in made.diagnose()}
    summary = {"TrainingJobName": first, "TrainingJobStatus": "InProgress"}
    service.list_training_jobs = lambda **_: {"TrainingJobSummaries": [summary]}  # type: ignore[attr-defined]
    said["strays"] = ends([stray.native_id for stray in made.strays()])
    made.with_settings(cpu_instance_type="ml.r9x.large")
    return said


if __name__ == "__main__":
    sys.meta_path.insert(0, NoSdk())  # type: ignore[arg-type]
    said = walk()
    said["imported"] = [name for name in sys.modules if name.partition(".")[0] in _SDK]
    sys.stdout.write(json.dumps(said))
