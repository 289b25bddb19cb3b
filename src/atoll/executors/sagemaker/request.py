"""Pure: the bodies of CreateTrainingJob for a run, one for each rank, and the reasons why there are none.

`JobSettings` are the user's settings. `chosen_machine` finds the instance type for a GPU, never one with another GPU.
`price_notes` says what a run may cost. `training_request`, which the executor's `plan` calls, puts them together.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.context import GRACE, RENDEZVOUS, STORE, RunContext, rank_environment
from atoll.errors import did_you_mean
from atoll.executors.base import Capabilities, check
from atoll.executors.sagemaker.limits import limit_problems
from atoll.spec import Gpu, Placement

# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class JobSettings:
    """The settings of `atoll run --on sagemaker`. `problems` says which a plan needs."""

    role_arn: str = ""
    """The IAM role of the replicas."""
    image_uri: str = ""
    """The image of placements that name none."""
    output_s3_path: str = ""
    """Where SageMaker copies /opt/ml/model after a job."""
    instance_type: str = "ml.g5.2xlarge"
    cpu_instance_type: str = "ml.m5.xlarge"
    volume_size_gb: int = 100
    spot: bool = False
    checkpoint_s3_uri: str | None = None
    """SageMaker copies `checkpoint_local_path` of each rank to a folder below it."""
    checkpoint_local_path: str = "/opt/ml/checkpoints"
    max_wait_s: int | None = None
    """With `spot`: the time limit plus the time to wait for machines; by default an hour more than the limit."""
    max_pending_s: int | None = None
    keep_alive_s: int | None = None
    """How long machines stay warm for the next job. They are billed for that time."""
    retry_attempts: int | None = None
    """How often SageMaker restarts a job after an internal error of SageMaker; user errors are not retried."""
    security_group_ids: Sequence[str] = ()
    subnets: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    volume_kms_key: str | None = None
    output_kms_key: str | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Instance type -> dollars an hour; overrides the built-in table."""

    def problems(self, *, has_image: bool) -> Iterator[str]:
        """Settings that are missing or contradict each other."""
        needed = {"role_arn": self.role_arn, "output_s3_path": self.output_s3_path}
        if not has_image:
            needed["image_uri"] = self.image_uri
        yield from (f"{name}: not set; SageMaker needs one" for name, value in needed.items() if not value)
        if self.spot and not self.checkpoint_s3_uri:
            yield "spot=true: AWS may take machines away at any time; set checkpoint_s3_uri to continue after that"
        if self.max_wait_s is not None and not self.spot:
            yield f"max_wait_s={self.max_wait_s}: only a spot job waits for machines; set spot=true or leave it out"
        if self.spot and self.keep_alive_s:
            yield f"keep_alive_s={self.keep_alive_s}: spot machines have no warm pool; use one of the two"
        if bool(self.security_group_ids) != bool(self.subnets):
            yield "security_group_ids, subnets: set both or neither"
        ours = [name for name in self.tags if name.startswith("atoll:")]
        yield from (f"tags.{name}: names that begin with `atoll:` are set by Atoll" for name in ours)


# ── machines ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Machine:
    """One instance type: the name and the number of its GPUs."""

    name: str
    gpu: str | None
    gpus: int

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus} × {self.gpu})" if self.gpu else self.name


INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+\Z")
# The smallest machine of each GPU comes first, because `chosen_machine` takes the first that is large enough.
_TYPES: dict[str, tuple[tuple[str, int], ...]] = {
    "T4": (("ml.g4dn.xlarge", 1), ("ml.g4dn.2xlarge", 1), ("ml.g4dn.4xlarge", 1), ("ml.g4dn.8xlarge", 1),
           ("ml.g4dn.16xlarge", 1), ("ml.g4dn.12xlarge", 4)),
    "V100": (("ml.p3.2xlarge", 1), ("ml.p3.8xlarge", 4), ("ml.p3.16xlarge", 8), ("ml.p3dn.24xlarge", 8)),
    "A10G": (("ml.g5.xlarge", 1), ("ml.g5.2xlarge", 1), ("ml.g5.4xlarge", 1), ("ml.g5.8xlarge", 1),
             ("ml.g5.16xlarge", 1), ("ml.g5.12xlarge", 4), ("ml.g5.24xlarge", 4), ("ml.g5.48xlarge", 8)),
    "L4": (("ml.g6.xlarge", 1), ("ml.g6.2xlarge", 1), ("ml.g6.4xlarge", 1), ("ml.g6.8xlarge", 1),
           ("ml.g6.16xlarge", 1), ("ml.g6.12xlarge", 4), ("ml.g6.24xlarge", 4), ("ml.g6.48xlarge", 8)),
    "L40S": (("ml.g6e.xlarge", 1), ("ml.g6e.2xlarge", 1), ("ml.g6e.4xlarge", 1), ("ml.g6e.8xlarge", 1),
             ("ml.g6e.16xlarge", 1), ("ml.g6e.12xlarge", 4), ("ml.g6e.24xlarge", 4), ("ml.g6e.48xlarge", 8)),
    "A100": (("ml.p4d.24xlarge", 8),),
    "A100-80GB": (("ml.p4de.24xlarge", 8),),
    "H100": (("ml.p5.4xlarge", 1), ("ml.p5.48xlarge", 8)),
    "H200": (("ml.p5en.48xlarge", 8), ("ml.p5e.48xlarge", 8)),
    "B200": (("ml.p6-b200.48xlarge", 8),),
    "B300": (("ml.p6-b300.48xlarge", 8),),
    "GB200": (("ml.p6e-gb200.36xlarge", 4),),
}  # fmt: skip
MACHINES = {name: Machine(name, gpu, count) for gpu, types in _TYPES.items() for name, count in types}
GPUS = frozenset(_TYPES)
_LOCAL_DISKS = re.compile(r"ml\.(g4dn|g5|g6|g6e|g7|g7e|p3dn|p4d|p4de|p5|p5e|p5en|p6\S*|trn1n?|trn2|[crm]\d+\w*d)\.")


def machine(name: str) -> Machine:
    """The machine of an instance type; a type that is not in the table is accepted without GPUs."""
    return MACHINES.get(name, Machine(name, None, 0))


def has_local_disks(name: str) -> bool:
    """Whether the machine has its own NVMe disks, so that SageMaker ignores the volume size."""
    return _LOCAL_DISKS.match(name) is not None


def chosen_machine(gpu: Gpu | None, *, instance_type: str, cpu_instance_type: str) -> Machine | str:
    """The machine for one replica, or the reason why there is none.

    `any`, and a GPU that the configured `instance_type` has, give that type. Another GPU gives its smallest machine.
    """
    if gpu is None:
        return _checked("cpu_instance_type", cpu_instance_type)
    own = _checked("instance_type", instance_type)
    if isinstance(own, str):
        return own
    if gpu.name == "any":
        is_large_enough = own.gpus >= gpu.count or own.name not in MACHINES
        return own if is_large_enough else f"gpu=`{gpu}`: instance_type=`{own.name}` has {own.gpus} × {own.gpu}"
    if gpu.name not in GPUS:
        offered = sorted(GPUS)
        return f"gpu=`{gpu}`: SageMaker has {', '.join(offered)}{did_you_mean(gpu.name, offered)}"
    if own.gpu == gpu.name and own.gpus >= gpu.count:
        return own
    fits = (each for each in MACHINES.values() if each.gpu == gpu.name and each.gpus >= gpu.count)
    most = max(each.gpus for each in MACHINES.values() if each.gpu == gpu.name)
    return next(fits, f"gpu=`{gpu}`: a machine of SageMaker has at most {most} × {gpu.name}")


