"""Pure: the objects that the pods of a Job name and that must exist before a pod can start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_CORE, _NODE, _SCHEDULING = "/api/v1", "/apis/node.k8s.io/v1", "/apis/scheduling.k8s.io/v1"


class Reference(NamedTuple):
    """One object. `setting` is where the user named it."""

    kind: str
    name: str
    setting: str
    plural: str
    api: str = _CORE
    is_namespaced: bool = True

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`"


def references(job: Mapping[str, Any], own: Sequence[Mapping[str, Any]] = ()) -> list[Reference]:
    """Each object once. `own` are the objects that the launch creates itself. An overlay may have given the pod any
    shape: what is no reference is left out, because the API server reports it."""
    pod = job["spec"]["template"]["spec"]
    ours = {(thing["kind"], thing["metadata"]["name"]) for thing in own}
    found = {(each.kind, each.name): each for each in reversed(list(_all(pod))) if each.name}
    return [each for key, each in sorted(found.items()) if key not in ours]


def _all(pod: Mapping[str, Any]) -> Iterator[Reference]:
    yield Reference("ServiceAccount", _name(pod, "serviceAccountName"), "service_account", "serviceaccounts")
    name = _name(pod, "priorityClassName")
    yield Reference("PriorityClass", name, "priority_class", "priorityclasses", _SCHEDULING, is_namespaced=False)
    name = _name(pod, "runtimeClassName")
    yield Reference("RuntimeClass", name, "runtime_class", "runtimeclasses", _NODE, is_namespaced=False)
    yield from (_secret(_name(each, "name"), "pull_secrets") for each in _tables(pod.get("imagePullSecrets")))
    for volume in _tables(pod.get("volumes")):
        yield from _of_volume(volume)
    for container in [*_tables(pod.get("initContainers")), *_tables(pod.get("containers"))]:
        for variable in _tables(container.get("env")):
            given = _table(variable.get("valueFrom"))
            yield from _of_source(given, ("secretKeyRef", "configMapKeyRef"), f"secrets.{variable.get('name')}")
        for source in _tables(container.get("envFrom")):
            yield from _of_source(source, ("secretRef", "configMapRef"), "overlay")


def _of_volume(volume: Mapping[str, Any]) -> Iterator[Reference]:
    claim = _name(_table(volume.get("persistentVolumeClaim")), "claimName")
    yield Reference("PersistentVolumeClaim", claim, "volumes", "persistentvolumeclaims")
    for source in [volume, *_tables(_table(volume.get("projected")).get("sources"))]:
        secret, config_map = _table(source.get("secret")), _table(source.get("configMap"))
        if not secret.get("optional"):
            yield _secret(_name(secret, "secretName") or _name(secret, "name"), "volumes")
        if not config_map.get("optional"):
            yield _config_map(_name(config_map, "name"), "volumes")


def _of_source(source: Mapping[str, Any], names: tuple[str, str], setting: str) -> Iterator[Reference]:
    secret, config_map = (_table(source.get(name)) for name in names)
    if not secret.get("optional"):
        yield _secret(_name(secret, "name"), setting)
    if not config_map.get("optional"):
        yield _config_map(_name(config_map, "name"), setting)


def _secret(name: str, setting: str) -> Reference:
    return Reference("Secret", name, setting, "secrets")


def _config_map(name: str, setting: str) -> Reference:
    return Reference("ConfigMap", name, setting, "configmaps")


def _name(thing: Mapping[str, Any], field: str) -> str:
    """The name in this field; empty if there is none."""
    found = thing.get(field)
    return found if isinstance(found, str) else ""


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
