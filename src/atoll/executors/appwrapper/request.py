"""Pure: the request of a run in an AppWrapper, and the reasons why there is none.

The Job inside is that of the Kubernetes executor, without restarts: a leftover failed pod would make the AppWrapper
fail. The plan has the AppWrapper in one dialect; with `dialect="auto"` it is wrapped again for the cluster's dialect
when the run is submitted (`in_dialect`). Its token is the same in every dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.context import TIMED_OUT, TOO_OLD, RunContext
from atoll.executors.appwrapper.settings import AUTO, AppWrapperSettings
from atoll.executors.base import Capabilities
from atoll.kube.appwrapper import (
    MOST_GRACE_S,
    PREFIX,
    Dialect,
    Retries,
    app_wrapper,
    component_problems,
    components_of,
    retry_annotations,
)
from atoll.kube.bootstrap import Wheel
from atoll.kube.gang import KUEUE_PRIORITY, KUEUE_QUEUE
from atoll.kube.job import with_token
from atoll.kube.names import (
    ATTEMPT,
    BATCH,
    MAX_RESTARTS,
    QUEUE_TIMEOUT,
    job_annotations,
    job_labels,
    wrapper_name,
)
from atoll.kube.pod import deadline_seconds, number
from atoll.kube.request import CAPABILITIES as JOB_CAPABILITIES
from atoll.kube.request import job_request
from atoll.spec import Placement

CAPABILITIES: Capabilities = replace(JOB_CAPABILITIES, fails_together=True)
_SUBDOMAIN = ("spec", "template", "spec", "subdomain")
_WARMUP_S = 1800.0
_NEVER_S = 10 * 365 * 86_400.0
"""The success TTL of an AppWrapper that is never removed; Go counts up to 292 years."""


def wrapper_request(
    context: RunContext,
    placement: Placement,
    settings: AppWrapperSettings,
    *,
    namespace: str,
    version: str,
    wheel: Wheel | str = "it was not made",
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why no AppWrapper can run it, and notes; the arguments are those of `job_request`."""
    name = wrapper_name(context, namespace, placement.replicas)
    inner = settings.job_settings()
    if settings.hostnames:
        inner = replace(inner, overlay=_with_default(settings.overlay, _SUBDOMAIN, name))
    request, problems, notes = job_request(
        context,
        replace(placement, max_restarts=0),
        inner,
        namespace=namespace,
        version=version,
        wheel=wheel,
        name=name,
        is_wrapped=True,
    )
    dialect, job = settings.shown_dialect, request.pop("job")
    components = [job, *([_service(name, namespace, context)] if settings.hostnames else [])]
    problems += settings.problems()
    problems += component_problems(dialect, components)
    if settings.queue is not None and not _has_requests(job):
        problems.append(f"queue=`{settings.queue}`: Kueue counts requests; set cpus and memory_gib, or a GPU")
    wrapper = app_wrapper(
        dialect,
        components,
        name=name,
        namespace=namespace,
        labels={**settings.labels, **job_labels(context), **_queue_labels(settings)},
        annotations=_annotations(context, placement, settings, dialect),
        suspend=True if settings.queue is not None else None,
        priority=settings.priority if isinstance(settings.priority, int) else None,
    )
    rest = {**request, "dialect": settings.dialect}
    notes = [*_notes(placement, settings, dialect), *notes]
    return {**rest, "appwrapper": with_token(wrapper, rest)}, problems, notes


def _with_default(patch: Any, path: Sequence[str], value: str) -> Any:
    """The patch with this value, unless it says something else about it. Its directives and nulls stay."""
    if not isinstance(patch, Mapping):
        return patch
    name, *rest = path
    return {**patch, name: _with_default(patch.get(name, {}), rest, value)} if rest else {name: value, **patch}