def _checked(setting: str, name: str) -> Machine | str:
    if not INSTANCE_TYPE.match(name):
        return f"{setting}=`{name}`: an instance type looks like `ml.g5.2xlarge`{did_you_mean(name, list(MACHINES))}"
    return machine(name)


# ── prices ──────────────────────────────────────────────────────────────────────────────────────────────────────

DATE, REGION = "2025-11", "us-east-1"
"""Date and region of the table: approximate list prices for on-demand training, in dollars an hour."""

PRICES: dict[str, float] = {
    "ml.m5.large": 0.115, "ml.m5.xlarge": 0.23, "ml.m5.2xlarge": 0.461, "ml.m5.4xlarge": 0.922,
    "ml.c5.xlarge": 0.204, "ml.c5.2xlarge": 0.408, "ml.c5.4xlarge": 0.816,
    "ml.g4dn.xlarge": 0.736, "ml.g4dn.2xlarge": 0.94, "ml.g4dn.4xlarge": 1.505, "ml.g4dn.8xlarge": 2.72,
    "ml.g4dn.12xlarge": 4.89, "ml.g4dn.16xlarge": 5.44,
    "ml.p3.2xlarge": 3.825, "ml.p3.8xlarge": 14.688, "ml.p3.16xlarge": 28.152,
    "ml.g5.xlarge": 1.408, "ml.g5.2xlarge": 1.515, "ml.g5.4xlarge": 2.03, "ml.g5.8xlarge": 3.06,
    "ml.g5.12xlarge": 7.09, "ml.g5.16xlarge": 5.12, "ml.g5.24xlarge": 10.18, "ml.g5.48xlarge": 20.36,
    "ml.g6.xlarge": 1.127, "ml.g6.2xlarge": 1.222, "ml.g6.4xlarge": 1.654, "ml.g6.8xlarge": 2.518,
    "ml.g6.12xlarge": 5.752, "ml.g6.16xlarge": 4.246, "ml.g6.24xlarge": 8.344, "ml.g6.48xlarge": 16.688,
    "ml.g6e.xlarge": 2.605, "ml.g6e.2xlarge": 2.803, "ml.g6e.4xlarge": 3.755, "ml.g6e.8xlarge": 5.661,
    "ml.g6e.12xlarge": 13.116, "ml.g6e.16xlarge": 9.473, "ml.g6e.24xlarge": 18.833, "ml.g6e.48xlarge": 37.666,
    "ml.p4d.24xlarge": 25.251, "ml.p4de.24xlarge": 31.564,
    "ml.p5.4xlarge": 7.912, "ml.p5.48xlarge": 63.296, "ml.p5en.48xlarge": 72.795,
    "ml.p6-b200.48xlarge": 130.84,
}  # fmt: skip


def price_notes(
    machine: Machine, gpu: Gpu | None, *, replicas: int, limit_s: float, spot: bool, own: Mapping[str, float]
) -> Iterator[str]:
    """The cost of a run, and a warning if it pays for GPUs that it does not use."""
    price = own.get(machine.name, PRICES.get(machine.name))
    source = "your own price" if machine.name in own else f"list price of {REGION} in {DATE}, on demand; check yours"
    if gpu is not None and machine.gpus > gpu.count:
        cost = "price unknown" if price is None else f"${price:,.2f}/h"
        yield (
            f"warning: gpu=`{gpu}`: each replica pays for a whole {machine}: {cost} for "
            f"{machine.gpus} GPUs, of which it uses {gpu.count}"
        )
    if price is None:
        yield f"{replicas} × {machine}: price unknown; set `prices` to see one"
        return
    hours = limit_s / 3600
    together = price * replicas
    yield (
        f"{replicas} × {machine}: ${price:,.2f}/h each, ${together:,.2f}/h together, at most ${together * hours:,.2f} "
        f"at the limit of {hours:,.4g} h ({source})"
    )
    if spot:
        yield "managed spot: usually cheaper; waiting for a machine is not billed"


# ── the request ─────────────────────────────────────────────────────────────────────────────────────────────────

