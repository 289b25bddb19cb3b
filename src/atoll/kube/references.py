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
    """Each object once. `own` are the objects that the launch creates itself."""
    pod = job["spec"]["template"]["spec"]
    ours = {(thing["kind"], thing["metadata"]["name"]) for thing in own}
    found = {(each.kind, each.name): each for each in reversed(list(_all(pod)))}
    return [each for key, each in sorted(found.items()) if key not in ours]


def _all(pod: Mapping[str, Any]) -> Iterator[Reference]:
    if name := pod.get("serviceAccountName"):
        yield Reference("ServiceAccount", name, "service_account", "serviceaccounts")
    if name := pod.get("priorityClassName"):
        yield Reference("PriorityClass", name, "priority_class", "priorityclasses", _SCHEDULING, is_namespaced=False)
    if name := pod.get("runtimeClassName"):
        yield Reference("RuntimeClass", name, "runtime_class", "runtimeclasses", _NODE, is_namespaced=False)
    yield from (_secret(each.get("name"), "pull_secrets") for each in pod.get("imagePullSecrets") or ())
    for volume in pod.get("volumes") or ():
        yield from _of_volume(volume)
    for container in [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]:
        for variable in container.get("env") or ():
            given = variable.get("valueFrom") or {}
            yield from _of_source(given, ("secretKeyRef", "configMapKeyRef"), f"secrets.{variable['name']}")
        for source in container.get("envFrom") or ():
            yield from _of_source(source, ("secretRef", "configMapRef"), "overlay")


def _of_volume(volume: Mapping[str, Any]) -> Iterator[Reference]:
    if claim := volume.get("persistentVolumeClaim"):
        yield Reference("PersistentVolumeClaim", claim["claimName"], "volumes", "persistentvolumeclaims")
    for source in [volume, *((volume.get("projected") or {}).get("sources") or ())]:
        if (secret := source.get("secret")) and not secret.get("optional"):
            yield _secret(secret.get("secretName") or secret.get("name"), "volumes")
        if (config_map := source.get("configMap")) and not config_map.get("optional"):
            yield _config_map(config_map["name"], "volumes")


def _of_source(source: Mapping[str, Any], names: tuple[str, str], setting: str) -> Iterator[Reference]:
    secret, config_map = (source.get(name) for name in names)
    if secret and not secret.get("optional"):
        yield _secret(secret["name"], setting)
    if config_map and not config_map.get("optional"):
        yield _config_map(config_map["name"], setting)


def _secret(name: Any, setting: str) -> Reference:
    return Reference("Secret", str(name), setting, "secrets")


def _config_map(name: Any, setting: str) -> Reference:
    return Reference("ConfigMap", str(name), setting, "configmaps")
