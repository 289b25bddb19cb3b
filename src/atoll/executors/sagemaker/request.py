"""Pure: the bodies of CreateTrainingJob for a run, one for each rank, and the reasons why there are none.

The executor's `plan` calls `training_request`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from atoll.context import GRACE, MAX_RESTARTS, RENDEZVOUS, STORE, RunContext, rank_environment
from atoll.executors.base import Capabilities, check, store_problems
from atoll.executors.sagemaker.limits import limit_problems
from atoll.executors.sagemaker.machines import GPUS, Machine, chosen_machine, has_local_disks, price_notes
from atoll.executors.sagemaker.settings import CHECKPOINTS, JobSettings
from atoll.spec import Placement

CAPABILITIES = Capabilities(code=frozenset({"image", "bundle"}), resources=False, gpus=GPUS | {"any"})
ENTRYPOINT = ("python", "-m", "atoll.replica")
LAUNCH = "ATOLL_LAUNCH"
"""The variable with the launch token. A job's description contains it, so recognizing a job needs no second call."""
TOKEN_TAG = "atoll:launch"  # noqa: S105
RANK_DIGITS = 5
MOST_GRACE_S = 105.0
"""SageMaker kills a container 120 s after SIGTERM; the uploader needs the rest to store the outcome."""
_DEFAULT_WAIT_S = 3600
_REPORTED = (f"env.{STORE}:", f"env.{RENDEZVOUS}:")
"""Limits that `_context_problems` reports with the user's name for the setting."""
_JOB_NAME = re.compile(rf"(.+)-(\d{{{RANK_DIGITS}}})(?:-r([1-9]\d*))?\Z")
_UNTAGGABLE = re.compile(r"[^\w .:/=+\-@]")


def training_request(
    context: RunContext, placement: Placement, settings: JobSettings, region: str | None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why SageMaker cannot run it, and notes for the user."""
    problems = [*placement_problems(placement), *_context_problems(context, settings)]
    if settings.command and placement.max_restarts:
        rule = "the image's own program (`command`) has no supervisor that restarts it; leave it out"
        problems.append(f"max_restarts={placement.max_restarts}: {rule}")
    problems += settings.problems(has_image=placement.image is not None)
    machine = chosen_machine(
        placement.gpu, instance_type=settings.instance_type, cpu_instance_type=settings.cpu_instance_type
    )
    if isinstance(machine, str):  # continue with a placeholder, so that every other problem is reported too
        problems, machine = [*problems, machine], Machine("", None, 0)
    label = run_label(context, placement.max_restarts)
    jobs = [training_job(context, placement, settings, machine, place) for place in range(placement.replicas)]
    unset = {f"{name}:" for name in ("role_arn", "output_s3_path", "image_uri")}
    missing = {word for word in unset if any(problem.startswith(word) for problem in problems)}
    for body in (jobs[0], jobs[-1]):
        broken = (
            p for p in limit_problems(body) if not p.startswith(_REPORTED) and p.partition("=")[0] + ":" not in missing
        )
        problems += [problem for problem in broken if problem not in problems]
    request: dict[str, Any] = {"region": region, "label": label, "jobs": jobs}
    request |= {"first_rank": context.first_rank} if context.first_rank else {}
    return request, problems, list(_notes(placement, settings, machine))


def placement_problems(placement: Placement) -> Iterator[str]:
    """The parts of a placement that a training job does not support."""
    for problem in check(placement, CAPABILITIES):
        if not problem.startswith(
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


def run_label(context: RunContext, max_restarts: int = 0) -> str:
    """The prefix of all job names of a run; other runs have other prefixes."""
    return context.native_name(reserve=len(job_name("", 0, max_restarts)))


class JobName(NamedTuple):
    """The parts of the name of a job."""

    label: str
    rank: int
    replacement: int
    """0 for the first job of a rank, and n for the job that replaces job n - 1."""


def job_name(label: str, rank: int, replacement: int = 0) -> str:
    suffix = f"-r{replacement}" if replacement else ""
    return f"{label}-{rank:0{RANK_DIGITS}d}{suffix}"


def parsed_name(name: str) -> JobName | None:
    """The inverse of `job_name`; None if this is not the name of a replica's job."""
    found = _JOB_NAME.match(name)
    return None if found is None else JobName(found[1], int(found[2]), int(found[3] or 0))


def training_job(
    context: RunContext, placement: Placement, settings: JobSettings, machine: Machine, place: int
) -> dict[str, Any]:
    """The body of CreateTrainingJob for one rank: the first, second, … of the part, from 0. Its launch token is a
    digest of the rest."""
    name = job_name(run_label(context, placement.max_restarts), place)
    rank = context.first_rank + place
    body: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": placement.image or settings.image_uri,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": list(settings.command or ENTRYPOINT),
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
            **({MAX_RESTARTS: str(placement.max_restarts)} if placement.max_restarts else {}),
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
        parts["CheckpointConfig"] = {"S3Uri": where, "LocalPath": settings.checkpoint_local_path or CHECKPOINTS}
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


def _context_problems(context: RunContext, settings: JobSettings) -> Iterator[str]:
    yield from store_problems(context.store_uri, is_mounted=settings.store_is_mounted)
    if len(context.store_uri) > 512:
        yield f"store: {len(context.store_uri)} characters; SageMaker passes at most 512 to a replica"


def _notes(placement: Placement, settings: JobSettings, machine: Machine) -> Iterator[str]:
    """What a user should know; the price is last."""
    if settings.command:
        yield (
            f"command: the image runs `{shlex.join(settings.command)}` in place of `{shlex.join(ENTRYPOINT)}`, so a "
            "replica writes no outcome, no result and no log to the store, and a stop gives it 120 s instead of grace_s"
        )
    if placement.max_restarts:
        yield (
            f"restarts: at most {placement.max_restarts} for each replica, inside its machine and without a launcher; "
            "a lost machine is replaced only while `atoll run`, `atoll wait` or `Run.wait` watches"
        )
    if settings.keep_alive_s:
        yield f"warm pool: each machine is kept, and billed, up to {settings.keep_alive_s} s after its job"
    if has_local_disks(machine.name):
        yield f"{machine.name} has its own disks: SageMaker ignores volume_size_gb={settings.volume_size_gb}"
    yield from price_notes(
        machine,
        placement.gpu,
        replicas=placement.replicas,
        limit_s=placement.timeout_s,
        spot=settings.spot,
        own=settings.prices,
    )


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
