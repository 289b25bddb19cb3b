"""Pacing and patience on a clock that only moves when somebody sleeps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from botocore import exceptions

from atoll.context import RunContext
from atoll.errors import AuthError, BackendError, BackendUnavailable, StopFailed
from atoll.executors.sagemaker.client import RateLimiter
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import ReplicaState
from atoll.testing.fakes import FakeClock

HANDLE = RunHandle("sagemaker", "us-east-1", "exp-0123456789ab", 1)


class Client:
    """What boto3 would be: answers in turn, the last one for ever. An exception among them is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.times, self.clock = list(answers), list[float](), FakeClock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "meta":
            raise AttributeError(name)

        def call(**_: Any) -> Any:
            self.times.append(self.clock.monotonic())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def said(code: str, status: int = 400) -> Exception:
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(answer, "ListTrainingJobs")  # type: ignore[no-any-return]


def page(status: str = "InProgress", secondary: str = "Training") -> dict[str, Any]:
    name = "exp-0123456789ab-00000"
    always = {"TrainingJobName": name, "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:1:training-job/{name}"}
    at = datetime(2026, 1, 2, tzinfo=UTC)
    summary = {**always, "CreationTime": at, "TrainingJobStatus": status, "SecondaryStatus": secondary}
    return {"TrainingJobSummaries": [summary]}


def executor(client: Client, **settings: Any) -> SageMakerTrainingExecutor:
    return SageMakerTrainingExecutor(region="us-east-1", sagemaker_client=client, clock=client.clock, **settings)


def test_turns_come_at_the_rate_after_the_first_few():
    clock = FakeClock()
    pace, times = RateLimiter(2.0, at_once=2, clock=clock), []
    for _ in range(6):
        pace.wait()
        times.append(round(clock.monotonic(), 6))
    assert [round(time - times[0], 6) for time in times] == [0, 0, 0.5, 1.0, 1.5, 2.0]
    clock.advance(10)
    pace.wait()
    pace.wait()
    start = clock.monotonic()
    pace.wait()
    assert clock.monotonic() - start == pytest.approx(0.5)


def test_many_status_calls_stay_below_two_lists_a_second():
    client = Client(page())
    asked = executor(client)
    for _ in range(30):
        assert asked.status(HANDLE).state is ReplicaState.RUNNING
    worst = max(sum(start <= time < start + 1.0 for time in client.times) for start in client.times)
    assert len(client.times) == 30
    assert worst <= 3, "a burst of two, then at most two in any second"


def test_throttling_is_outlasted_with_growing_and_scattered_pauses():
    pauses = []
    for _ in range(2):
        client = Client(*[said("ThrottlingException")] * 6, page())
        assert executor(client, list_calls_per_s=1000).status(HANDLE).state is ReplicaState.RUNNING
        gaps = [b - a for a, b in zip(client.times, client.times[1:], strict=False)]
        assert gaps[-1] > gaps[0], "pauses do not grow"
        pauses.append(gaps)
    assert pauses[0] != pauses[1], "two launchers would come back together"


def test_patience_ends():
    client = Client(said("ThrottlingException"))
    with pytest.raises(BackendUnavailable, match="ThrottlingException") as caught:
        executor(client, patience_s=30).status(HANDLE)
    assert isinstance(caught.value.__cause__, exceptions.ClientError)
    assert 30 <= client.times[-1] - client.times[0] < 45


def test_what_cannot_pass_is_not_tried_again():
    for code, kind in {"AccessDeniedException": AuthError, "ValidationException": BackendError}.items():
        client = Client(said(code))
        with pytest.raises(kind):
            executor(client).status(HANDLE)
        assert len(client.times) == 1


def test_credentials_that_expired_are_read_again_once():
    client = Client(said("ExpiredTokenException"), page())
    assert executor(client).status(HANDLE).state is ReplicaState.RUNNING
    client = Client(said("ExpiredTokenException"))
    with pytest.raises(AuthError, match="ExpiredToken"):
        executor(client).status(HANDLE)
    assert len(client.times) == 2


def test_a_broken_line_and_a_garbled_answer_are_tried_again():
    from botocore.parsers import ResponseParserError

    reset, garbled = exceptions.ConnectionClosedError(endpoint_url="http://peer"), ResponseParserError("<html>")
    assert executor(Client(reset, garbled, page())).status(HANDLE).state is ReplicaState.RUNNING
    with pytest.raises(BackendUnavailable, match="<html>"):
        executor(Client(garbled)).status(HANDLE)


def test_cancel_asks_again_while_a_stop_has_no_effect_and_gives_up_at_last():
    client = Client(page()["TrainingJobSummaries"][0])
    with pytest.raises(StopFailed) as caught:
        executor(client, stop_s=60).cancel(HANDLE)
    assert caught.value.left_running == (f"{HANDLE.native_id}-00000",)
    assert client.times[-1] - client.times[0] >= 60


def test_a_client_of_ones_own_needs_no_region(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    client = Client(page())
    given = {"role_arn": "arn:aws:iam::123456789012:role/r", "image_uri": "i", "output_s3_path": "s3://b/o"}
    made = SageMakerTrainingExecutor(sagemaker_client=client, clock=client.clock, **given)
    plan = made.plan(RunContext("exp", "s3://b/e"), Placement())
    assert RunHandle.parse(str(RunHandle(made.name, plan.request["region"], "exp", 1))).scope == ""