def in_dialect(wrapper: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The same AppWrapper in another dialect."""
    if wrapper["apiVersion"] == dialect.api_version:
        return dict(wrapper)
    metadata = wrapper["metadata"]
    annotations = dict(metadata["annotations"])
    if dialect.is_mcad:
        annotations = {key: value for key, value in annotations.items() if not key.startswith(PREFIX)}
    return app_wrapper(
        dialect,
        components_of(wrapper),
        name=metadata["name"],
        namespace=metadata["namespace"],
        labels=metadata["labels"],
        annotations=annotations,
        priority=wrapper["spec"].get("priority"),
    )


def retries_of(placement: Placement, settings: AppWrapperSettings) -> Retries:
    """What the controller is told about restarts and about removing what has ended."""
    warmup_s = settings.warmup_s or min(settings.queue_timeout_s or _WARMUP_S, MOST_GRACE_S)
    attempt_s = settings.admission_s + warmup_s + deadline_seconds(placement, settings) + settings.failure_grace_s
    between_s = settings.retry_pause_s + settings.forceful_deletion_s
    longest_s = attempt_s * (placement.max_restarts + 1) + between_s * placement.max_restarts
    # Neither a used up time limit nor an image that is too old gets better.
    ours = () if settings.command or not placement.max_restarts else (TOO_OLD, TIMED_OUT)
    codes = {*settings.terminal_exit_codes, *ours} - set(settings.retryable_exit_codes)
    return Retries(
        limit=placement.max_restarts,
        admission_s=settings.admission_s,
        warmup_s=warmup_s,
        failure_grace_s=settings.failure_grace_s,
        pause_s=settings.retry_pause_s,
        forceful_deletion_s=settings.forceful_deletion_s,
        keep_failed_s=0.0 if placement.max_restarts else settings.keep_failed_s,
        success_ttl_s=_NEVER_S if settings.ttl_s is None else longest_s + min(settings.ttl_s, _NEVER_S),
        terminal_codes=tuple(sorted(codes)),
        retryable_codes=tuple(settings.retryable_exit_codes),
    )


def _annotations(
    context: RunContext, placement: Placement, settings: AppWrapperSettings, dialect: Dialect
) -> dict[str, str]:
    found = {**settings.annotations, **job_annotations(context), ATTEMPT: "0"}
    found[MAX_RESTARTS] = str(placement.max_restarts)
    if settings.queue_timeout_s is not None:
        found[QUEUE_TIMEOUT] = number(settings.queue_timeout_s)
    if not dialect.is_mcad:
        found |= retry_annotations(retries_of(placement, settings))
    return found


def _queue_labels(settings: AppWrapperSettings) -> dict[str, str]:
    found = {KUEUE_QUEUE: settings.queue, KUEUE_PRIORITY: settings.priority if settings.queue is not None else None}
    return {key: str(value) for key, value in found.items() if value is not None}


def _service(name: str, namespace: str, context: RunContext) -> dict[str, Any]:
    """Without an address of its own, and for pods that are not ready: replicas meet before they are."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": job_labels(context)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {f"{BATCH}job-name": name},
        },
    }


def _has_requests(job: Mapping[str, Any]) -> bool:
    containers = job["spec"]["template"]["spec"]["containers"]
    return any((each.get("resources") or {}) for each in containers)


def _notes(placement: Placement, settings: AppWrapperSettings, dialect: Dialect) -> Iterator[str]:
    if settings.dialect == AUTO:
        yield f"dialect: auto: the cluster decides when the run is submitted; this plan shows `{dialect.name}`"
    yield "failures: one replica that fails ends all of them"
    times = f"at most {placement.max_restarts} of all replicas together"
    if placement.max_restarts and not dialect.is_mcad:
        yield f"restarts: {times}, by the AppWrapper controller; each starts every replica anew"
    if placement.max_restarts and (dialect.is_mcad or settings.dialect == AUTO):
        yield f"restarts on MCAD: {times}; only a watching command restarts them (`atoll wait`): MCAD has no limit"
    if not dialect.is_mcad:
        yield (
            "failures: the controller notices one after up to 60 s; a watching command notices it at once, wakes the "
            "controller, and keeps exit code and last lines, which go with the pods"
        )
        if not placement.max_restarts and settings.keep_failed_s:
            yield (
                f"keep_failed_s={settings.keep_failed_s:g}: the pods of a failed run stay for so long, and hold their "
                "quota for twice as long"
            )
    if settings.queue is not None and placement.replicas > 1:
        yield (
            f"queue: Kueue starts all {placement.replicas} replicas when queue `{settings.queue}` has quota for all of "
            "them. Quota is no promise of nodes. An eviction by Kueue stops all replicas, and they start again"
        )
    if dialect.is_mcad:
        yield "removal: MCAD keeps an ended AppWrapper with its pods until somebody deletes it"
