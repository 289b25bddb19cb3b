"""Pure: the limits of CreateTrainingJob. botocore checks no maximum, no pattern and no rule between two fields.

The table mirrors botocore's service model; a test compares every row with the installed model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_RUNTIME_S = 28 * 86_400
_TAG = r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)"
_SPACES = " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_AS_PYTHON = {_TAG: rf"[\w{_SPACES}.:/=+\-@]*"}


@dataclass(frozen=True)
class Text:
    """A string: its length and pattern. `word` is the name of the user's setting."""

    least: int
    most: int
    pattern: str
    word: str = ""


@dataclass(frozen=True)
class Number:
    least: int
    most: int | None = None
    word: str = ""


@dataclass(frozen=True)
class Choice:
    """A boolean, or a value that only Atoll chooses."""


@dataclass(frozen=True)
class Each:
    """A list."""

    item: Any
    least: int
    most: int
    word: str = ""


@dataclass(frozen=True)
class Pairs:
    """A mapping of texts."""

    key: Text
    value: Text
    most: int
    word: str = ""


@dataclass(frozen=True)
class Fields:
    """A structure."""

    members: Mapping[str, Any]


_S3 = r"(https|s3)://([^/]+)/?(.*)"
_KMS = r"[a-zA-Z0-9:/_-]*"
_ID = r"[-0-9a-zA-Z]+"

CREATE_TRAINING_JOB = Fields(
    {
        "TrainingJobName": Text(1, 63, r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", "run_id"),
        "AlgorithmSpecification": Fields(
            {
                "TrainingImage": Text(0, 255, ".*", "image"),
                "TrainingInputMode": Choice(),
                "ContainerEntrypoint": Each(Text(0, 256, ".*"), 1, 100, "command"),
            },
        ),
        "RoleArn": Text(20, 2048, r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "role_arn"),
        "OutputDataConfig": Fields(
            {"S3OutputPath": Text(0, 1024, _S3, "output_s3_path"), "KmsKeyId": Text(0, 2048, _KMS, "output_kms_key")},
        ),
        "ResourceConfig": Fields(
            {
                "InstanceType": Choice(),
                "InstanceCount": Number(0),
                "VolumeSizeInGB": Number(0, word="volume_size_gb"),
                "VolumeKmsKeyId": Text(0, 2048, _KMS, "volume_kms_key"),
                "KeepAlivePeriodInSeconds": Number(0, 21_600, "keep_alive_s"),
            }
        ),
        "VpcConfig": Fields(
            {
                "SecurityGroupIds": Each(Text(0, 32, _ID), 1, 5, "security_group_ids"),
                "Subnets": Each(Text(0, 32, _ID), 1, 16, "subnets"),
            },
        ),
        "StoppingCondition": Fields(
            {
                "MaxRuntimeInSeconds": Number(1, word="timeout_s"),
                "MaxWaitTimeInSeconds": Number(1, word="max_wait_s"),
                "MaxPendingTimeInSeconds": Number(1800, 2_419_200, "max_pending_s"),
            }
        ),
        "Tags": Each(Fields({"Key": Text(1, 128, _TAG), "Value": Text(0, 256, _TAG)}), 0, 50, "tags"),
        "EnableNetworkIsolation": Choice(),
        "EnableManagedSpotTraining": Choice(),
        "CheckpointConfig": Fields(
            {
                "S3Uri": Text(0, 1024, _S3, "checkpoint_s3_uri"),
                "LocalPath": Text(0, 4096, ".*", "checkpoint_local_path"),
            },
        ),
        "Environment": Pairs(Text(0, 512, r"[a-zA-Z_][a-zA-Z0-9_]*"), Text(0, 512, r"[\S\s]*"), 100, "env"),
        "RetryStrategy": Fields({"MaximumRetryAttempts": Number(1, 30, "retry_attempts")}),
    },
)  # fmt: skip


def limit_problems(body: Mapping[str, Any]) -> list[str]:
    """Every limit that a request breaks: the name of the user's setting, the value and the rule."""
    return [*_problems(body, CREATE_TRAINING_JOB, ""), *_cross_problems(body)]


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches a pattern of the service model."""
    return re.fullmatch(_AS_PYTHON.get(pattern, pattern), text) is not None


def _problems(value: Any, shape: Any, where: str) -> Iterator[str]:
    word = getattr(shape, "word", "") or where
    if isinstance(shape, Text):
        yield from _text_problems(value, shape, word)
    elif isinstance(shape, Number):
        yield from _number_problems(value, shape, word)
    elif isinstance(shape, Each):
        if not shape.least <= len(value) <= shape.most:
            yield f"{word}: {len(value)} items; SageMaker takes {shape.least} to {shape.most}"
        for index, item in enumerate(value):
            yield from _problems(item, shape.item, f"{word}[{index}]")
    elif isinstance(shape, Pairs):
        if len(value) > shape.most:
            yield f"{word}: {len(value)} variables, those of Atoll included; SageMaker takes at most {shape.most}"
        for key, text in value.items():
            yield from _text_problems(key, shape.key, f"{word}.{_short(key)}")
            yield from _text_problems(text, shape.value, f"{word}.{_short(key)}")
    elif isinstance(shape, Fields):
        for name, item in value.items():
            yield from _problems(item, shape.members[name], f"{where}.{name}".removeprefix("."))


def _text_problems(value: str, shape: Text, word: str) -> Iterator[str]:
    if len(value) > shape.most:
        yield f"{word}: {len(value)} characters; SageMaker takes at most {shape.most}"
    elif len(value) < shape.least:
        yield f"{word}=`{value}`: {len(value)} characters; SageMaker takes at least {shape.least}"
    elif not matches(shape.pattern, value):
        yield f"{word}=`{_short(value)}`: does not fit SageMaker's pattern {shape.pattern}"


def _number_problems(value: Any, shape: Number, word: str) -> Iterator[str]:
    if not isinstance(value, int) or isinstance(value, bool):
        yield f"{word}=`{value}`: SageMaker takes a whole number"
    elif value < shape.least or (shape.most is not None and value > shape.most):
        top = "" if shape.most is None else f" to {shape.most}"
        yield f"{word}={value}: SageMaker takes {shape.least}{top}"


def _cross_problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Rules between fields, and rules that the service model does not have."""
    stopping = body["StoppingCondition"]
    runtime, wait = stopping["MaxRuntimeInSeconds"], stopping.get("MaxWaitTimeInSeconds")
    if runtime > MOST_RUNTIME_S:
        yield f"timeout_s={runtime}: a training job runs at most {MOST_RUNTIME_S} s (28 days)"
    if wait is not None and wait < runtime:
        yield f"max_wait_s={wait}: must not be below timeout_s={runtime}, because it includes the run time"
    if body["ResourceConfig"]["VolumeSizeInGB"] < 1:
        yield f"volume_size_gb={body['ResourceConfig']['VolumeSizeInGB']}: at least 1"
    keys = [tag["Key"].lower() for tag in body["Tags"]]
    yield from (f"tags.{key}: given twice; SageMaker ignores case" for key in sorted(set(keys)) if keys.count(key) > 1)
    yield from (
        f"tags.{key}: names that begin with `aws:` are reserved for AWS" for key in keys if key.startswith("aws:")
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
