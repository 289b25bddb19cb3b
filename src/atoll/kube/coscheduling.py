"""Pure: why a scheduler with the Coscheduling plugin starts no replica of a PodGroup.

The plugin rejects all pods of a group if one of them fits nowhere. Only that pod's condition, or an event of an earlier
try, says what is missing; the others say no more than that their group was rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from atoll.kube.gang import COSCHEDULING_GROUP
from atoll.kube.pod_state import PodState, condition, event_time
from atoll.status import Reason, ReplicaState

_NODES = re.compile(r"\d+/\d+ nodes are available: (?!\d+ (?:optimistic )?rejection in ).*?(?=,? ?PodGroup |\Z)", re.S)


def group_of(pod: Mapping[str, Any]) -> str:
    """The PodGroup of a pod; empty if it has none."""
    return str(((pod.get("metadata") or {}).get("labels") or {}).get(COSCHEDULING_GROUP) or "")


def with_group(
    states: Mapping[int, PodState], pods: Mapping[int, Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
) -> dict[int, PodState]:
    """The states of the ranks; those of a group of which no pod has a node say so, and what the scheduler misses.

    `pods` are the newest ones, by rank; `events` are those of all of them.
    """
    found = dict(states)
    held = {rank: pod for rank, pod in pods.items() if group_of(pod) and _is_held(states[rank])}
    if not held or any(group_of(pod) and (pod.get("spec") or {}).get("nodeName") for pod in pods.values()):
        return found
    said = _about_nodes(held.values(), events)
    for rank, pod in held.items():
        text = f"the scheduler places all replicas of PodGroup `{group_of(pod)}` or none, and none starts"
        found[rank] = replace(states[rank], message=f"{text}: {said or states[rank].message}")
    return found


def _is_held(state: PodState) -> bool:
    return state.state is ReplicaState.PENDING and state.reason is Reason.UNSCHEDULABLE


def _about_nodes(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> str:
    """The scheduler's words about the nodes: of a pod that it tries now, else of its last try."""
    texts = [str(condition(pod.get("status") or {}, "PodScheduled").get("message") or "") for pod in pods]
    tries = sorted((each for each in events if each.get("reason") == "FailedScheduling"), key=event_time, reverse=True)
    texts += [str(each.get("message") or "") for each in tries]
    return next((match[0].strip() for text in texts if (match := _NODES.search(text))), "")
