"""SageMaker's settings: what cannot be right is refused before the first call and before the run id is taken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import boto3
import pytest

import atoll
from atoll.context import RunContext
from atoll.errors import InvalidSpec, Unsupported
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.settings import JobSettings
from atoll.serverless import SageMakerExecutor
from atoll.spec import Placement
from services.sagemaker.bench import HASTE, SETTINGS

CONTEXT = RunContext("exp", "s3://bucket/exp")
NEW = "ml.q9.huge"


def refused(**settings: Any) -> InvalidSpec:
    with pytest.raises(InvalidSpec) as caught:
        SageMakerTrainingExecutor(**{**SETTINGS, **settings})
    return caught.value


def unsupported(settings: dict[str, Any], context: RunContext = CONTEXT, **placement: Any) -> tuple[str, ...]:
    with pytest.raises(Unsupported) as caught:
        SageMakerTrainingExecutor(**{**SETTINGS, **settings}).plan(context, Placement(**placement))
    return caught.value.fields


def machine(settings: dict[str, Any], **placement: Any) -> str:
    plan = SageMakerTrainingExecutor(**{**SETTINGS, **settings}).plan(CONTEXT, Placement(**placement))
    return str(plan.request["jobs"][0]["ResourceConfig"]["InstanceType"])


@pytest.mark.parametrize(
    ("setting", "value", "meant"),
    [
        ("region", "us-esat-1", "`us-east-1`?"),
        ("region", "mars-north-1", ""),
        ("region", "us-east-1a", "`us-east-1`?"),
        ("instance_type", "ml.m5.xlrage", "`ml.m5.xlarge`?"),
        ("instance_type", "g5.2xlarge", "`ml.g5.2xlarge`?"),
        ("cpu_instance_type", "ml.g5.xxlarge", "`ml.g5."),
        ("cpu_instance_type", NEW, "`prices`"),
        ("image_uri", "", ""),
        ("image_uri", "two words", ""),
        ("role_arn", [], ""),
        ("output_s3_path", "bucket/x", "`s3://bucket/prefix`"),
        ("output_s3_path", "s3://", ""),
        ("volume_size_gb", -5, ""),
        ("volume_size_gb", 0, ""),
        ("volume_size_gb", "100", ""),
        ("volume_size_gb", 1.5, ""),
        ("spot", "yes", ""),
        ("max_wait_s", -1, ""),
        ("keep_alive_s", -1, ""),
        ("retry_attempts", 0, ""),
        ("checkpoint_local_path", "relative", ""),
        ("security_group_ids", "sg-1", ""),
        ("subnets", ["subnet-1", ""], ""),
        ("command", "python train.py", '`["python", "train.py"]`'),
        ("command", ["python", ""], ""),
        ("command", ["python", 5], ""),
        ("tags", {"team": 5}, ""),
        ("tags", ["team"], ""),
        ("prices", {"ml.m5.xlarge": math.nan}, ""),
        ("prices", {"ml.m5.xlarge": -1}, ""),
        ("prices", {"m5": 1}, ""),
        ("timeout_s", 0, ""),
        ("timeout_s", 1e300, ""),
        ("patience_s", -1, ""),
        ("stop_s", math.nan, ""),
        ("pause_s", 0, ""),
        ("log_lag_s", -0.1, ""),
        ("list_calls_per_s", 0, ""),
        ("calls_per_s", 1e-300, ""),
        ("store_is_mounted", "true", ""),
        ("sagemaker_client", "boto3", ""),
        ("clock", 5, ""),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(setting: str, value: Any, meant: str) -> None:
    error = refused(**{setting: value})
    assert error.fields == (setting,)
    assert meant in error.problems[0]


def test_all_problems_come_together_and_nothing_was_called_or_recorded(peer: Any, jobs: Path, tmp_path: Path) -> None:
    before = sum(peer.calls.values())
    settings = {**SETTINGS, "instance_type": "ml.m5.xlrage", "volume_size_gb": -1, "region": "nowhere",
                "keep_alive_s": 99_999_999}  # fmt: skip
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch(
            "jobs:echo", on="sagemaker", store=tmp_path / "store", run_id="r", settings=settings, gpu="MI300X", cpus=2
        )
    assert caught.value.fields == ("volume_size_gb", "region", "instance_type", "cpus", "store", "gpu", "keep_alive_s")
    assert sum(peer.calls.values()) == before
    assert not (tmp_path / "store").exists(), "the run id is taken"


def test_what_follows_from_a_wrong_value_is_not_reported(jobs: Path) -> None:
    given = {"on": "sagemaker", "store": "s3://bucket/x", "run_id": "r"}
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch("jobs:echo", **given, gpu="H1000", settings={**SETTINGS, "instance_type": "ml.g5.2xlarge"})
    assert caught.value.fields == ("gpu",), "without the GPU, the instance type would be ignored"
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch("jobs:echo", **given, settings={**SETTINGS, "spot": 1, "max_wait_s": 90_000, "role_arn": 5})
    assert set(caught.value.fields) == {"spot", "role_arn"}


def test_the_corrected_command_starts_the_run(peer: Any, jobs: Path, store: str) -> None:
    wrong = {**SETTINGS, **HASTE, "cpu_instance_type": "ml.m5.xlrage"}
    with pytest.raises(InvalidSpec):
        atoll.launch("jobs:echo", on="sagemaker", store=store, run_id="r", settings=wrong)
    peer.engine.admits.clear()
    run = atoll.launch("jobs:echo", on="sagemaker", store=store, run_id="r", settings={**SETTINGS, **HASTE})
    assert list(peer.engine.jobs) == [f"{run.handle.native_id}-00000"]
    run.cancel()


def test_a_type_that_boto3_does_not_know_yet_is_accepted_with_its_price() -> None:
    assert refused(instance_type=NEW).fields == ("instance_type",)
    assert machine({"instance_type": NEW, "prices": {NEW: 9.5}}, gpu="any:4") == NEW
    assert machine({"cpu_instance_type": NEW, "prices": {NEW: 9.5}}) == NEW
    assert machine({"cpu_instance_type": "ml.r8i.large"}) == "ml.r8i.large", "one that only boto3 knows"


@pytest.mark.parametrize(
    ("settings", "gpu", "fields"),
    [
        ({"instance_type": "ml.m5.xlarge"}, "any", ("instance_type",)),
        ({"instance_type": "ml.m5.xlarge"}, "A100", ("instance_type",)),
        ({"instance_type": "ml.g5.2xlarge"}, "A100", ("instance_type",)),
        ({"instance_type": "ml.g5.2xlarge"}, "A10G:4", ("instance_type",)),
        ({"instance_type": "ml.g7.2xlarge"}, "L4", ("instance_type",)),
        ({"instance_type": "ml.g5.2xlarge"}, "any:2", ("gpu",)),
        ({"instance_type": "ml.g5.2xlarge"}, None, ("instance_type",)),
        ({"checkpoint_local_path": "/x"}, None, ("checkpoint_local_path",)),
        ({"max_wait_s": 90_000}, None, ("max_wait_s",)),
    ],
)
def test_a_setting_that_would_be_ignored_is_an_error(settings: Any, gpu: str | None, fields: tuple[str, ...]) -> None:
    assert unsupported(settings, gpu=gpu) == fields


@pytest.mark.parametrize(
    ("settings", "gpu", "name"),
    [
        ({}, "A100", "ml.p4d.24xlarge"),
        ({}, None, "ml.m5.xlarge"),
        ({"instance_type": "ml.g5.12xlarge"}, "A10G:4", "ml.g5.12xlarge"),
        ({"instance_type": "ml.g5.12xlarge"}, "any", "ml.g5.12xlarge"),
        ({"instance_type": "ml.g7.2xlarge"}, "any", "ml.g7.2xlarge"),
        ({"instance_type": "ml.g5.12xlarge", "cpu_instance_type": "ml.c5.xlarge"}, None, "ml.c5.xlarge"),
        ({"cpu_instance_type": "ml.c5.xlarge"}, "L4", "ml.g6.xlarge"),
    ],
)
def test_a_setting_that_fits_the_run_is_used(settings: Any, gpu: str | None, name: str) -> None:
    assert machine(settings, gpu=gpu) == name


def test_a_store_that_the_machines_cannot_reach_is_refused() -> None:
    folder, memory = RunContext("exp", "file:///shared/exp"), RunContext("exp", "memory://exp")
    mounted = {"store_is_mounted": True}
    assert unsupported({}, folder) == unsupported({}, memory) == unsupported(mounted, memory) == ("store",)
    plan = SageMakerTrainingExecutor(**SETTINGS, **mounted).plan(folder, Placement())
    assert plan.request["jobs"][0]["Environment"]["ATOLL_STORE"] == folder.store_uri


def test_a_region_of_the_environment_is_checked_by_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "region"}
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-esat-1")
    monkeypatch.delenv("AWS_REGION", raising=False)
    with pytest.raises(Unsupported) as caught:
        SageMakerTrainingExecutor(**settings).plan(CONTEXT, Placement())
    assert caught.value.fields == ("region",)
    assert "`us-east-1`?" in caught.value.problems[0]
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(Unsupported) as caught:
        SageMakerTrainingExecutor(**settings).plan(CONTEXT, Placement())
    assert caught.value.fields == ("region",)
    assert "`--setting region=" in caught.value.problems[0]
    assert "[executors.sagemaker]" in str(caught.value.hint)


def test_a_client_of_ones_own_has_its_own_region() -> None:
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "endpoint_url": "http://127.0.0.1:1"}
    client = boto3.client("sagemaker", region_name="private-zone-7", **keys)
    own = {**{name: value for name, value in SETTINGS.items() if name != "region"}, "sagemaker_client": client}
    plan = SageMakerTrainingExecutor(**own).plan(CONTEXT, Placement())
    assert plan.request["region"] == "private-zone-7"
    with pytest.raises(Unsupported) as caught:
        SageMakerTrainingExecutor(**own, region="eu-west-1").plan(CONTEXT, Placement())
    assert caught.value.fields == ("region",), "it would be ignored"


def test_the_replica_protocol_checks_the_same_settings() -> None:
    given = {name: SETTINGS[name] for name in ("role_arn", "image_uri", "output_s3_path", "region")}
    with pytest.raises(InvalidSpec) as caught:
        SageMakerExecutor(**{**given, "image_uri": ""}, instance_type="ml.g5.2xlrage", volume_size_gb=0)
    assert set(caught.value.fields) == {"image_uri", "instance_type", "volume_size_gb"}
    args = {"rendezvous_uri": "s3://b/x", "trainer_module": "t", "trainer_fn": "f"}
    with pytest.raises(InvalidSpec) as caught:
        SageMakerExecutor(**given).launch_replicas(1, "t:f", args, gpu="ml.p9.48xlarge")
    assert caught.value.fields == ("cpu_instance_type",)
    with pytest.raises(Unsupported) as refused:
        SageMakerExecutor(**given, instance_type="ml.g5.12xlarge").launch_replicas(1, "t:f", args)
    assert refused.value.fields == ("instance_type",)
    with pytest.raises(Unsupported) as refused:
        SageMakerExecutor(**given).launch_replicas(1, "t:f", {**args, "rendezvous_uri": "file:///x"})
    assert refused.value.fields == ("store",)


def test_the_last_note_is_the_price() -> None:
    settings = {**SETTINGS, "spot": True, "checkpoint_s3_uri": "s3://b/c"}
    for placement in (Placement(gpu="A100"), Placement(gpu="any"), Placement()):
        notes = SageMakerTrainingExecutor(**settings).plan(CONTEXT, placement).notes
        assert "/h together" in notes[-1]


def test_a_command_takes_the_place_of_the_replica_program() -> None:
    command = ["sh", "-c", "train --epochs 3"]
    made = SageMakerTrainingExecutor(**SETTINGS, command=command)
    plan = made.plan(CONTEXT, Placement())
    assert plan.request["jobs"][0]["AlgorithmSpecification"]["ContainerEntrypoint"] == command
    assert made.command == tuple(command)
    assert plan.notes[0].startswith("command:")
    other = SageMakerTrainingExecutor(**SETTINGS, command=[*command, "x"]).plan(CONTEXT, Placement())
    assert other.request["jobs"][0]["Tags"] != plan.request["jobs"][0]["Tags"], "the launch tokens are equal"
    assert unsupported({"command": command}, max_restarts=1) == ("max_restarts",)
    assert unsupported({"command": ["x" * 257, *"y" * 100]}) == ("command", "command[0]")
    without = SageMakerTrainingExecutor(**SETTINGS)
    assert without.command == ()
    assert not any(note.startswith("command") for note in without.plan(CONTEXT, Placement()).notes)


def test_defaults_are_valid_values() -> None:
    made = SageMakerTrainingExecutor()
    assert made.settings == JobSettings()