CAPABILITIES = Capabilities(code=frozenset({"image", "bundle"}), resources=False, gpus=GPUS | {"any"}, max_restarts=0)
ENTRYPOINT = ("python", "-m", "atoll.replica")
LAUNCH = "ATOLL_LAUNCH"
"""The variable with the launch token. A job's description contains it, so recognizing a job needs no second call."""
TOKEN_TAG = "atoll:launch"  # noqa: S105
MOST_GRACE_S = 105.0
"""SageMaker kills a container 120 s after SIGTERM; the uploader needs the rest to store the outcome."""
_DEFAULT_WAIT_S = 3600
_REPORTED = (f"env.{STORE}:", f"env.{RENDEZVOUS}:")
"""Limits that `_context_problems` reports with the user's name for the setting."""
_UNTAGGABLE = re.compile(r"[^\w .:/=+\-@]")


def training_request(
    context: RunContext, placement: Placement, settings: JobSettings, region: str | None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why SageMaker cannot run it, and notes for the user."""
    problems = [*placement_problems(placement), *_context_problems(context, region)]
    problems += settings.problems(has_image=placement.image is not None)
    machine = chosen_machine(
        placement.gpu, instance_type=settings.instance_type, cpu_instance_type=settings.cpu_instance_type
    )
    if isinstance(machine, str):  # continue with a placeholder, so that every other problem is reported too
        problems, machine = [*problems, machine], Machine(settings.instance_type, None, 0)
    label = run_label(context)
    jobs = [training_job(context, placement, settings, machine, rank) for rank in range(placement.replicas)]
    unset = {f"{name}:" for name in ("role_arn", "output_s3_path", "image_uri")}
    missing = {word for word in unset if any(problem.startswith(word) for problem in problems)}
    for body in (jobs[0], jobs[-1]):
        broken = (
            p for p in limit_problems(body) if not p.startswith(_REPORTED) and p.partition("=")[0] + ":" not in missing
        )
        problems += [problem for problem in broken if problem not in problems]
    request = {"region": region, "label": label, "jobs": jobs}
    return request, problems, list(_notes(context, placement, settings, machine))


def placement_problems(placement: Placement) -> Iterator[str]:
    """The parts of a placement that a training job does not support."""
    for problem in check(placement, CAPABILITIES):
        if problem.startswith("max_restarts"):
            yield f"{problem}; retry_attempts is for SageMaker's own errors"
        elif not problem.startswith(
            ("cpus", "memory_gib", "gpu")
        ):  # reported below and by `chosen_machine`, with the remedy
            yield problem
    sizes = {"cpus": placement.cpus, "memory_gib": placement.memory_gib}
    for name, size in sizes.items():
        if size is not None:
            yield f"{name}={size:g}: a training job uses its whole machine; choose instance_type or cpu_instance_type"
    if placement.grace_s > MOST_GRACE_S:
        yield f"grace_s={placement.grace_s:g}: SageMaker gives a container 120 s, so at most {MOST_GRACE_S:g} here"
    if LAUNCH in placement.env or placement.rank_env == LAUNCH:
        yield f"env.{LAUNCH}: this variable is set by Atoll"


def run_label(context: RunContext) -> str:
    """The prefix of all job names of a run; other runs have other prefixes."""
    return context.native_name(reserve=6)


def job_name(label: str, rank: int) -> str:
    return f"{label}-{rank:05d}"


def training_job(
    context: RunContext, placement: Placement, settings: JobSettings, machine: Machine, rank: int
) -> dict[str, Any]:
    """The body of CreateTrainingJob for one rank. Its launch token is a digest of the rest."""
    name = job_name(run_label(context), rank)
    body: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": placement.image or settings.image_uri,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": list(ENTRYPOINT),
        },
        "RoleArn": settings.role_arn,
        "OutputDataConfig": _without_none(S3OutputPath=settings.output_s3_path, KmsKeyId=settings.output_kms_key),
        "ResourceConfig": _without_none(
            InstanceType=machine.name,
            InstanceCount=1,
            VolumeSizeInGB=settings.volume_size_gb,
            VolumeKmsKeyId=settings.volume_kms_key,
            KeepAlivePeriodInSeconds=settings.keep_alive_s,
        ),
        "StoppingCondition": _stopping(placement, settings),
        # Always off: the container must reach the store.
        "EnableNetworkIsolation": False,
        "EnableManagedSpotTraining": settings.spot,
        "Environment": {
            **context.environment(placement.replicas),
            **rank_environment(rank, placement.rank_env),
            **placement.env,
            GRACE: f"{placement.grace_s:g}",
        },
        "Tags": list(_tags(context, placement, settings, rank)),
        **_optional(settings, name),
    }
    return _with_token(body)


def launch_token(body: Mapping[str, Any]) -> str:
    """Distinguishes a job of this request from another job of the same name."""
    return str(body["Environment"][LAUNCH])


def _stopping(placement: Placement, settings: JobSettings) -> dict[str, int]:
    limit = math.ceil(placement.timeout_s)
    wait = (settings.max_wait_s or limit + _DEFAULT_WAIT_S) if settings.spot else settings.max_wait_s
    return _without_none(
        MaxRuntimeInSeconds=limit, MaxWaitTimeInSeconds=wait, MaxPendingTimeInSeconds=settings.max_pending_s
    )


def _optional(settings: JobSettings, name: str) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if settings.checkpoint_s3_uri:
        where = f"{settings.checkpoint_s3_uri.rstrip('/')}/{name}"
        parts["CheckpointConfig"] = {"S3Uri": where, "LocalPath": settings.checkpoint_local_path}
    if settings.security_group_ids or settings.subnets:
        groups, subnets = list(settings.security_group_ids), list(settings.subnets)
        parts["VpcConfig"] = {"SecurityGroupIds": groups, "Subnets": subnets}
    if settings.retry_attempts is not None:
        parts["RetryStrategy"] = {"MaximumRetryAttempts": settings.retry_attempts}
    return parts


def _tags(context: RunContext, placement: Placement, settings: JobSettings, rank: int) -> Iterator[dict[str, str]]:
    ours = {
        "atoll:run": _UNTAGGABLE.sub("_", context.run_id),
        "atoll:rank": str(rank),
        "atoll:gpu": str(placement.gpu or "none"),
    }
    yield from ({"Key": key, "Value": value} for key, value in {**ours, **settings.tags}.items())


def _with_token(body: dict[str, Any]) -> dict[str, Any]:
    token = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]
    body["Environment"][LAUNCH] = token
    body["Tags"].append({"Key": TOKEN_TAG, "Value": token})
    return body


def _context_problems(context: RunContext, region: str | None) -> Iterator[str]:
    if region is None:
        yield "region: not set; set it here, or AWS_REGION, or `region` in ~/.aws/config"
    if context.store_uri.startswith("memory:"):
        yield f"store=`{context.store_uri}`: replicas are on other machines, which cannot see the memory of this one"
    if len(context.store_uri) > 512:
        yield f"store: {len(context.store_uri)} characters; SageMaker passes at most 512 to a replica"


def _notes(context: RunContext, placement: Placement, settings: JobSettings, machine: Machine) -> Iterator[str]:
    yield from price_notes(
        machine,
        placement.gpu,
        replicas=placement.replicas,
        limit_s=placement.timeout_s,
        spot=settings.spot,
        own=settings.prices,
    )
    if settings.keep_alive_s:
        yield f"warm pool: each machine is kept, and billed, up to {settings.keep_alive_s} s after its job"
    if has_local_disks(machine.name):
        yield f"{machine.name} has its own disks: SageMaker ignores volume_size_gb={settings.volume_size_gb}"
    if context.store_uri.startswith("file:"):
        yield f"warning: store=`{context.store_uri}`: SageMaker's machines see it only on a shared file system"


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
