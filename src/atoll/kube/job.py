"""Pure: the Indexed Job of a run, in which the completion index of a pod is its rank.

A failed rank fails alone, so that a quorum of the others goes on; with `fail_fast` it ends the Job. `backoffLimit`
stays unset: it would count the failures of all ranks together. Evictions are not counted as failures, and a rank is
replaced only after its old pod has ended, so that no rank runs twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.context import TIMED_OUT, TOO_OLD, RunContext
from atoll.kube.gang import GangParts
from atoll.kube.names import CONTAINER, TOKEN, job_annotations, job_labels
from atoll.spec import Placement

DEFAULT_TTL_S = 86_400
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10, 600


@dataclass(frozen=True)
class JobSettings:
    """What the Job has besides its pods."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    fail_fast: bool = False
    ttl_s: int | None = DEFAULT_TTL_S
    queue_timeout_s: float | None = None
    is_supervised: bool = True
    """Whether the container runs Atoll's supervisor, whose exit codes have a meaning; not with an own command."""


def indexed_job(
    context: RunContext,
    placement: Placement,
    settings: JobSettings,
    *,
    name: str,
    namespace: str,
    template: Mapping[str, Any],
    gang: GangParts,
) -> dict[str, Any]:
    """The Job without its token."""
    rules: list[dict[str, Any]] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    # Neither a used up time limit nor an image that is too old gets better.
    if placement.max_restarts and settings.is_supervised:
        codes = {"containerName": CONTAINER, "operator": "In", "values": sorted((TOO_OLD, TIMED_OUT))}
        rules.append({"action": "FailIndex", "onExitCodes": codes})
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": placement.replicas,
        "parallelism": placement.replicas,
        "backoffLimitPerIndex": placement.max_restarts,
        **({"maxFailedIndexes": 0} if settings.fail_fast else {}),
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",
        **({} if settings.ttl_s is None else {"ttlSecondsAfterFinished": settings.ttl_s}),
        **_deadline(placement, settings),
        **gang.job_spec,
        "template": dict(template),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {**settings.labels, **job_labels(context), **gang.job_labels},
            "annotations": {**settings.annotations, **job_annotations(context), **gang.job_annotations},
        },
        "spec": spec,
    }


def _deadline(placement: Placement, settings: JobSettings) -> dict[str, int]:
    """The time after which Kubernetes ends the whole Job: all waiting and all running that the settings allow.

    Kubernetes has no limit for waiting alone. A watching command ends a run that waits for longer than
    `queue_timeout_s`; without one, this limit does.
    """
    if settings.queue_timeout_s is None:
        return {}
    pauses = sum(min(_FIRST_PAUSE_S * 2**i, _LONGEST_PAUSE_S) for i in range(placement.max_restarts))
    running = (placement.timeout_s + placement.grace_s) * (placement.max_restarts + 1)
    return {"activeDeadlineSeconds": math.ceil(settings.queue_timeout_s + running + pauses)}


def with_token(job: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The Job with the digest of itself and of the rest of the request as an annotation."""
    text = json.dumps({"job": job, **rest}, sort_keys=True)
    token = hashlib.sha256(text.encode()).hexdigest()[:32]
    metadata = job["metadata"]
    return {**job, "metadata": {**metadata, "annotations": {**metadata["annotations"], TOKEN: token}}}


def token_of(job: Mapping[str, Any]) -> str | None:
    """Tells a Job of this request from another Job of the same name."""
    return (job.get("metadata", {}).get("annotations") or {}).get(TOKEN)
