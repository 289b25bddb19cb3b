"""The volumes of a pod as folders on this machine, and where a container sees them.

With the right to mount, each process sees them at their mount points (`mounts.py`). Without it, the mount points in the
command, the arguments and the variables are replaced by the folders; a program that has a path of its own in its
code does not find it then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.kubernetes.kubelet.environment import ConfigError, decoded, field, resource

Object = dict[str, Any]
Mount = tuple[str, str, bool]
"""(folder or file on this machine, mount point, whether it is read only)"""


class Volumes:
    """Writes the volumes of one pod. `get` reads an object below the pod's namespace; `token` asks for a token."""

    def __init__(
        self, pod: Object, folder: Path, get: Callable[[str, str], Object | None], token: Callable[[Object], str]
    ) -> None:
        self._pod, self._folder, self._get, self._token = pod, folder, get, token
        self._places: dict[str, Path] = {}

    def write(self) -> None:
        """Raises `ConfigError` if a volume refers to what does not exist."""
        for volume in self._pod["spec"].get("volumes", []):
            if volume["name"] not in self._places:
                self._places[volume["name"]] = self._place(volume)

    def mounts(self, container: Object) -> list[Mount]:
        found = []
        for mount in container.get("volumeMounts", []):
            place = self._places[mount["name"]] / mount.get("subPath", "")
            if not place.exists():
                place.mkdir(parents=True)
            found.append((str(place), mount["mountPath"].rstrip("/"), bool(mount.get("readOnly"))))
        return sorted(found, key=lambda mount: mount[1])

    def _place(self, volume: Object) -> Path:
        if "hostPath" in volume:
            place = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                place.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                raise ConfigError(f'MountVolume.SetUp failed for volume "{volume["name"]}": {place} does not exist')
            return place
        if "persistentVolumeClaim" in volume:
            return self._claimed(volume["persistentVolumeClaim"]["claimName"])
        place = self._folder / "volumes" / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        for path, (content, mode) in self._files(volume).items():
            file = place / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            file.touch(mode=mode)
            file.write_bytes(content)
            file.chmod(mode)
        return place

    def _claimed(self, claim: str) -> Path:
        found = self._get("persistentvolumeclaims", claim) or {}
        volume = self._get("persistentvolumes", found.get("spec", {}).get("volumeName", "")) or {}
        spec = volume.get("spec", {})
        path = (spec.get("hostPath") or spec.get("local") or {}).get("path")
        if path is None:
            raise ConfigError(f'persistentvolumeclaim "{claim}" has no volume with a path of this machine')
        Path(path).mkdir(parents=True, exist_ok=True)
        return Path(path)

    def _files(self, volume: Object) -> dict[str, tuple[bytes, int]]:
        """What stands in a volume at first: its content and its mode by path."""
        sources = volume["projected"].get("sources", []) if "projected" in volume else [volume]
        mode = next((volume[kind].get("defaultMode", 0o644) for kind in _KINDS if kind in volume), 0o644)
        found: dict[str, tuple[bytes, int]] = {}
        for source in sources:
            for path, (content, own_mode) in self._source_files(source).items():
                found[path] = (content, own_mode or mode)
        return found

    def _source_files(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        if "secret" in source:
            secret = source["secret"]
            return self._entries("secrets", secret.get("secretName") or secret["name"], secret)
        if "configMap" in source:
            return self._entries("configmaps", source["configMap"]["name"], source["configMap"])
        if "serviceAccountToken" in source:
            token = source["serviceAccountToken"]
            return {token["path"]: (self._token(token).encode(), None)}
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items", [])
            return {item["path"]: (self._downward(item).encode(), item.get("mode")) for item in items}
        if "emptyDir" in source:
            return {}
        raise ConfigError(f"this kubelet has no volumes of the kind {sorted(set(source) - {'name'})}")

    def _entries(self, kind: str, name: str, source: Object) -> dict[str, tuple[bytes, int | None]]:
        found = self._get(kind, name)
        if found is None:
            if source.get("optional"):
                return {}
            raise ConfigError(f'{kind.removesuffix("s")} "{name}" not found')
        entries = decoded({"kind": "Secret" if kind == "secrets" else "ConfigMap", **found})
        items = source.get("items")
        if not items:
            return {path: (content, None) for path, content in entries.items()}
        missing = [item["key"] for item in items if item["key"] not in entries]
        if missing and not source.get("optional"):
            raise ConfigError(f"references non-existent {kind.removesuffix('s')} key: {missing[0]}")
        return {item["path"]: (entries[item["key"]], item.get("mode")) for item in items if item["key"] in entries}

    def _downward(self, item: Object) -> str:
        if "fieldRef" in item:
            return field(self._pod, item["fieldRef"]["fieldPath"])
        name = item["resourceFieldRef"].get("containerName")
        container = next(c for c in self._pod["spec"]["containers"] if name in (None, c["name"]))
        return resource(container, item["resourceFieldRef"])


_KINDS = ("secret", "configMap", "projected", "downwardAPI")


def substituted(text: str, mounts: list[Mount]) -> str:
    """The text with the folders in place of the mount points, for machines on which nothing can be mounted."""
    for place, target, _ in sorted(mounts, key=lambda mount: -len(mount[1])):
        text = re.sub(rf"(?<![\w.-]){re.escape(target)}(?![\w.-])", lambda _, place=place: place, text)  # type: ignore[misc]
    return text
