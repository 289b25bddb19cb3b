"""Pure: the layout `jobs`, one Indexed Job for each role, whose size does not grow with the number of replicas.

The completion index is the number of the replica. Kubernetes replaces `$(TORCHX_REPLICA_ID)` in the command and in
variables, so that the macro `replica_id` works although all replicas share one template. Replica 0 of the first role
finds itself as `localhost`, as in the original, because its host name may not resolve yet when it starts; a line of
shell sets this where the macro `rank0_env` is used.
"""

from __future__ import annotations

from typing import Any

from torchx.specs import RetryPolicy, macros

from atoll.kube.gang import COSCHEDULING_API, COSCHEDULING_GROUP
from atoll.kube.names import CONTAINER, INDEX
from atoll.torchx.container import container, object_labels, pod_annotations, pod_spec, role_env
from atoll.torchx.names import (
    INDEX_VARIABLE,
    RANK0,
    hosts_variable,
    job_name,
    pod_group_name,
    replica_name,
)
from atoll.torchx.options import Options
from atoll.torchx.pods import overlaid, pod_labels

_FIRST_IS_LOCAL = f'if [ "${INDEX_VARIABLE}" = 0 ]; then export {RANK0}=localhost; fi; exec "$@"'
SHELL = ("/bin/sh", "-c", _FIRST_IS_LOCAL, "sh")
"""What stands before the command of the first role, if the command uses the host of replica 0."""
_PERMIT_S = 60


def role_job(app: Any, role_index: int, app_id: str, options: Options, version: str) -> dict[str, Any]:
    """The Job of a role."""
    role = app.roles[role_index]
    labels = pod_labels(app.name, role_index, role.name, app_id, version)
    is_restarted = restarts_in_place(role) > 0
    pod = overlaid(_pod(app, role_index, app_id, options, labels), role, options)
    template = {"metadata": pod["metadata"], "spec": pod["spec"]}
    if is_restarted:
        template["spec"]["restartPolicy"] = "OnFailure"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(app_id, role_index), "namespace": options.namespace, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": role.num_replicas,
            "parallelism": role.num_replicas,
            "backoffLimit": restarts_in_place(role),
            "template": template,
        },
    }


def restarts_in_place(role: Any) -> int:
    """How often the kubelet starts the containers of a role again; other policies restart the whole app."""
    return int(role.max_retries) if role.retry_policy == RetryPolicy.REPLICA else 0


def _pod(app: Any, role_index: int, app_id: str, options: Options, labels: dict[str, str]) -> dict[str, Any]:
    role = app.roles[role_index]
    values = macros.Values(img_root="", app_id=app_id, replica_id=f"$({INDEX_VARIABLE})", rank0_env=RANK0)
    own = values.apply(role)
    is_alone = app.roles[0].num_replicas == 1
    uses_rank0 = any(RANK0 in text for text in (*own.args, *map(str, own.env.values())))
    first = f"{replica_name(app_id, 0, 0, layout='jobs')}.{app_id}"
    hosts = {
        RANK0: "localhost" if role_index == 0 and is_alone else first,
        hosts_variable(role.name): f"{replica_name(app_id, role_index, 0, layout='jobs')}.{app_id}",
        hosts_variable(app.roles[0].name): first,
    }
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    env: list[dict[str, Any]] = [
        {"name": INDEX_VARIABLE, "valueFrom": index},  # first, because the others may name it
        *({"name": name, "value": host} for name, host in hosts.items()),
        *role_env(own, options.namespace, app_id),
    ]
    made = container(CONTAINER, own, options, env)
    if role_index == 0 and uses_rank0 and not is_alone:
        made["command"] = [*SHELL, *made["command"]]
    made = {name: value for name, value in made.items() if value or name not in ("ports", "securityContext")}
    spec = pod_spec(own, options, made, app_id)
    if not spec["nodeSelector"]:
        del spec["nodeSelector"]
    if options.image_secret is not None:
        spec["imagePullSecrets"] = [{"name": options.image_secret}]
    if options.coscheduler_name is not None:
        labels = {**labels, COSCHEDULING_GROUP: pod_group_name(app_id, role_index)}
    return {"metadata": {"labels": labels, "annotations": pod_annotations(options)}, "spec": spec}


def role_group(app: Any, role_index: int, app_id: str, namespace: str) -> dict[str, Any]:
    """The PodGroup of a role, for the coscheduling plugin of today."""
    return {
        "apiVersion": COSCHEDULING_API,
        "kind": "PodGroup",
        "metadata": {
            "name": pod_group_name(app_id, role_index),
            "namespace": namespace,
            "labels": object_labels(app.name, app_id),
        },
        "spec": {"minMember": app.roles[role_index].num_replicas, "scheduleTimeoutSeconds": _PERMIT_S},
    }
