"""Pure: the container and the pod spec of a replica, in the order and form of TorchX 0.7.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.torchx.mounts import is_privileged, volumes
from atoll.torchx.names import (
    INSTANCE,
    ISTIO_SIDECAR,
    JOB_ID,
    KUBE_APP_NAME,
    MANAGED_BY,
    MANAGER,
    NETWORKS,
    label_value,
)
from atoll.torchx.options import Options
from atoll.torchx.resources import container_resources, node_selector


def object_labels(app_name: str, app_id: str) -> dict[str, str]:
    """The labels of every object of an app."""
    return {KUBE_APP_NAME: label_value(app_name), MANAGED_BY: MANAGER, INSTANCE: label_value(app_id)}


def pod_annotations(options: Options) -> dict[str, str]:
    # The sidecar of Istio would keep the pod running after its container has ended.
    found = {ISTIO_SIDECAR: "false"}
    return found if options.network is None else {**found, NETWORKS: options.network}


def container(name: str, role: Any, options: Options, env: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The container of a replica; `role` has its macros replaced."""
    return {
        "command": [role.entrypoint, *role.args],
        "image": role.image,
        "name": name,
        "env": list(env),
        "resources": container_resources(
            role.resource,
            reserved_millicpu=options.reserved_millicpu,
            reserved_memmb=options.reserved_memmb,
            gpu_resource=options.gpu_resource,
        ),
        "ports": [{"name": port, "containerPort": number} for port, number in role.port_map.items()],
        "volumeMounts": volumes(role.mounts, options.shm_size)[1],
        "securityContext": {"privileged": True} if is_privileged(role.mounts) else {},
    }


def pod_spec(role: Any, options: Options, own: Mapping[str, Any], subdomain: str) -> dict[str, Any]:
    """The spec of a pod with the container `own`."""
    named = {
        "serviceAccountName": options.service_account,
        "schedulerName": options.coscheduler_name,
        "priorityClassName": options.priority_class_name,
    }
    return {
        "containers": [dict(own)],
        "subdomain": subdomain,
        "restartPolicy": "Never",
        "volumes": volumes(role.mounts, options.shm_size)[0],
        "nodeSelector": node_selector(role.resource),
        **{name: value for name, value in named.items() if value is not None},
    }


def role_env(role: Any, namespace: str, app_id: str) -> list[dict[str, str]]:
    """The variables of a role. The id of the job becomes a handle that `torchx status` accepts."""
    found = dict(role.env)
    handle = str(found.get(JOB_ID, ""))
    if handle.endswith(f"/{app_id}"):
        found[JOB_ID] = f"{handle.removesuffix(app_id)}{namespace}:{app_id}"
    return [{"name": name, "value": value} for name, value in found.items()]
