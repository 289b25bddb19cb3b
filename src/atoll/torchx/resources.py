"""Pure: the resource of a role as limits and requests of a container."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from atoll.kube.names import is_label_key, is_label_value
from atoll.torchx.names import INSTANCE_TYPE

RESERVED_MILLICPU, RESERVED_MEMMB = 100, 1024
NVIDIA = "nvidia.com/gpu"


def container_resources(
    resource: Any,
    *,
    reserved_millicpu: int = RESERVED_MILLICPU,
    reserved_memmb: int = RESERVED_MEMMB,
    gpu_resource: str = NVIDIA,
) -> dict[str, dict[str, str]]:
    """Limits are what the role asks for. Requests are below them by what the node reserves, if that is less."""
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    if resource.cpu > 0:
        milli = int(resource.cpu * 1000)
        limits["cpu"], requests["cpu"] = f"{milli}m", f"{_less(milli, reserved_millicpu)}m"
    if resource.memMB > 0:
        size = int(resource.memMB)
        limits["memory"], requests["memory"] = f"{size}M", f"{_less(size, reserved_memmb)}M"
    if resource.gpu > 0:
        limits[gpu_resource] = requests[gpu_resource] = str(resource.gpu)
    limits |= {name: str(count) for name, count in resource.devices.items()}
    return {"limits": limits, "requests": requests}


def _less(amount: int, reserved: int) -> int:
    return amount - reserved if amount > reserved else amount


def node_selector(resource: Any) -> dict[str, str]:
    """The node labels that the capabilities of a resource ask for."""
    found = resource.capabilities.get(INSTANCE_TYPE)
    return {} if found is None else {INSTANCE_TYPE: str(found)}


def resource_rules(where: str, resource: Any) -> Iterator[str]:
    """What Kubernetes would refuse about the resource of a role."""
    for name in ("cpu", "memMB", "gpu"):
        value = getattr(resource, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield f"{where}.{name}={value!r}: a number"
        elif name == "gpu" and value != int(value):
            yield f"{where}.gpu={value}: a whole number; a GPU cannot be divided"
    for name, count in resource.devices.items():
        if "/" not in name or not is_label_key(name):
            yield f"{where}.devices.{name}: the name of a resource, such as `vpc.amazonaws.com/efa`"
        if not isinstance(count, int) or count < 0:
            yield f"{where}.devices.{name}={count!r}: a whole number from 0"
    kind = resource.capabilities.get(INSTANCE_TYPE)
    if kind is not None and not is_label_value(str(kind)):
        yield f"{where}.capabilities.{INSTANCE_TYPE}=`{kind}`: a label value, such as `p4d.24xlarge`"
