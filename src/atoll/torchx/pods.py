"""Pure: the layout `pods`, one pod for each replica, as TorchX 0.7.0 made it.

Three things differ, because the original did not work: pods of the second and later roles have names of their own,
every pod has the variable that `rank0_env` names, and label values are valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchx.specs import macros

from atoll.kube.overlay import merged
from atoll.torchx.container import container, object_labels, pod_annotations, pod_spec, role_env
from atoll.torchx.names import (
    APP_NAME,
    POD_GROUP,
    RANK0,
    REPLICA_ID,
    ROLE_INDEX,
    ROLE_NAME,
    VERSION,
    cleanup_str,
    hosts_variable,
    label_value,
    pod_group_name,
    replica_name,
)
from atoll.torchx.options import LEGACY, Options, read_overlay

SIGS_API = "scheduling.sigs.k8s.io/v1alpha1"


def pod_labels(
    app_name: str, role_index: int, role_name: str, app_id: str, version: str, replica: int | None = None
) -> dict[str, str]:
    """The labels of a pod; those of an Indexed Job get the number of the replica from Kubernetes."""
    return {
        **object_labels(app_name, app_id),
        VERSION: label_value(version),
        APP_NAME: label_value(app_name),
        ROLE_INDEX: str(role_index),
        ROLE_NAME: label_value(role_name),
        **({} if replica is None else {REPLICA_ID: str(replica)}),
    }


def pod_manifest(name: str, app_id: str, role: Any, options: Options, hosts: Mapping[str, str]) -> dict[str, Any]:
    """One pod, without labels. `role` has its macros replaced; `hosts` are the variables with host names."""
    env = [*role_env(role, options.namespace, app_id), *({"name": key, "value": host} for key, host in hosts.items())]
    spec = pod_spec(role, options, container(name, role, options, env), app_id)
    secret = {} if options.image_secret is None else {"name": options.image_secret}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "annotations": pod_annotations(options),
            "labels": {},
            "namespace": options.namespace,
        },
        "spec": {**spec, "hostname": name, "imagePullSecrets": [secret]},
    }


def replica_pods(
    app: Any, app_id: str, options: Options, version: str, *, dialect: str = ""
) -> Iterator[dict[str, Any]]:
    """The pods of all replicas of all roles."""
    first = hosts_variable(app.roles[0].name)
    for index, role in enumerate(app.roles):
        for replica in range(role.num_replicas):
            is_first = index == 0 and replica == 0
            values = macros.Values(
                img_root="", app_id=app_id, replica_id=str(replica), rank0_env=RANK0 if is_first else first
            )
            own = values.apply(role)
            hosts = {RANK0: "localhost"} if is_first else {}
            hosts[hosts_variable(role.name)] = f"{replica_name(app_id, index, 0)}.{app_id}"
            hosts[first] = f"{replica_name(app_id, 0, 0)}.{app_id}"  # also if both roles have the same variable
            pod = pod_manifest(replica_name(app_id, index, replica), app_id, own, options, hosts)
            pod["metadata"]["labels"] = {
                **pod_labels(app.name, index, role.name, app_id, version, replica),
                **({} if options.coscheduler_name is None else group_label(app_id, index, role.name, dialect)),
            }
            yield overlaid(pod, role, options)


def overlaid(pod: dict[str, Any], role: Any, options: Options) -> dict[str, Any]:
    """The pod with the overlay of the options, and then with that of the role's metadata, which TorchX names so."""
    result = merged(pod, options.pod_overlay)
    own = role.metadata.get("kubernetes")
    return dict(merged(result, read_overlay(own)) if own else result)


def group_label(app_id: str, role_index: int, role_name: str, dialect: str) -> dict[str, str]:
    return {POD_GROUP: _group_name(app_id, role_index, role_name, dialect)}


def pod_group(
    app_name: str, app_id: str, role_index: int, role: Any, namespace: str, dialect: str = ""
) -> dict[str, Any]:
    """The PodGroup of a role. An elastic role needs only the smallest number of its replicas."""
    mark = "appwrapper.mcad.ibm.com" if dialect == LEGACY else "appwrapper.workload.codeflare.dev"
    return {
        "apiVersion": SIGS_API,
        "kind": "PodGroup",
        "metadata": {
            "name": _group_name(app_id, role_index, role.name, dialect),
            "namespace": namespace,
            "labels": {**object_labels(app_name, app_id), mark: label_value(app_id)},
        },
        "spec": {"minMember": least_replicas(role)},
    }


def least_replicas(role: Any) -> int:
    """How many replicas must be there at once."""
    return int(role.num_replicas if role.min_replicas is None else role.min_replicas)


def _group_name(app_id: str, role_index: int, role_name: str, dialect: str) -> str:
    return f"{app_id}-{cleanup_str(role_name)}-pg" if dialect == LEGACY else pod_group_name(app_id, role_index)
