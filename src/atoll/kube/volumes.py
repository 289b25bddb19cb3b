"""Pure: the setting `volumes` as volumes and mounts of a pod.

One volume is a table such as `{"pvc": "data", "mount": "/data", "read_only": true}`. Its source is one of `SOURCES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.kube.names import is_dns_name
from atoll.kube.quantities import RULE, is_quantity
from atoll.validation import shown

SOURCES = ("pvc", "host_path", "secret", "config_map", "empty_dir")
_KEYS = (*SOURCES, "mount", "read_only", "sub_path")
SHM = "/dev/shm"  # noqa: S108
_SHM_NAME = "shm"


def volume_problems(volumes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every rule that a volume breaks."""
    mounts: list[str] = []
    for index, volume in enumerate(volumes):
        where = f"volumes[{index}]"
        given = [name for name in SOURCES if name in volume]
        yield from (f"{where}.{key}: a volume has {', '.join(_KEYS)}" for key in volume if key not in _KEYS)
        if len(given) != 1:
            yield f"{where}: has one source of {', '.join(SOURCES)}, not {len(given)}"
        else:
            yield from _source_problems(where, given[0], volume[given[0]])
        mount = volume.get("mount")
        if not isinstance(mount, str) or not re.match(r"/[^:]+\Z", mount):
            yield f"{where}.mount={shown(mount)}: a path from `/`, without `:`"
        elif mount in mounts:
            yield f"{where}.mount=`{mount}`: another volume is mounted there"
        else:
            mounts.append(mount)
        if not isinstance(volume.get("read_only", False), bool):
            yield f"{where}.read_only={shown(volume['read_only'])}: true or false"
        sub_path = volume.get("sub_path")
        is_inside = isinstance(sub_path, str) and sub_path and not sub_path.startswith("/")
        if "sub_path" in volume and (not is_inside or ".." in str(sub_path).split("/")):
            yield f"{where}.sub_path={shown(sub_path)}: a path inside the volume, without `..`"


def _source_problems(where: str, source: str, value: Any) -> Iterator[str]:
    if source == "host_path":
        if not isinstance(value, str) or not value.startswith("/") or ".." in value.split("/"):
            yield f"{where}.host_path={shown(value)}: a path of the node from `/`, without `..`"
    elif source == "empty_dir":
        if value is not True and value != "memory" and not is_quantity(value):
            yield f"{where}.empty_dir={shown(value)}: true, `memory`, or a size limit: {RULE}"
    elif not is_dns_name(value):
        yield f"{where}.{source}={shown(value)}: the name of an object in the namespace of the run"


def pod_volumes(volumes: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and their mounts in the container, in the order of the setting."""
    sources, mounts = [], []
    for index, volume in enumerate(volumes):
        name = f"volume-{index}"
        sources.append({"name": name, **_source(volume)})
        mount = {"name": name, "mountPath": volume["mount"]}
        if volume.get("read_only"):
            mount["readOnly"] = True
        if volume.get("sub_path"):
            mount["subPath"] = volume["sub_path"]
        mounts.append(mount)
    return sources, mounts


def _source(volume: Mapping[str, Any]) -> dict[str, Any]:
    if "pvc" in volume:
        is_read_only = {"readOnly": True} if volume.get("read_only") else {}
        return {"persistentVolumeClaim": {"claimName": volume["pvc"], **is_read_only}}
    if "host_path" in volume:
        return {"hostPath": {"path": volume["host_path"]}}
    if "secret" in volume:
        return {"secret": {"secretName": volume["secret"]}}
    if "config_map" in volume:
        return {"configMap": {"name": volume["config_map"]}}
    size = volume["empty_dir"]
    return {"emptyDir": {} if size is True else {"medium": "Memory"} if size == "memory" else {"sizeLimit": size}}


def shared_memory(size: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume in memory at /dev/shm, and its mount. Without a size, the memory limit of the replica is its limit."""
    limit = {} if size is None else {"sizeLimit": size}
    return (
        {"name": _SHM_NAME, "emptyDir": {"medium": "Memory", **limit}},
        {"name": _SHM_NAME, "mountPath": SHM},
    )


def config_map_file(name: str, config_map: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ConfigMap of the run as a read-only folder: the volume and its mount."""
    return (
        {"name": name, "configMap": {"name": config_map}},
        {"name": name, "mountPath": folder, "readOnly": True},
    )
