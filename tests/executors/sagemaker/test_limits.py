"""The table of limits is the one of the installed botocore, and every broken limit is told at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import Unsupported
from atoll.executors.sagemaker import limits
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.limits import CREATE_TRAINING_JOB, limit_problems
from atoll.executors.sagemaker.request import ENTRYPOINT, LAUNCH, training_request
from atoll.executors.sagemaker.settings import JobSettings
from atoll.spec import Placement
from services.sagemaker.bench import SETTINGS
from services.sagemaker.validation import problems as service_problems
from services.sagemaker.validation import service_model

CONTEXT = RunContext("exp", "s3://bucket/exp")
JOB = {name: value for name, value in SETTINGS.items() if name != "region"}
EVERYTHING = JobSettings(
    **JOB,
    spot=True,
    checkpoint_s3_uri="s3://bucket/c",
    max_wait_s=90_000,
    max_pending_s=3600,
    retry_attempts=2,
    security_group_ids=["sg-1"],
    subnets=["subnet-1"],
    tags={"team": "a"},
    volume_kms_key="alias/v",
    output_kms_key="alias/o",
)


def bodies(settings: JobSettings = EVERYTHING, **placement: Any) -> list[dict[str, Any]]:
    request, problems, _ = training_request(CONTEXT, Placement(**placement), settings, "us-east-1")
    assert problems == []
    return list(request["jobs"])


def assert_same_limits(shape: Any, model: Any, where: str = "") -> None:
    """Each row of ours is the service's own."""
    found = model.metadata
    if isinstance(shape, limits.Text):
        row = (found.get("min", 0), found.get("max"), found.get("pattern"))
        assert (shape.least, shape.most, shape.pattern) == row, where
    elif isinstance(shape, limits.Number):
        assert (shape.least, shape.most) == (found.get("min", 0), found.get("max")), where
    elif isinstance(shape, limits.Choice):
        assert model.type_name == "boolean" or model.enum, where
    elif isinstance(shape, limits.Each):
        assert (shape.least, shape.most) == (found.get("min", 0), found.get("max")), where
        assert_same_limits(shape.item, model.member, f"{where}[]")
    elif isinstance(shape, limits.Pairs):
        assert shape.most == found.get("max"), where
        assert_same_limits(shape.key, model.key, f"{where} key")
        assert_same_limits(shape.value, model.value, f"{where} value")
    else:
        for name, member in shape.members.items():
            assert_same_limits(member, model.members[name], f"{where}.{name}")


def test_every_row_of_the_table_is_the_installed_service_models():
    assert_same_limits(CREATE_TRAINING_JOB, service_model().operation_model("CreateTrainingJob").input_shape)


def test_everything_that_we_can_send_has_a_row_and_the_service_takes_it():
    warm = JobSettings(**JOB, keep_alive_s=60)
    for body in (*bodies(replicas=2, gpu="H100:8", env={"A": "1"}), *bodies(warm, gpu="A100")):
        assert limit_problems(body) == []
        assert service_problems("CreateTrainingJob", body) == []
    sent = {name for body in (*bodies(), *bodies(warm)) for name in body}
    assert sent == set(CREATE_TRAINING_JOB.members), "a row that nothing is checked by, or a member without one"


