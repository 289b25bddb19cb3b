"""Pure: the names, label values and variables that an app of TorchX gets on Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atoll.kube.names import is_label_value

LONGEST = 63
"""The longest label value, and the longest name of a pod that is also its host name."""
DEFAULT_PORT = 29500

VERSION = "torchx.pytorch.org/version"
APP_NAME = "torchx.pytorch.org/app-name"
ROLE_INDEX = "torchx.pytorch.org/role-index"
ROLE_NAME = "torchx.pytorch.org/role-name"
REPLICA_ID = "torchx.pytorch.org/replica-id"
KUBE_APP_NAME = "app.kubernetes.io/name"
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "torchx.pytorch.org"
INSTANCE = "app.kubernetes.io/instance"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ISTIO_SIDECAR, NETWORKS = "sidecar.istio.io/inject", "k8s.v1.cni.cncf.io/networks"
POD_GROUP = "pod-group.scheduling.sigs.k8s.io"
CANCELLED = "atoll.dev/torchx-cancelled"
"""The annotation of a wrapper that was suspended by `cancel`, with the time."""

RANK0, JOB_ID = "TORCHX_RANK0_HOST", "TORCHX_JOB_ID"
INDEX_VARIABLE = "TORCHX_REPLICA_ID"
_RANDOM, _LEAST_RANDOM = 14, 3
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?\Z")


def cleanup_str(data: str) -> str:
    """Small letters, digits and `-` of the text, without one leading `-` and without leading digits."""
    kept = re.sub(r"[^a-z0-9-]", "", data.removeprefix("-").lower())
    return kept.lstrip("0123456789")


def app_id_parts(name: str, replicas: Sequence[int], *, layout: str = "pods") -> tuple[str, int]:
    """The part of an app's name that its id keeps, and the length of the random part behind it.

    `replicas` has the number of replicas of each role. The id and the longest suffix of its objects fit in one label.
    """
    last = [replica_name("", index, count - 1, layout=layout) for index, count in enumerate(replicas)]
    reserved = max([3 + len(replicas), *map(len, last)])
    left = LONGEST - (len(name) + 4 + reserved)
    if left > _LEAST_RANDOM:
        return name, min(left, _RANDOM)
    return name[: LONGEST - 4 - reserved], _LEAST_RANDOM


def valid_app_id(unique: str) -> str:
    """The id made from a unique name: it begins with a letter."""
    return cleanup_str(unique).lstrip("-0123456789")


def replica_name(app_id: str, role_index: int, replica: int, *, layout: str = "pods") -> str:
    """The host name of a replica; in the layout `pods` it is also the name of its pod.

    The original names the pods of every role `APP-0`, `APP-1`, and so on; only the first role keeps this form.
    """
    if layout == "pods" and role_index == 0:
        return f"{app_id}-{replica}"
    return f"{app_id}-{role_index}-{replica}"


def job_name(app_id: str, role_index: int) -> str:
    return f"{app_id}-{role_index}"


def pod_group_name(app_id: str, role_index: int) -> str:
    return f"{app_id}-pg{role_index}"


def hosts_variable(role_name: str) -> str:
    """The variable with the host name of replica 0 of a role, as the original spells it."""
    return f"TORCHX_MCAD_{cleanup_str(role_name)}_0_HOSTS".upper().replace("-", "")


def label_value(text: str) -> str:
    """The text itself if it is a label value, else the nearest one."""
    if text == "" or is_label_value(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:LONGEST]
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", kept) or "unnamed"


def is_port_name(text: str) -> bool:
    """Whether Kubernetes accepts this as the name of a port: at most 15 small letters, digits and single `-`."""
    return _PORT_NAME.match(text) is not None and "--" not in text


def service_port(port_maps: Sequence[Any]) -> int:
    """The port of the Service: the last one of all roles, or that of the rendezvous. It may be out of range."""
    found = [int(port) for ports in port_maps for port in (ports or {}).values()]
    return found[-1] if found else DEFAULT_PORT


def split_app_id(app_id: str) -> tuple[str, str]:
    """Namespace and name of the wrapper; `ValueError` if this is no id of this scheduler."""
    namespace, colon, name = app_id.partition(":")
    if not colon or not namespace or not name or ":" in name:
        raise ValueError(f"`{app_id}` is not the id of an app on Kubernetes: it is NAMESPACE:NAME")
    return namespace, name
