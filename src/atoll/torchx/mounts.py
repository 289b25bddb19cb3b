"""Mounts of a role as volumes of a pod, and a parser of their text form.

The types of TorchX are bind, volume and device; secret, configmap and empty are ours. In the text form,
`readonly=false` means false, and `~` stays as it is, because the path is one of the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchx.specs import BindMount, DeviceMount, VolumeMount

from atoll.kube.names import is_dns_name
from atoll.kube.quantities import RULE, is_quantity

SHM_NAME, SHM_PATH = "dshm", "/dev/shm"  # noqa: S108
_KEYS = {
    "type": "type",
    "src": "src",
    "source": "src",
    "dst": "dst",
    "destination": "dst",
    "target": "dst",
    "readonly": "readonly",
    "read_only": "readonly",
    "perm": "perm",
    "size": "size",
}
_YES, _NO = ("", "true", "1", "yes", "on"), ("false", "0", "no", "off")
TYPES = ("bind", "volume", "device", "secret", "configmap", "empty")


@dataclass
class SecretMount:
    """The keys of a Secret as files."""

    src: str
    dst_path: str
    read_only: bool = True


@dataclass
class ConfigMapMount:
    """The keys of a ConfigMap as files."""

    src: str
    dst_path: str
    read_only: bool = True


@dataclass
class EmptyMount:
    """A folder that lives as long as the pod; `size` is a limit such as `10Gi`."""

    dst_path: str
    size: str | None = None
    read_only: bool = False


def parse_mounts(opts: Iterable[str]) -> list[Any]:
    """Mounts from `type=bind`, `src=/data`, `dst=/data`, `readonly`, and so on; each `type` begins a new mount."""
    found: list[dict[str, str]] = []
    for option in opts:
        key, _, value = option.partition("=")
        if key not in _KEYS:
            raise KeyError(f"unknown mount option {key}: one of {', '.join(_KEYS)}")
        if _KEYS[key] == "type":
            found.append({})
        elif not found:
            raise KeyError("a mount begins with its type")
        found[-1][_KEYS[key]] = value
    return [_parsed(mount) for mount in found]


def _parsed(mount: dict[str, str]) -> Any:
    kind = mount["type"]
    if kind not in TYPES:
        raise ValueError(f"type={kind}: a mount is one of {', '.join(TYPES)}")
    if kind == "device":
        permissions = mount.get("perm", "rwm")
        if set(permissions) - set("rwm"):
            raise ValueError(f"perm={permissions}: letters of r, w and m")
        return DeviceMount(src_path=mount["src"], dst_path=mount.get("dst", mount["src"]), permissions=permissions)
    if kind == "empty":
        return EmptyMount(mount["dst"], mount.get("size"), _flag(mount, default=False))
    if kind == "bind":
        return BindMount(src_path=mount["src"], dst_path=mount["dst"], read_only=_flag(mount, default=False))
    if kind == "volume":
        return VolumeMount(src=mount["src"], dst_path=mount["dst"], read_only=_flag(mount, default=False))
    made = SecretMount if kind == "secret" else ConfigMapMount
    return made(mount["src"], mount["dst"], _flag(mount, default=True))


def _flag(mount: dict[str, str], *, default: bool) -> bool:
    value = mount.get("readonly")
    if value is None:
        return default
    if value.lower() not in (*_YES, *_NO):
        raise ValueError(f"readonly={value}: true or false")
    return value.lower() in _YES


def volumes(mounts: Sequence[Any], shm_size: str | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod and their mounts: shared memory first, then one for each mount. `TypeError` if unknown."""
    limit = {} if shm_size is None else {"sizeLimit": shm_size}
    sources: list[dict[str, Any]] = [{"name": SHM_NAME, "emptyDir": {"medium": "Memory", **limit}}]
    places: list[dict[str, Any]] = [{"name": SHM_NAME, "mountPath": SHM_PATH}]
    for index, mount in enumerate(mounts):
        name = f"mount-{index}"
        sources.append({"name": name, **_source(mount)})
        places.append({"name": name, "mountPath": mount.dst_path, "readOnly": _is_read_only(mount)})
    return sources, places


def is_privileged(mounts: Sequence[Any]) -> bool:
    """Whether a device is mounted, for which Kubernetes needs a privileged container."""
    return any(isinstance(mount, DeviceMount) for mount in mounts)


def _source(mount: Any) -> dict[str, Any]:
    if isinstance(mount, BindMount | DeviceMount):
        return {"hostPath": {"path": mount.src_path}}
    if isinstance(mount, VolumeMount):
        return {"persistentVolumeClaim": {"claimName": mount.src}}
    if isinstance(mount, SecretMount):
        return {"secret": {"secretName": mount.src}}
    if isinstance(mount, ConfigMapMount):
        return {"configMap": {"name": mount.src}}
    if isinstance(mount, EmptyMount):
        return {"emptyDir": {} if mount.size is None else {"sizeLimit": mount.size}}
    raise TypeError(f"unknown mount type {mount}")


def _is_read_only(mount: Any) -> bool:
    if isinstance(mount, DeviceMount):
        return not set(mount.permissions) & set("wm")
    return bool(mount.read_only)


def mount_problems(where: str, mounts: Sequence[Any]) -> Iterable[str]:
    """What Kubernetes would refuse about the mounts of a role."""
    taken = {SHM_PATH}
    for index, mount in enumerate(mounts):
        at = f"{where}.mounts[{index}]"
        try:
            _source(mount)
        except TypeError as exc:
            yield f"{at}: {exc}"
            continue
        if not mount.dst_path.startswith("/") or ":" in mount.dst_path:
            yield f"{at}.dst_path=`{mount.dst_path}`: a path from `/`, without `:`"
        elif mount.dst_path in taken:
            yield f"{at}.dst_path=`{mount.dst_path}`: another volume is mounted there"
        taken.add(mount.dst_path)
        if isinstance(mount, BindMount | DeviceMount):
            if not mount.src_path.startswith("/") or ".." in mount.src_path.split("/"):
                yield f"{at}.src_path=`{mount.src_path}`: a path of the node, from `/` and without `..` and `~`"
        elif isinstance(mount, EmptyMount):
            if mount.size is not None and not is_quantity(mount.size):
                yield f"{at}.size=`{mount.size}`: {RULE}"
        elif not is_dns_name(mount.src):
            yield f"{at}.src=`{mount.src}`: the name of an object: small letters, digits, `-` and `.`"
