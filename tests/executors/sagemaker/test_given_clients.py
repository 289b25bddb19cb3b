"""Clients that the caller gives: the SDK is not imported, errors are recognized by their answer, gaps are named."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import given_clients
import pytest
from given_clients import CONTEXT, Refusal, Service, executor

from atoll.errors import (
    AuthError,
    BackendError,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    Conflict,
    InvalidSpec,
    StopFailed,
)
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.request import job_name
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState


def mock(**answers: Any) -> MagicMock:
    """A mock whose description of every job is the same."""
    client = MagicMock()
    client.describe_training_job.return_value = {"TrainingJobStatus": "InProgress", **answers}
    return client


def submitted(made: SageMakerTrainingExecutor, replicas: int = 2) -> RunHandle:
    return made.submit(made.plan(CONTEXT, Placement(replicas=replicas)))


@pytest.mark.process
def test_no_call_imports_the_sdk():
    done = subprocess.run([sys.executable, given_clients.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("imported") == []
    assert said == {
        "states": ["running", "running"],
        "lines": ["hello"],
        "last": ["hello"],
        "run": "exp",
        "replaced": ["running", "running"],
        "details": ["-00000-r1", "-00001"],
        "cancelled": ["cancelled", "cancelled"],
        "checks": {"region": True, "jobs": False, "logs": True},
        "strays": ["-00000"],
    }


def test_logs_without_a_client_for_them_are_an_error_that_lets_the_caller_read_the_store(monkeypatch):
    service = Service()
    made = executor(service)
    handle = submitted(made, 1)
    for name in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError) as caught:
        list(made.logs(handle, 0))
    assert "logs_client" in (caught.value.hint or "")


def test_streams_with_names_of_their_own_are_read_but_not_those_of_another_rank():
    logs = MagicMock()
    made = executor(Service(), logs_client=logs)
    handle = submitted(made, 1)
    other = f"{job_name(handle.native_id, 0)}0/algo-1"
    logs.describe_log_streams.return_value = {"logStreams": [{"logStreamName": name} for name in ("stream", other)]}
    logs.get_log_events.side_effect = lambda logStreamName, **_: {"events": [{"message": logStreamName}]}  # noqa: N803
    assert list(made.logs(handle, 0, tail=5)) == ["stream"]


@pytest.mark.parametrize("missing", ["create_training_job", "describe_training_job", "stop_training_job"])
def test_a_client_without_a_call_is_refused_by_name_at_once(missing):
    calls = {"create_training_job", "describe_training_job", "stop_training_job"} - {missing}
    for client in (MagicMock(spec=list(calls)), SimpleNamespace(**dict.fromkeys(calls, print), **{missing: "text"})):
        with pytest.raises(InvalidSpec, match=f"has no `{missing}`") as caught:
            executor(client)
        assert caught.value.fields == ("sagemaker_client",)


def test_a_call_that_only_some_methods_need_is_refused_there():
    made = executor(Service(), logs_client=object())
    handle = submitted(made, 1)
    with pytest.raises(ConfigError, match="logs_client has no `describe_log_streams`"):
        list(made.logs(handle, 0))
    with pytest.raises(ConfigError, match="sagemaker_client has no `list_training_jobs`"):
        made.strays()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Refusal("ResourceLimitExceeded"), CapacityError),
        (Refusal("AccessDeniedException"), AuthError),
        (Refusal(status=403), AuthError),
        (Refusal("ThrottlingException"), BackendUnavailable),
        (Refusal(status=503), BackendUnavailable),
        (Refusal("ValidationException", "1 validation error detected"), BackendError),
        (ConnectionResetError("reset"), BackendUnavailable),
        (TimeoutError("late"), BackendUnavailable),
        (type("ReadTimeoutError", (Exception,), {})("late"), BackendUnavailable),
        (RuntimeError("boom"), BackendError),
        (KeyError("boom"), BackendError),
        (AttributeError("boom"), BackendError),
    ],
    ids=lambda value: str(value)[:24],
)
def test_errors_are_recognized_by_their_answer(raised, kind):
    client = mock()
    client.describe_training_job.side_effect = raised
    with pytest.raises(BackendError) as caught:
        executor(client).status(RunHandle("sagemaker", "us-east-1", "exp", 1))
    assert type(caught.value) is kind
    assert caught.value.__cause__ is raised
    assert str(raised) in caught.value.message


@pytest.mark.parametrize("raised", [Refusal(status=404), Refusal("ResourceNotFound"), Refusal("Gone", status=404)])
def test_a_job_that_is_not_found_is_lost(raised):
    client = mock()
    client.describe_training_job.side_effect = raised
    status = executor(client).status(RunHandle("sagemaker", "us-east-1", "exp", 1))
    assert status.replicas[0].state is ReplicaState.LOST


def test_an_answer_with_few_fields_is_enough():
    client = mock()
    made = executor(client)
    handle = submitted(made)
    replicas = made.status(handle).replicas
    assert [(r.state, r.native_id) for r in replicas] == [
        (ReplicaState.RUNNING, job_name(handle.native_id, rank)) for rank in range(2)
    ]
    assert made.origin(handle) is None
    rows = made.details(handle, [1])
    assert rows == [{"training_job_name": job_name(handle.native_id, 1), "billable_seconds": None}]


FULL = {"SecondaryStatus": "Training", "TrainingJobArn": "arn:aws:sagemaker:…", "CreationTime": 5}


@pytest.mark.parametrize(
    "answers", [{}, {"SecondaryStatus": "Training"}, {"SecondaryStatus": "Training", "RoleArn": "r"}]
)
def test_cancel_believes_a_stop_that_a_mock_accepted(answers):
    client = mock(**answers)
    made = executor(client)
    handle = submitted(made, 1)
    made.cancel(handle)
    client.stop_training_job.assert_called_once_with(TrainingJobName=job_name(handle.native_id, 0))


@pytest.mark.parametrize("answers", [FULL, {"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}])
def test_cancel_awaits_the_end_where_the_client_answers_as_sagemaker_does(answers):
    client = mock()
    made = executor(client)
    handle = submitted(made, 1)
    client.describe_training_job.return_value |= answers
    with pytest.raises(StopFailed) as caught:
        made.cancel(handle)
    assert caught.value.left_running == (job_name(handle.native_id, 0),)


@pytest.mark.parametrize("times", [{}, {"TrainingStartTime": 5, "TrainingEndTime": "late"}])
def test_a_constant_failure_ends_and_is_not_followed_for_ever(times):
    client = mock(TrainingJobStatus="Failed", FailureReason="AlgorithmError: , exit code: 7", **times)
    made = executor(client)
    handle = submitted(made)
    replicas = made.status(handle).replicas
    assert [(r.state, r.reason, r.exit_code) for r in replicas] == [(ReplicaState.FAILED, Reason.USER_ERROR, 7)] * 2
    assert replicas[0].started_at == times.get("TrainingStartTime")
    assert made.cancel(handle) is None


def test_an_answer_that_is_not_a_mapping_is_no_answer():
    made = executor(MagicMock())
    handle = submitted(made)
    for act in (lambda: made.status(handle), made.strays, lambda: made.details(handle, [0])):
        with pytest.raises(BackendError) as caught:
            act()
        assert caught.value.reason == "no_answer"


@pytest.mark.parametrize("listed", [None, {}, {"TrainingJobSummaries": [{}, None, {"TrainingJobName": "other"}]}])
def test_without_a_usable_list_each_job_is_described(listed):
    service = Service()
    if listed is not None:
        service.list_training_jobs = lambda **_: listed  # type: ignore[attr-defined]
    made = executor(service)
    handle = submitted(made, 3)
    service.calls.clear()
    assert [r.state for r in made.status(handle).replicas] == [ReplicaState.RUNNING] * 3
    assert service.calls == ["describe"] * 3


def test_a_taken_name_without_variables_or_tags_is_a_conflict():
    service = Service()
    made = executor(service)
    handle = submitted(made, 1)
    del service.jobs[job_name(handle.native_id, 0)]["Environment"]
    with pytest.raises(Conflict):
        submitted(made, 1)


def test_the_lists_of_boto3_are_not_asked_about_a_stand_in():
    made = executor(Service(), region="nowhere-north-1", instance_type="ml.q9.huge")
    plan = made.plan(CONTEXT, Placement(gpu="any"))
    assert plan.request["region"] == "nowhere-north-1"
    assert plan.request["jobs"][0]["ResourceConfig"]["InstanceType"] == "ml.q9.huge"
    with pytest.raises(InvalidSpec) as caught:
        executor(Service(), region="two words", instance_type="q9.huge")
    assert set(caught.value.fields) == {"region", "instance_type"}


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_stand_in_without_a_region_has_that_of_the_environment(monkeypatch, variable):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "eu-south-2")
    assert executor(MagicMock(), region=None).plan(CONTEXT, Placement()).request["region"] == "eu-south-2"
