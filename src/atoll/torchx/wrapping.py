"""Pure: the AppWrapper of an app, in the three dialects of its API.

`wrapper` builds plain dicts from an app, its id and the options. Nothing is sent, and the app is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchx.specs import RetryPolicy

from atoll.kube.appwrapper import DIALECTS, PREFIX, app_wrapper
from atoll.kube.gang import KUEUE_QUEUE
from atoll.torchx.container import object_labels
from atoll.torchx.jobs import role_group, role_job
from atoll.torchx.names import APP_NAME, DEFAULT_PORT, ROLE_INDEX, label_value, service_port
from atoll.torchx.options import LEGACY, V1BETA2, Options, exit_codes
from atoll.torchx.pods import least_replicas, pod_group, replica_pods
from atoll.torchx.service import service_manifest

KUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
ADMISSION, FORCEFUL_DELETION = "1m", "1m"
RETRY_POLICIES: dict[str, list[dict[str, str]]] = {
    RetryPolicy.REPLICA: [],
    RetryPolicy.APPLICATION: [
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob"},
    ],
}
"""What TorchX 0.5.0 wrote for each role; no version of MCAD reads it."""


def wrapper(app: Any, app_id: str, options: Options, dialect: str, version: str) -> dict[str, Any]:
    """The whole resource."""
    objects = app_objects(app, app_id, options, dialect, version)
    labels = {**object_labels(app.name, app_id), APP_NAME: label_value(app.name), **_queue_labels(options)}
    is_new, has_pods = dialect == V1BETA2, options.layout == "pods"
    made = app_wrapper(
        next(each for each in DIALECTS.values() if each.api_version == dialect),
        objects,
        name=app_id,
        namespace=options.namespace,
        labels=None if has_pods and not is_new else labels,
        annotations=retry_annotations(app, options) if is_new else None,
        # Without the webhook of Kueue, pods would start before they are admitted.
        suspend=True if is_new and options.queue is not None else None,
        priority=options.priority,
    )
    if has_pods and not is_new:
        retries = app_retries(app)
        if dialect == LEGACY:
            _add_policies(app, made["spec"]["resources"]["GenericItems"])
        elif retries > 0:
            enable_retry(made["spec"], retries, sum(map(least_replicas, app.roles)))
    return made


def app_objects(app: Any, app_id: str, options: Options, dialect: str, version: str) -> list[dict[str, Any]]:
    """PodGroups, then pods or Jobs, then the Service."""
    is_grouped, roles = options.coscheduler_name is not None, range(len(app.roles))
    port = service_port([role.port_map for role in app.roles])
    port = port if 0 < port <= 65535 else DEFAULT_PORT
    if options.layout == "pods":
        groups = [pod_group(app.name, app_id, i, app.roles[i], options.namespace, dialect) for i in roles]
        replicas = list(replica_pods(app, app_id, options, version, dialect=dialect))
    else:
        groups = [role_group(app, i, app_id, options.namespace) for i in roles]
        replicas = [role_job(app, i, app_id, options, version) for i in roles]
    service = service_manifest(
        app.name, app_id, options.namespace, port, dialect=dialect, with_status=options.layout == "pods"
    )
    return [*(groups if is_grouped else ()), *replicas, service]


def _add_policies(app: Any, items: Sequence[dict[str, Any]]) -> None:
    """What TorchX 0.5.0 wrote on the items of roles with restarts."""
    for item in items:
        made = item["generictemplate"]
        if made["kind"] == "Pod":
            role = app.roles[int(made["metadata"]["labels"][ROLE_INDEX])]
            if role.max_retries > 0:
                item |= {"maxRetry": role.max_retries, "policies": RETRY_POLICIES.get(role.retry_policy, [])}


def enable_retry(job_spec: dict[str, Any], appwrapper_retries: int, total_pods: int) -> None:
    """Ask MCAD to queue the app again when fewer than `total_pods` pods run or have succeeded."""
    job_spec["schedulingSpec"] = {
        "minAvailable": total_pods,
        "requeuing": {
            "timeInSeconds": 300,
            "maxTimeInSeconds": 0,
            "growthType": "exponential",
            "maxNumRequeuings": appwrapper_retries,
        },
    }


def app_retries(app: Any) -> int:
    """Restarts of the whole app: the smallest number of the roles that restart it."""
    return min((int(role.max_retries) for role in app.roles if role.retry_policy != RetryPolicy.REPLICA), default=0)


def retry_annotations(app: Any, options: Options) -> dict[str, str]:
    """Every annotation of the AppWrapper controller: its defaults would restart three times and forget logs."""
    limit = app_retries(app) if options.retry_limit is None else options.retry_limit
    codes = {"terminalExitCodes": options.terminal_exit_codes, "retryableExitCodes": options.retryable_exit_codes}
    found = {
        "retryLimit": str(limit),
        "admissionGracePeriodDuration": ADMISSION,
        "retryPausePeriodDuration": options.retry_pause,
        "warmupGracePeriodDuration": options.warmup_grace,
        "failureGracePeriodDuration": options.failure_grace,
        "forcefulDeletionGracePeriodDuration": FORCEFUL_DELETION,
        "successTTLDuration": options.success_ttl,
        "deletionOnFailureGracePeriodDuration": "0s" if limit else options.keep_failed,
        **{name: ",".join(map(str, sorted(exit_codes(value)))) for name, value in codes.items() if value is not None},
    }
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def _queue_labels(options: Options) -> dict[str, str]:
    labels = {KUEUE_QUEUE: options.queue, KUEUE_PRIORITY: options.queue_priority}
    return {name: value for name, value in labels.items() if value is not None}
