"""Pure: a strategic merge patch on a Job, for what the settings do not model.

It merges as the API server does: tables are merged, null removes a field, and a list of the fields in `_KEYS` is merged
by the key of its items; any other list replaces the one before. `$patch: replace` and `$patch: delete` work; another
directive is refused (`directive_problems`), and so is an overlay that would change what Atoll relies on
(`overlay_problems`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.kube.gang import KUEUE_QUEUE, PARTIAL
from atoll.kube.names import CONTAINER, is_ours
from atoll.spec import SECRET_LIKE

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
_SPEC = (
    "completions", "parallelism", "completionMode", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes",
    "podFailurePolicy", "podReplacementPolicy", "successPolicy", "selector", "manualSelector", "suspend",
    "activeDeadlineSeconds", "ttlSecondsAfterFinished", "managedBy",
)  # fmt: skip
_POD = ("restartPolicy", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "schedulerName")
_REPLICA = ("image", "command", "args", "terminationMessagePath", "terminationMessagePolicy")

_REPLACE = {"$patch": "replace"}
_DIRECTIVES = (("$patch", "replace"), ("$patch", "delete"))
_VOLUMES = ("atoll-args", "atoll-wheel")
"""They have the arguments of an own command, and the wheel of the launcher's Atoll."""


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """`base` with the patch applied; neither is changed."""
    if isinstance(patch, Mapping) and patch.get("$patch") == "delete":
        return {}
    if isinstance(patch, Mapping) and isinstance(base, Mapping) and patch.get("$patch") != "replace":
        result = dict(base)
        for name, value in patch.items():
            if name == "$patch":
                continue
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), value, name)
        return result
    if isinstance(patch, list | tuple):
        return _merged_list(base if isinstance(base, list) else [], patch, field)
    if isinstance(patch, Mapping):
        return {
            name: merged(None, value, name) for name, value in patch.items() if name != "$patch" and value is not None
        }
    return patch


def _merged_list(base: list[Any], patch: Sequence[Any], field: str) -> list[Any]:
    key = _KEYS.get(field)
    items = [item for item in patch if item != _REPLACE]
    if key is None or len(items) < len(patch):
        return [merged(None, item) for item in items]
    result = list(base)
    for item in items:
        name = item.get(key) if isinstance(item, Mapping) else None
        at = next((i for i, old in enumerate(result) if isinstance(old, Mapping) and old.get(key) == name), None)
        if isinstance(item, Mapping) and item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(merged(None, item))
        else:
            result[at] = merged(result[at], item)
    return result


def directive_problems(patch: Any, path: str = "overlay", field: str = "") -> Iterator[str]:
    """Directives that have no effect here, and items of a merged list without the key that it is merged by."""
    if isinstance(patch, Mapping):
        for name, value in patch.items():
            if name.startswith("$") and (name, value) not in _DIRECTIVES:
                yield f"{path}.{name}: no such directive; an overlay can have `$patch` with `replace` or `delete`"
            elif not name.startswith("$"):
                yield from directive_problems(value, f"{path}.{name}", name)
    elif isinstance(patch, list | tuple):
        key = _KEYS.get(field)
        for index, item in enumerate(patch):
            where, is_table = f"{path}[{index}]", isinstance(item, Mapping) and item != _REPLACE
            if is_table and key is None and "$patch" in item:
                yield f"{where}.$patch: this list is replaced as a whole; write all its items"
            if is_table and key is not None and key not in item:
                yield f"{where}.{key}: missing; the items of this list are merged by it"
            yield from directive_problems(item, where)


def overlay_problems(job: Mapping[str, Any], changed: Mapping[str, Any], variables: Sequence[str]) -> Iterator[str]:
    """What Atoll relies on and the overlay changes. `variables` are those of Atoll in the container."""
    before, after = _needed(job, variables), _needed(changed, variables)
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            yield f"overlay.{path}: no overlay can change this, because Atoll relies on it; use a setting if one has it"
    pod = _table(_table(_table(changed.get("spec")).get("template")).get("spec"))
    for kind in ("containers", "initContainers"):
        for each in _tables(pod.get(kind)):
            where = f"overlay.spec.template.spec.{kind}[{each.get('name')}].env"
            for entry in _tables(each.get("env")):
                if entry.get("value") and SECRET_LIKE.search(str(entry.get("name", ""))):
                    yield f"{where}.{entry['name']}: looks like a secret; use valueFrom.secretKeyRef"


def _needed(job: Mapping[str, Any], variables: Sequence[str]) -> dict[str, Any]:
    """The parts of a Job that Atoll relies on, each with its path."""
    found: dict[str, Any] = {"apiVersion": job.get("apiVersion"), "kind": job.get("kind")}
    spec = _table(job.get("spec"))
    template = _table(spec.get("template"))
    pod = _table(template.get("spec"))
    for where, metadata in (("metadata", job.get("metadata")), ("spec.template.metadata", template.get("metadata"))):
        table = _table(metadata)
        found |= {f"{where}.{name}": table.get(name) for name in ("name", "namespace", "generateName")}
        for kind in ("labels", "annotations"):
            marks = _table(table.get(kind))
            found |= {
                f"{where}.{kind}.{key}": marks[key] for key in marks if is_ours(key) or key in (*PARTIAL, KUEUE_QUEUE)
            }
    found |= {f"spec.{name}": spec.get(name) for name in _SPEC}
    found |= {f"spec.template.spec.{name}": pod.get(name) for name in _POD}
    volumes = {each.get("name"): each for each in _tables(pod.get("volumes"))}
    found |= {f"spec.template.spec.volumes.{name}": volumes.get(name) for name in _VOLUMES}
    containers = _tables(pod.get("containers"))
    replica = next((each for each in containers if each.get("name") == CONTAINER), None)
    where = f"spec.template.spec.containers[{CONTAINER}]"
    found[where] = replica is not None and containers[0] is replica
    if replica is None:
        return found
    found |= {f"{where}.{name}": replica.get(name) for name in _REPLICA}
    mounts = _tables(replica.get("volumeMounts"))
    found |= {
        f"{where}.volumeMounts.{name}": [each for each in mounts if each.get("name") == name] for name in _VOLUMES
    }
    env = _tables(replica.get("env"))
    found |= {f"{where}.env.{name}": [each for each in env if each.get("name") == name] for name in variables}
    return found


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
