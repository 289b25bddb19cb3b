"""`atoll doctor sagemaker`: what would be in the way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from atoll.executors.base import Check, Diagnoser
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.testing.bench import Call, Fault
from services.sagemaker.bench import SETTINGS


@pytest.fixture
def account(peer):
    """A bucket, a role and quotas."""
    import boto3

    boto3.client("s3").create_bucket(Bucket="bucket")
    boto3.client("iam").create_role(RoleName="replicas", AssumeRolePolicyDocument="{}")
    peer.quotas |= {"ml.g5.2xlarge for training job usage": 4.0, "ml.m5.xlarge for training job usage": 2.0}
    yield peer
    boto3.client("iam").delete_role(RoleName="replicas")


def found(executor: SageMakerTrainingExecutor) -> dict[str, Check]:
    return {check.name: check for check in executor.diagnose()}


def test_all_is_well(account, executor):
    assert isinstance(executor(), Diagnoser)
    checks = found(executor())
    assert all(check.ok for check in checks.values()), checks
    assert list(checks) == [
        "region", "credentials", "role", "bucket", "quota ml.g5.2xlarge", "quota ml.m5.xlarge", "jobs", "logs",
    ]  # fmt: skip
    assert "4" in checks["quota ml.g5.2xlarge"].message
    assert "UTC" not in checks["credentials"].message, "these keys have no end"


def test_each_thing_that_is_wrong_has_a_hint(account, executor):
    account.quotas["ml.g5.2xlarge for training job usage"] = 0.0
    checks = found(executor(output_s3_path="s3://no-such-bucket/x"))
    assert not checks["bucket"].ok
    assert not checks["quota ml.g5.2xlarge"].ok
    assert "Service Quotas" in checks["quota ml.g5.2xlarge"].hint
    assert not found(executor(role_arn="arn:aws:iam::999999999999:role/replicas"))["role"].ok
    assert not found(executor(role_arn="nobody"))["role"].ok
    assert not found(executor(role_arn="arn:aws:iam::123456789012:role/gone"))["role"].ok
    account.faults.fail(Call.DESCRIBE, Fault.FORBIDDEN)
    account.faults.fail(Call.LOG, Fault.FORBIDDEN)
    checks = found(executor())
    assert (checks["jobs"].ok, checks["logs"].ok) == (False, False)
    assert "policy" in checks["jobs"].hint


def test_nothing_set_is_told_thing_by_thing(peer):
    checks = found(SageMakerTrainingExecutor(region="us-east-1", calls_per_s=500))
    assert not checks["role"].ok
    assert not checks["bucket"].ok
    assert checks["quota ml.g5.2xlarge"].ok


def test_what_may_not_be_seen_is_no_failure(account, executor):
    account.faults.refuse("GetRole", "AccessDenied", "not authorized")
    account.faults.refuse("ListServiceQuotas", "AccessDeniedException", "not authorized")
    checks = found(executor())
    assert (checks["role"].ok, checks["quota ml.g5.2xlarge"].ok) == (True, True)


def test_no_region_and_no_credentials_end_it_early(peer, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    settings = {name: value for name, value in SETTINGS.items() if name != "region"}
    assert [(check.name, check.ok) for check in SageMakerTrainingExecutor(**settings).diagnose()] == [("region", False)]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    checks = found(SageMakerTrainingExecutor(**SETTINGS))
    assert list(checks) == ["region", "credentials"]
    assert not checks["credentials"].ok


def test_the_end_of_credentials_is_told(account, executor, tmp_path, monkeypatch):
    end = (datetime.now(UTC) + timedelta(minutes=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    script = tmp_path / "keys"
    keys = f'{{"Version":1,"AccessKeyId":"k","SecretAccessKey":"s","SessionToken":"t","Expiration":"{end}"}}'
    script.write_text(f"#!/bin/sh\necho '{keys}'\n")
    script.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    message = found(executor())["credentials"].message
    assert f"{end[:10]} {end[11:16]} UTC" in message
