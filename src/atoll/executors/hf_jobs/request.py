"""Pure: the arguments of `run_job` for a run, one set for each rank, and the reasons why there are none.

The executor's `plan` calls `job_request`. Secrets are references here; `submit` reads their values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from atoll.context import CLAIM, GRACE, MAX_RESTARTS, RESERVED, TIMEOUT, RunContext, rank_environment
from atoll.executors.base import Capabilities, check, store_problems
from atoll.executors.hf_jobs.settings import JobSettings
from atoll.spec import Placement

CAPABILITIES = Capabilities(
    code=frozenset({"image", "bundle"}), resources=False, secret_schemes=frozenset({"env"}), max_replicas=99_999
)
ENTRYPOINT = ("python", "-m", "atoll.replica")
MANAGED_BY, RUN, RANK, TOKEN = "managed-by", "atoll-run", "atoll-rank", "atoll-token"
"""The labels of a job. `atoll-token` is a digest of its request: the launch token."""
_JOB_ID = "JOB_ID"
"""The variable in which the service tells a container the id of its job."""
_MOST_GROUP_CHARS = 46
_SLACK_S = 60
"""The service's time limit comes so much later than the supervisor's, which stores how the replica ended."""
_CREDENTIALS: dict[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_",),
    "gcs": ("GOOGLE_",),
    "az": ("AZURE_",),
    "azure": ("AZURE_",),
}
"""Scheme of a store -> the beginnings of names of secrets that open it."""


def job_request(
    context: RunContext, placement: Placement, settings: JobSettings, flavor: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why Hugging Face cannot run it, and notes for the user."""
    secrets = secret_references(placement, settings)
    problems = [
        *_placement_problems(placement),
        *settings.problems(has_image=placement.image is not None),
        *_secret_problems(placement, settings),
        *store_problems(context.store_uri, is_mounted=settings.store_is_mounted),
        *([] if settings.store_is_open else _credential_problems(context.store_uri, {*secrets, *placement.env})),
    ]
    jobs = [job_body(context, placement, settings, flavor, place) for place in range(placement.replicas)]
    request: dict[str, Any] = {
        "namespace": settings.namespace,
        "label": run_label(context),
        "gpu": None if placement.gpu is None else str(placement.gpu),
        "secrets": secrets,
        "jobs": jobs,
        **({"first_rank": context.first_rank} if context.first_rank else {}),
    }
    return request, problems, list(_notes(placement, settings))


def run_label(context: RunContext) -> str:
    """The value of the label that all jobs of this launch, and no others, have."""
    return context.native_name(reserve=len(job_name("", 0)))


def job_name(label: str, rank: int) -> str:
    """The name of a job. Names are for people: the service does not keep them distinct."""
    return f"{label}-{rank:05d}"


def job_limit_s(timeout_s: float, grace_s: float) -> int:
    """When the service ends a job: after the supervisor has ended a replica with this limit and this grace."""
    return math.ceil(timeout_s + grace_s) + _SLACK_S


def secret_references(placement: Placement, settings: JobSettings) -> dict[str, str]:
    """Variable of a replica -> where the launcher finds its value."""
    return {**{name: f"env:{name}" for name in settings.secrets}, **placement.secrets}


def job_body(
    context: RunContext, placement: Placement, settings: JobSettings, flavor: str, place: int
) -> dict[str, Any]:
    """The arguments of `run_job` for one rank, without secrets: the first, second, … of the part, from 0. The launch
    token is a digest of the rest."""
    label, rank = run_label(context), context.first_rank + place
    body: dict[str, Any] = {
        "image": placement.image or settings.image,
        "command": list(ENTRYPOINT),
        "env": {
            **context.environment(placement.replicas),
            **rank_environment(rank, placement.rank_env),
            **placement.env,
            TIMEOUT: f"{placement.timeout_s:g}",
            GRACE: f"{placement.grace_s:g}",
            **({MAX_RESTARTS: str(placement.max_restarts)} if placement.max_restarts else {}),
            CLAIM: _JOB_ID,
        },
        "flavor": flavor,
        "timeout": job_limit_s(placement.timeout_s, placement.grace_s),
        "attempts": 1,  # the supervisor in the container restarts the replica
        "labels": {
            **settings.labels,
            "name": job_name(label, place),
            MANAGED_BY: "atoll",
            RUN: label,
            RANK: str(place),
        },
    }
    if settings.network:
        body["network_group"] = context.native_name(limit=_MOST_GROUP_CHARS)
        body["network_aliases"] = [f"rank-{rank}"]
    told = json.dumps([body, secret_references(placement, settings)], sort_keys=True)
    body["labels"][TOKEN] = hashlib.sha256(told.encode()).hexdigest()[:32]
    return body


def _placement_problems(placement: Placement) -> Iterator[str]:
    yield from (text for text in check(placement, CAPABILITIES) if not text.startswith(("cpus", "memory_gib")))
    sizes = {"cpus": placement.cpus, "memory_gib": placement.memory_gib}
    for name, size in sizes.items():
        if size is not None:
            yield f"{name}={size:g}: a job uses its whole machine; choose a flavor"


def _secret_problems(placement: Placement, settings: JobSettings) -> Iterator[str]:
    for name in settings.secrets:
        if name in RESERVED:
            yield f"secrets: `{name}` is set by Atoll"
        elif name in placement.env:
            yield f"secrets: `{name}` is also in `env`; leave one out"


def _credential_problems(store_uri: str, names: set[str]) -> Iterator[str]:
    """Why a replica could not open the store: a machine of Hugging Face has no credentials of its own."""
    wanted = _CREDENTIALS.get(store_uri.partition("://")[0], ())
    missing = [each for each in wanted if not any(name.startswith(each) for name in names)]
    if missing:
        what = " and ".join(f"`{each}…`" if each.endswith("_") else f"`{each}`" for each in missing)
        remedy = f"add {what} to `secrets`, or set store_is_open=true if replicas need none"
        yield f"store=`{store_uri}`: replicas have no credentials for it; {remedy}"


def _notes(placement: Placement, settings: JobSettings) -> Iterator[str]:
    if placement.max_restarts:
        yield (
            f"restarts: at most {placement.max_restarts} for each replica, inside its machine and without a launcher; "
            "a lost machine is not replaced"
        )
    if settings.network:
        yield "network: the replicas of this run can reach each other on every port"
