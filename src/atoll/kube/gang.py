"""Pure: what each gang scheduler wants on the Job of a run, and what it really gives.

A plain Indexed Job is not a gang: Kubernetes starts its pods one by one, and some may run while others wait. The
setting is `none`, `native`, `kueue:QUEUE`, `coscheduling:SCHEDULER` or `volcano:QUEUE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.kube.names import is_dns_name, is_label_value
from atoll.validation import Kind

KUEUE_QUEUE, KUEUE_PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
PARTIAL = ("kueue.x-k8s.io/job-min-parallelism", "kueue.x-k8s.io/job-completions-equal-parallelism")
"""Kueue's partial admission: it lowers the number of replicas, and WORLD_SIZE would be wrong."""
COSCHEDULING_GROUP, COSCHEDULING_API = "scheduling.x-k8s.io/pod-group", "scheduling.x-k8s.io/v1alpha1"
VOLCANO_MEMBERS, VOLCANO_QUEUE = "scheduling.volcano.sh/group-min-member", "scheduling.volcano.sh/queue-name"
NATIVE_SINCE, NATIVE_FIELD_SINCE = (1, 36), (1, 37)
_NAMED = ("kueue", "coscheduling", "volcano")
_PERMIT_S = 60


@dataclass(frozen=True)
class Gang:
    """The parsed setting: `kind` is `none`, `native`, `kueue`, `coscheduling` or `volcano`."""

    kind: str
    name: str = ""
    """The queue of Kueue or Volcano, or the scheduler with the coscheduling plugin."""

    @classmethod
    def parse(cls, text: str) -> Gang:
        kind, _, name = text.partition(":")
        return cls(kind, name)


