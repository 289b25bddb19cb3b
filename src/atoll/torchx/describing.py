"""The roles of an app, read back from the objects in its wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchx.specs import Resource, Role

from atoll.torchx.jobs import SHELL
from atoll.torchx.names import ROLE_NAME


def get_role_information(generic_items: Iterable[Mapping[str, Any]]) -> dict[str, Role]:
    """The roles by name. Image, command and resource are those of the first pod of a role, in the form of Kubernetes.

    As in the original, a field is left out if one before it is missing, and a resource has what the pod requests.
    """
    roles: dict[str, Role] = {}
    for item in generic_items:
        made = item.get("generictemplate") or {}
        name = ((made.get("metadata") or {}).get("labels") or {}).get(ROLE_NAME)
        if name is None:
            continue
        is_job = made.get("kind") == "Job"
        spec = made.get("spec") or {}
        size = int(spec.get("completions") or 1) if is_job else 1
        if name in roles:
            roles[name].num_replicas += size
            continue
        roles[name] = Role(name=name, image="", num_replicas=size)
        pod = (spec.get("template") or {}).get("spec") or {} if is_job else spec
        if pod.get("containers"):
            _fill(roles[name], pod["containers"][0])
    return roles


def _fill(role: Role, container: Mapping[str, Any]) -> None:
    for field, key in (("image", "image"), ("args", "command"), ("env", "env"), ("resources", "resources")):
        if key not in container:
            return
        setattr(role, field, container[key])
    command = list(container["command"])
    if tuple(command[: len(SHELL)]) == SHELL:
        role.args = command[len(SHELL) :]
    requests = container["resources"].get("requests") or {}
    if "cpu" not in requests or "memory" not in requests:
        return
    gpus = [value for key, value in requests.items() if "gpu" in key]
    role.resource = Resource(cpu=requests["cpu"], gpu=gpus[-1] if gpus else -1, memMB=requests["memory"])
    for field, key in (("port_map", "ports"), ("mounts", "volumeMounts")):
        if key not in container:
            return
        setattr(role, field, container[key])
