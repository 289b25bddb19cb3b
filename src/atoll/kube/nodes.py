"""Pure: which nodes take replicas, and what they have free, for `atoll doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.kube.pod_state import condition
from atoll.kube.quantities import GIB, parsed

_BLOCKING = ("NoSchedule", "NoExecute")
_PASSING = "node.kubernetes.io/"
"""The taints of nodes that are not ready; the condition says the same."""


@dataclass(frozen=True)
class Room:
    """What one node has free for pods."""

    node: str
    cpus: float
    memory_gib: float
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Resource key -> devices, for the nodes that have GPUs."""

    def holds(self, cpus: float, memory_gib: float, gpu_key: str | None = None) -> bool:
        """Whether one replica with these requests, and one GPU of this kind, fits."""
        has_gpu = gpu_key is None or self.gpus.get(gpu_key, 0) >= 1
        return self.cpus >= cpus and self.memory_gib >= memory_gib and has_gpu


def rooms(
    nodes: Iterable[Mapping[str, Any]],
    pods: Iterable[Mapping[str, Any]],
    *,
    selector: Mapping[str, str],
    tolerations: Sequence[Mapping[str, Any]],
    gpu_keys: Sequence[str],
) -> list[Room]:
    """The nodes that take such replicas, without what the `pods` of the cluster request."""
    used: dict[str, dict[str, float]] = {}
    for pod in pods:
        spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
        if spec.get("nodeName") and phase not in ("Succeeded", "Failed"):
            taken = used.setdefault(spec["nodeName"], {})
            taken |= {key: taken.get(key, 0.0) + amount for key, amount in _requested(spec).items()}
    found = []
    for node in nodes:
        if not _takes(node, selector, tolerations):
            continue
        name = str(node["metadata"]["name"])
        has = {key: _amount(value) for key, value in ((node.get("status") or {}).get("allocatable") or {}).items()}
        left = {key: max(0.0, amount - used.get(name, {}).get(key, 0.0)) for key, amount in has.items()}
        gpus = {key: int(left[key]) for key in gpu_keys if has.get(key)}
        found.append(Room(name, left.get("cpu", 0.0), left.get("memory", 0.0) / GIB, gpus))
    return found


def room_text(found: Sequence[Room], *, cpus: float, memory_gib: float, is_complete: bool) -> str:
    """What `doctor` says. `is_complete` is false if the pods of other namespaces could not be read."""
    if not found:
        return "no node takes replicas now; one that a cluster autoscaler adds may"
    roomiest = max(found, key=lambda room: (room.cpus, room.memory_gib))
    word = "free" if is_complete else "in all, whatever runs there"
    most = f"{_rounded(roomiest.cpus)} cores and {_rounded(roomiest.memory_gib)} GiB"
    text = f"{len(found)} take replicas; the roomiest has {most} {word}"
    for key in sorted({key for room in found for key in room.gpus}):
        having = [room for room in found if key in room.gpus]
        devices = sum(room.gpus[key] for room in having)
        text += f"; {devices} {key} {word} on {len(having)}"
    fits = any(room.holds(cpus, memory_gib) for room in found)
    request = f"{cpus:g} cores and {memory_gib:g} GiB" if cpus or memory_gib else "no requests"
    return f"{text}; one replica with {request} {'fits' if fits else 'does not fit and would wait'}"


def _rounded(amount: float) -> str:
    """Three digits, without an exponent."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def _takes(node: Mapping[str, Any], selector: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the scheduler would use this node for such a replica, if it had room."""
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    is_ready = condition(node.get("status") or {}, "Ready").get("status") == "True"
    is_chosen = all(labels.get(key) == value for key, value in selector.items())
    taints = [taint for taint in spec.get("taints") or () if taint.get("effect") in _BLOCKING]
    foreign = [taint for taint in taints if not taint["key"].startswith(_PASSING)]
    is_free = all(any(_tolerates(each, taint) for each in tolerations) for taint in foreign)
    return is_ready and not spec.get("unschedulable") and is_chosen and is_free


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")


def _requested(pod: Mapping[str, Any]) -> dict[str, float]:
    """What the containers of a pod request together."""
    total: dict[str, float] = {}
    for container in pod.get("containers") or ():
        for key, value in ((container.get("resources") or {}).get("requests") or {}).items():
            total[key] = total.get(key, 0.0) + _amount(value)
    return total


def _amount(quantity: Any) -> float:
    """A quantity that someone else wrote; 0 for a form that we do not read."""
    try:
        return parsed(str(quantity))
    except ValueError:
        return 0.0