def is_gang(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    gang = Gang.parse(value)
    if gang.kind not in _NAMED:
        return value in ("none", "native")
    return is_label_value(gang.name) if gang.kind == "kueue" else is_dns_name(gang.name)


GANG = Kind("one of none, native, kueue:QUEUE, coscheduling:SCHEDULER, volcano:QUEUE", is_gang)


@dataclass(frozen=True)
class GangParts:
    """What a gang adds to the Job, to the pod template and to the run."""

    job_labels: Mapping[str, str] = field(default_factory=dict)
    job_annotations: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    job_spec: Mapping[str, Any] = field(default_factory=dict)
    pod_spec: Mapping[str, Any] = field(default_factory=dict)
    objects: tuple[dict[str, Any], ...] = ()
    """Objects that the Job owns: the executor adds the owner after it has created the Job."""
    by_version: tuple[dict[str, Any], ...] = ()
    """`{"from": [1, 37], "spec": {…}}`: what the Job's spec also has on servers from that version on."""


def gang_parts(gang: Gang, name: str, replicas: int, *, queue_priority: str | None = None) -> GangParts:
    """The parts for the Job `name`. `queue_priority` is a WorkloadPriorityClass of Kueue."""
    match gang.kind:
        case "kueue":  # suspended, because pods would start before Kueue admits them where its webhook is absent
            priority = {} if queue_priority is None else {KUEUE_PRIORITY: queue_priority}
            return GangParts(job_labels={KUEUE_QUEUE: gang.name, **priority}, job_spec={"suspend": True})
        case "coscheduling":
            group = {
                "apiVersion": COSCHEDULING_API,
                "kind": "PodGroup",
                "metadata": {"name": name},
                "spec": {"minMember": replicas, "scheduleTimeoutSeconds": _PERMIT_S},
            }
            return GangParts(
                pod_labels={COSCHEDULING_GROUP: name}, pod_spec={"schedulerName": gang.name}, objects=(group,)
            )
        case "volcano":
            return GangParts(
                job_annotations={VOLCANO_MEMBERS: str(replicas)},
                pod_annotations={VOLCANO_QUEUE: gang.name},
                pod_spec={"schedulerName": "volcano"},
            )
        case "native":
            policy = {"scheduling": {"schedulingPolicy": {"gang": {"minCount": replicas}}}}
            return GangParts(by_version=({"from": list(NATIVE_FIELD_SINCE), "spec": policy},))
        case _:
            return GangParts()


def job_for(request: Mapping[str, Any], version: tuple[int, int]) -> dict[str, Any]:
    """The Job of a request as a server of this version gets it. Its token is the same for every version."""
    job = dict(request["job"])
    for part in request.get("by_version") or ():
        if version >= tuple(part["from"]):
            job["spec"] = {**job["spec"], **part["spec"]}
    return job


def gang_problems(
    gang: Gang,
    *,
    has_requests: bool,
    marks: Mapping[str, str],
    max_restarts: int,
    queue_priority: str | None = None,
) -> Iterator[str]:
    """What this gang cannot do. `marks` are the user's labels and annotations."""
    if queue_priority is not None and gang.kind != "kueue":
        yield f"queue_priority=`{queue_priority}`: only gang=`kueue:QUEUE` has priorities of this kind"
    if queue_priority is not None and marks.get(KUEUE_PRIORITY, queue_priority) != queue_priority:
        yield f"queue_priority=`{queue_priority}`: the label {KUEUE_PRIORITY} has another one; leave one of them out"
    yield from (
        f"labels, annotations: `{key}`: partial admission starts fewer replicas than WORLD_SIZE says; leave it out"
        for key in PARTIAL
        if key in marks
    )
    if gang.kind != "kueue":
        if KUEUE_QUEUE in marks:
            yield f"labels.{KUEUE_QUEUE}: write gang=`kueue:{marks[KUEUE_QUEUE]}` instead, which also suspends the Job"
    elif not has_requests:
        yield f"gang=`kueue:{gang.name}`: Kueue counts requests; set cpus and memory_gib, or a GPU"
    if gang.kind == "native" and max_restarts:
        yield (
            f"max_restarts={max_restarts}: with gang=`native` a restarted rank waits for ever once another rank has "
            "ended, because the gang is no longer complete; use another gang or no restarts"
        )


def mark_problems(parts: GangParts, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Iterator[str]:
    """Labels and annotations of the user that the gang would replace; `gang_problems` looks at the priority."""
    ours = {
        "labels": (labels, {**parts.job_labels, **parts.pod_labels}),
        "annotations": (annotations, {**parts.job_annotations, **parts.pod_annotations}),
    }
    for setting, (given, set_by_gang) in ours.items():
        for key, value in set_by_gang.items():
            if key != KUEUE_PRIORITY and given.get(key, value) != value:
                yield f"{setting}.{key}=`{given[key]}`: `gang` sets it to `{value}`; leave one of them out"


def gang_notes(gang: Gang, replicas: int) -> Iterator[str]:
    """What the user gets, in plain words."""
    if replicas == 1:
        return
    match gang.kind:
        case "kueue":
            yield (
                f"gang: Kueue starts all {replicas} replicas when queue `{gang.name}` has quota for all of them. Quota "
                "is no promise of nodes: only a cluster with `waitForPodsReady` or topology-aware scheduling holds "
                "replicas back until all of them fit. An eviction by Kueue stops all replicas, and they start again"
            )
        case "coscheduling":
            yield (
                f"gang: scheduler `{gang.name}` places all {replicas} replicas or none, if it runs with the "
                "coscheduling plugin. A replica that starts again after another one has ended may wait for ever"
            )
        case "volcano":
            yield f"gang: Volcano places all {replicas} replicas or none, in its queue `{gang.name}`"
        case "native":
            yield (
                f"gang: Kubernetes itself places all {replicas} replicas or none, if the administrator has switched "
                "its feature gates on (1.36: GenericWorkload, GangScheduling and WorkloadWithJob; 1.37: "
                "GenericWorkload and WorkloadWithJob). They are off by default"
            )
        case _:
            yield (
                "gang: none. Kubernetes starts replicas one by one: some may run, and cost, while others wait for a "
                "node. `gang` has kueue:QUEUE, coscheduling:SCHEDULER, volcano:QUEUE and native"
            )
