"""The variables and the command line of a container, from its part of the pod. Nothing here does I/O by itself."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.kubernetes.kubelet.quantities import in_units

Object = dict[str, Any]
Fetch = Callable[[str, str], Object | None]
"""(`secrets` or `configmaps`, name): the object in the pod's namespace, or None."""
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]$")


class ConfigError(Exception):
    """The container cannot be created as the pod describes it."""


def variables(pod: Object, container: Object, base: Mapping[str, str], fetch: Fetch) -> dict[str, str]:
    """All variables: the node's and the image's, then `envFrom`, then `env` in order; the last of one name wins."""
    found = dict(base)
    for source in container.get("envFrom", []):
        found.update(_from_source(source, fetch))
    for entry in container.get("env", []):
        value = _value(pod, container, entry, found, fetch)
        if value is not None:
            found[entry["name"]] = value
    return found


def command_line(container: Object, image_command: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
    command = container.get("command") or (list(image_command) if not container.get("args") else [])
    line = [expand(text, env) for text in [*command, *(container.get("args") or [])]]
    if not line:
        raise ConfigError("no command specified")
    return line


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` by `$`; a name that is not defined stays as it is written."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(one, text)


def field(pod: Object, path: str) -> str:
    """What a `fieldRef` gives."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    if keyed := _KEYED.match(path):
        return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": status.get("hostIP", ""),
    }
    if path in simple:
        return str(simple[path])
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.partition(".")[2], {})
        return "\n".join(f'{name}="{value}"' for name, value in sorted(entries.items()))
    raise ConfigError(f"unsupported fieldPath: {path}")


def resource(container: Object, reference: Object) -> str:
    """What a `resourceFieldRef` gives. Without a limit it is 0 here, not the capacity of the node."""
    kind, _, name = reference["resource"].partition(".")
    quantity = container.get("resources", {}).get(kind, {}).get(name, "0")
    return in_units(quantity, reference.get("divisor", "0"))


def decoded(source: Object) -> dict[str, bytes]:
    """The entries of a Secret or a ConfigMap."""
    if "data" in source and source.get("kind") == "Secret":
        return {name: base64.b64decode(value) for name, value in (source["data"] or {}).items()}
    found = {name: value.encode() for name, value in (source.get("data") or {}).items()}
    found.update({name: base64.b64decode(value) for name, value in (source.get("binaryData") or {}).items()})
    return found


def _from_source(source: Object, fetch: Fetch) -> dict[str, str]:
    kind, reference = (
        ("secrets", source["secretRef"]) if "secretRef" in source else ("configmaps", source["configMapRef"])
    )
    entries = _entries(kind, reference, fetch)
    return {source.get("prefix", "") + name: value.decode(errors="replace") for name, value in entries.items()}


def _value(pod: Object, container: Object, entry: Object, env: Mapping[str, str], fetch: Fetch) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand(entry.get("value", ""), env)
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(container, source["resourceFieldRef"])
    is_secret = "secretKeyRef" in source
    kind, reference = ("secrets", source["secretKeyRef"]) if is_secret else ("configmaps", source["configMapKeyRef"])
    entries = _entries(kind, reference, fetch)
    if reference["key"] in entries:
        return entries[reference["key"]].decode(errors="replace")
    if reference.get("optional"):
        return None
    owner = f"{'Secret' if is_secret else 'ConfigMap'} {pod['metadata']['namespace']}/{reference['name']}"
    raise ConfigError(f"couldn't find key {reference['key']} in {owner}")


def _entries(kind: str, reference: Object, fetch: Fetch) -> dict[str, bytes]:
    found = fetch(kind, reference["name"])
    if found is not None:
        return decoded({"kind": "Secret" if kind == "secrets" else "ConfigMap", **found})
    if reference.get("optional"):
        return {}
    raise ConfigError(f'{kind.removesuffix("s")} "{reference["name"]}" not found')