BREAKS: dict[str, tuple[list[str], Any]] = {
    "a name of 64": (["TrainingJobName"], "a" * 64),
    "a name with a dot": (["TrainingJobName"], "a.b"),
    "a name that ends in a dash": (["TrainingJobName"], "ab-"),
    "a long image": (["AlgorithmSpecification", "TrainingImage"], "i" * 256),
    "a long word": (["AlgorithmSpecification", "ContainerEntrypoint"], ["w" * 257]),
    "too many words": (["AlgorithmSpecification", "ContainerEntrypoint"], ["w"] * 101),
    "no words": (["AlgorithmSpecification", "ContainerEntrypoint"], []),
    "a role that is none": (["RoleArn"], "arn:aws:iam::1:role/replicas"),
    "an output path that is none": (["OutputDataConfig", "S3OutputPath"], "bucket/output"),
    "a long output path": (["OutputDataConfig", "S3OutputPath"], "s3://b/" + "p" * 1018),
    "a volume of nothing": (["ResourceConfig", "VolumeSizeInGB"], 0),
    "a warm pool of a day": (["ResourceConfig", "KeepAlivePeriodInSeconds"], 86_400),
    "six security groups": (["VpcConfig", "SecurityGroupIds"], ["sg-1"] * 6),
    "an odd subnet": (["VpcConfig", "Subnets"], ["subnet/1"]),
    "no time at all": (["StoppingCondition", "MaxRuntimeInSeconds"], 0),
    "more than 28 days": (["StoppingCondition"], {"MaxRuntimeInSeconds": 2_419_201, "MaxWaitTimeInSeconds": 2_419_201}),
    "a wait below the limit": (["StoppingCondition", "MaxWaitTimeInSeconds"], 5),
    "a short pending time": (["StoppingCondition", "MaxPendingTimeInSeconds"], 60),
    "51 tags": (["Tags"], [{"Key": f"k{i}", "Value": "v"} for i in range(51)]),
    "an odd tag": (["Tags"], [{"Key": "k", "Value": "a;b"}]),
    "a long tag": (["Tags"], [{"Key": "k", "Value": "v" * 257}]),
    "101 variables": (["Environment"], {f"N{i}": "" for i in range(101)}),
    "a long variable": (["Environment", "A"], "v" * 513),
    "an odd variable": (["Environment"], {"A-B": "1"}),
    "31 retries": (["RetryStrategy", "MaximumRetryAttempts"], 31),
    "a long checkpoint path": (["CheckpointConfig", "S3Uri"], "s3://b/" + "p" * 1018),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_the_service_would_refuse_we_refuse_first(name: str):
    path, value = BREAKS[name]
    body = copy.deepcopy(bodies()[0])
    target = body
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    assert service_problems("CreateTrainingJob", body), "the peer takes it, so this shows nothing"
    assert limit_problems(body)


def test_every_problem_is_told_at_once_in_the_users_words():
    executor = SageMakerTrainingExecutor(
        role_arn="me",
        output_s3_path="s3://" + "b" * 1024,
        image_uri="i" * 300,
        region="us-east-1",
        spot=True,
        keep_alive_s=60,
        subnets=["s"],
        retry_attempts=99,
        tags={"atoll:x": "1", "a;b": "2"},
    )
    placement = Placement(
        timeout_s=86_400 * 40, grace_s=110, cpus=2, memory_gib=1, gpu="H100:16",
        env={"LONG": "x" * 600, LAUNCH: "1"}, secrets={"T": "env:T"},
    )  # fmt: skip
    with pytest.raises(Unsupported) as caught:
        executor.plan(CONTEXT, placement)
    words = ["grace_s", "cpus", "memory_gib", f"env.{LAUNCH}", "secrets.T", "spot", "keep_alive_s",
             "security_group_ids", "tags.atoll:x", "gpu", "role_arn", "output_s3_path", "image", "timeout_s",
             "retry_attempts", "tags[4].Key", "env.LONG"]  # fmt: skip
    for word in words:
        assert word in caught.value.fields, caught.value.problems


def test_settings_that_are_missing_are_named_once():
    with pytest.raises(Unsupported) as caught:
        SageMakerTrainingExecutor(region="us-east-1").plan(CONTEXT, Placement())
    assert caught.value.fields == ("role_arn", "output_s3_path", "image_uri")


def test_a_long_store_and_memory_are_refused():
    executor = SageMakerTrainingExecutor(**SETTINGS)
    for uri in ("memory://here", "s3://bucket/" + "p" * 600):
        with pytest.raises(Unsupported) as caught:
            executor.plan(RunContext("exp", uri), Placement())
        assert caught.value.fields == ("store",)


def test_names_keep_rank_and_digest_whatever_the_run_is_called():
    names = set()
    for run_id in ("a" * 128, "a" * 127 + "b", "Ü" * 60, "x_y.z", "x-y-z"):
        request, _, _ = training_request(RunContext(run_id, "s3://b/e"), Placement(replicas=3), EVERYTHING, "r")
        for rank, body in enumerate(request["jobs"]):
            assert len(body["TrainingJobName"]) <= 63
            assert body["TrainingJobName"].endswith(f"-{rank:05d}")
            names.add(body["TrainingJobName"])
    assert len(names) == 15


def test_isolation_is_off_and_the_entry_point_is_the_replica():
    for body in bodies(replicas=2):
        assert body["EnableNetworkIsolation"] is False
        assert body["ResourceConfig"]["InstanceCount"] == 1
        assert body["AlgorithmSpecification"]["ContainerEntrypoint"] == list(ENTRYPOINT)
        assert "ContainerArguments" not in body["AlgorithmSpecification"]


def test_the_token_depends_on_all_the_rest():
    first = bodies()[0]["Environment"]["ATOLL_LAUNCH"]
    assert bodies()[0]["Environment"]["ATOLL_LAUNCH"] == first
    assert bodies(env={"A": "1"})[0]["Environment"]["ATOLL_LAUNCH"] != first
    assert bodies(timeout_s=5)[0]["Environment"]["ATOLL_LAUNCH"] != first
