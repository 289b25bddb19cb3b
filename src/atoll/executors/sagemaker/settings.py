"""The settings of `atoll run --on sagemaker`: their names, defaults and rules.

`validation.check_settings` reads the rules from the annotations before anything is created. The rules between settings
(`JobSettings.problems`) are part of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from atoll.errors import did_you_mean
from atoll.executors.sagemaker import known
from atoll.executors.sagemaker.errors import EXECUTOR
from atoll.executors.sagemaker.machines import INSTANCE_TYPE, MACHINES, PRICES
from atoll.validation import (
    COUNT,
    INDEX,
    OBJECT,
    TEXT,
    Kind,
    a_list_of,
    a_table_of,
    between,
    is_number,
    is_text,
    settings_hint,
    shown,
)

CHECKPOINTS = "/opt/ml/checkpoints"
_LONGEST_S = 28 * 86_400
_NEEDED_CALLS = ("create_training_job", "describe_training_job", "stop_training_job")


def _is_word(value: Any) -> bool:
    return is_text(value) and not any(map(str.isspace, value))


def _is_s3(value: Any) -> bool:
    return _is_word(value) and re.match("(s3|https)://[^/]", value) is not None


def _is_instance_type(value: Any) -> bool:
    return isinstance(value, str) and INSTANCE_TYPE.match(value) is not None


_WORD = Kind("a text without spaces that is not empty", _is_word)
_TYPE = Kind("an instance type such as `ml.g5.2xlarge`", _is_instance_type, known=lambda: MACHINES)
Word = Annotated[str, _WORD]
S3Path = Annotated[str, Kind("an address such as `s3://bucket/prefix`", _is_s3)]
InstanceType = Annotated[str, _TYPE]
Words = Annotated[Sequence[str], a_list_of(_WORD)]
_COMMAND = a_list_of(TEXT)._replace(words='a list of texts that are not empty, such as `["python", "train.py"]`')
Command = Annotated[Sequence[str], _COMMAND]
Count = Annotated[int, COUNT]
Seconds = Annotated[float, Kind(f"seconds above 0, at most {_LONGEST_S}", between(1e-3, _LONGEST_S))]
Lag = Annotated[float, Kind(f"seconds from 0 to {_LONGEST_S}", between(0, _LONGEST_S))]
Rate = Annotated[float, Kind("calls a second, from 0.01 to 10000", between(0.01, 10_000))]
Client = Annotated[Any, OBJECT._replace(may_be_none=True)]
Region = Annotated[str, Kind("an AWS region such as `eu-west-1`", _is_word)]


@dataclass(frozen=True)
class JobSettings:
    """The settings of a training job. None, or an empty text, means that the user did not set it."""

    role_arn: Word = ""
    """The IAM role of the replicas."""
    image_uri: Word = ""
    """The image of placements that name none."""
    command: Command = ()
    """The image's own program, which runs in place of `python -m atoll.replica`."""
    output_s3_path: S3Path = ""
    """Where SageMaker copies /opt/ml/model after a job."""
    instance_type: InstanceType | None = None
    """The machine of runs with a GPU."""
    cpu_instance_type: InstanceType | None = None
    """The machine of runs without a GPU."""
    volume_size_gb: Count = 100
    spot: bool = False
    checkpoint_s3_uri: S3Path | None = None
    """SageMaker copies `checkpoint_local_path` of each rank to a folder below it."""
    checkpoint_local_path: Annotated[str, Kind("a path from `/`", lambda v: _is_word(v) and v[0] == "/")] | None = None
    max_wait_s: Count | None = None
    """With `spot`: the time limit plus the time to wait for machines; by default an hour more than the limit."""
    max_pending_s: Count | None = None
    keep_alive_s: Annotated[int, INDEX] | None = None
    """How long machines stay warm for the next job. They are billed for that time."""
    retry_attempts: Count | None = None
    """How often SageMaker restarts a job after an internal error of SageMaker; user errors are not retried."""
    security_group_ids: Words = ()
    subnets: Words = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    volume_kms_key: Word | None = None
    output_kms_key: Word | None = None
    prices: Annotated[
        Mapping[str, float], a_table_of(Kind("dollars an hour", lambda v: is_number(v) and v >= 0), key=_TYPE)
    ] = field(default_factory=dict)
    """Instance type -> dollars an hour; overrides the built-in table."""
    store_is_mounted: bool = False
    """Every replica sees the folder of a `file://` store under the same path, on a shared file system."""

    @staticmethod
    def value_problems(given: Mapping[str, Any]) -> Iterator[str]:
        """A client without the calls that are always needed, and a region and instance types that AWS does not have.

        A type in `prices` is accepted: boto3 may be older than it. With a client of the caller that is not one of
        boto3, nothing is compared with the lists of boto3, which may not be installed.
        """
        client = given.get("sagemaker_client")
        lacking = [verb for verb in _NEEDED_CALLS if client is not None and not callable(getattr(client, verb, None))]
        if lacking:
            yield f"sagemaker_client={shown(client)}: has no {', '.join(f'`{verb}`' for verb in lacking)}"
        if not known.may_use_sdk(client):
            return
        region, own = given.get("region"), given.get("prices") or {}
        if region is not None and region not in known.regions():
            meant = did_you_mean(region, known.regions())
            yield f"region={shown(region)}: an AWS region that the installed boto3 knows{meant}"
        for setting in ("instance_type", "cpu_instance_type"):
            name = given.get(setting)
            if name is None or name in MACHINES or name in PRICES or name in own or name in known.instance_types():
                continue
            meant = did_you_mean(name, known.instance_types())
            newer = (
                "" if meant else "; if it is newer than the installed boto3, upgrade boto3 or add its price to `prices`"
            )
            yield f"{setting}={shown(name)}: SageMaker has no such machine for training{meant}{newer}"

    def problems(self, *, has_image: bool) -> Iterator[str]:
        """Settings that are missing, contradict each other or would be ignored."""
        needed = {"role_arn": self.role_arn, "output_s3_path": self.output_s3_path}
        if not has_image:
            needed["image_uri"] = self.image_uri
        yield from (f"{name}: not set; SageMaker needs one" for name, value in needed.items() if not value)
        if self.spot and not self.checkpoint_s3_uri:
            yield "spot=true: AWS may take machines away at any time; set checkpoint_s3_uri to continue after that"
        if self.checkpoint_local_path and not self.checkpoint_s3_uri:
            yield f"checkpoint_local_path=`{self.checkpoint_local_path}`: has no effect without checkpoint_s3_uri"
        if self.max_wait_s is not None and not self.spot:
            yield f"max_wait_s={self.max_wait_s}: only a spot job waits for machines; set spot=true or leave it out"
        if self.spot and self.keep_alive_s:
            yield f"keep_alive_s={self.keep_alive_s}: spot machines have no warm pool; use one of the two"
        if bool(self.security_group_ids) != bool(self.subnets):
            yield "security_group_ids, subnets: set both or neither"
        ours = [name for name in self.tags if name.startswith("atoll:")]
        yield from (f"tags.{name}: names that begin with `atoll:` are set by Atoll" for name in ours)


def plan_hint(problems: Sequence[str]) -> str | None:
    """Where to set what a refused plan needs; None if no problem is about a setting."""
    settings = ("region", *(field.name for field in fields(JobSettings)))
    return settings_hint(EXECUTOR) if any(problem.startswith(settings) for problem in problems) else None
