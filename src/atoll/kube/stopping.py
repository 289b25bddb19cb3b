"""Pure: what is left of a run after a stop, and the error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.errors import StopFailed
from atoll.kube.reading import lost_nodes

Object = Mapping[str, Any]
_FORCE = "if the node is gone for good: `kubectl delete pod {names} --force --grace-period=0 -n {namespace}`"


def is_alive(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def is_orphan(thing: Object) -> bool:
    """Whether nothing will end this object: nobody has deleted it, and it has no owner."""
    metadata = thing["metadata"]
    return not metadata.get("deletionTimestamp") and not metadata.get("ownerReferences")


def stop_failed(native_id: str, namespace: str, left: Sequence[Object], executor: str) -> StopFailed:
    """The error that names each pod that is left, why it is, and what to do."""
    nodes = lost_nodes(left)
    orphans = [name_of(each) for each in left if is_orphan(each)]
    hint = None
    if nodes:
        hint = _FORCE.format(names=" ".join(nodes), namespace=namespace)
    elif orphans:
        hint = f"kubectl delete pod {' '.join(orphans)} -n {namespace}"
    refusals = {name_of(each): _why_left(each, nodes) for each in left}
    return StopFailed(f"run `{native_id}`", refusals, executor=executor, hint=hint)


def name_of(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _why_left(thing: Object, nodes: Mapping[str, str]) -> str:
    name = name_of(thing)
    if name in nodes:
        return f"its node `{nodes[name]}` does not answer, so that nobody can tell whether it still runs"
    if thing.get("kind") == "AppWrapper":
        return "its pods have ended, and its controller, which may be down, has not removed it yet"
    if is_orphan(thing):
        return "its Job was deleted without its pods, so that this pod runs on"
    return "has not ended within the time for stopping"
