"""Pure: what one pod of a replica says about its state, in the words of the cluster.

`pod_state` looks only at the pod. Whether a failed pod is the end of its rank is decided by `kube.reading`, which also
sees the Job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from atoll.context import TIMED_OUT, TOO_OLD, ending_signal, signal_name
from atoll.kube import bootstrap
from atoll.kube.names import COMMAND, CONTAINER, FAILURES, IGNORED_FAILURES, INDEX, TIMEOUT
from atoll.status import Reason, ReplicaState

_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CONFIG = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "InvalidVolume", "PostStartHookError",
     "PreCreateHookError", "PreStartHookError", "RunContainerError"}
)  # fmt: skip
_NO_ATOLL = re.compile(r"No module named '?atoll\b|cannot import name '\w+' from 'atoll")
_OLD_ATOLL = re.compile(r"the launcher has Atoll .* older version \S+")
_NO_PROGRAM = re.compile(r"executable file not found|no such file or directory", re.I)
_EVICTED = {
    "EvictionByEvictionAPI": "evicted through the API, as a drain of the node does",
    "DeletionByTaintManager": "node lost or tainted",
    "PreemptionByScheduler": "preempted by the scheduler, for a pod with a higher priority",
    "DeletionByPodGC": "node gone",
    "TerminationByKubelet": "ended by the kubelet, which is short of a resource or shuts down",
}
_POD_REASONS = {
    "DeadlineExceeded": Reason.TIMEOUT,
    "Evicted": Reason.PREEMPTED,
    "NodeLost": Reason.PREEMPTED,
    "NodeShutdown": Reason.PREEMPTED,
    "Preempting": Reason.PREEMPTED,
    "Shutdown": Reason.PREEMPTED,
    "Terminated": Reason.PREEMPTED,
    "NodeAffinity": Reason.UNSCHEDULABLE,
    "UnexpectedAdmissionError": Reason.BACKEND,
}
_FORGOTTEN = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The kubelet or containerd does not know how the container ended, such as after the node was off; the exit code is
made up."""
_OWN_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
"""The kubelet evicts a pod that uses more storage than its own limit; the Job counts this as a failure."""
_AND_OK = ", and the replica ended with code 0"
NEXT_STEP = 'install Atoll in the image, or set bootstrap="pip"'
_WARNINGS = {
    "FailedMount": Reason.CONFIG,
    "FailedAttachVolume": Reason.CONFIG,
    "FailedCreatePodSandBox": Reason.BACKEND,
}


@dataclass(frozen=True)
class PodState:
    """One pod: its state, and what it says about the container of the replica."""

    state: ReplicaState
    reason: Reason
    message: str = ""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    is_evicted: bool = False
    """The end of this pod does not count as a failure of its rank."""
    is_node_lost: bool = False
    """The node does not answer, so that the pod cannot end; its process may still run."""
    is_restart: bool = False
    """The pod has ended, and the rank waits for the next one."""


def pod_state(
    pod: Mapping[str, Any], job: Mapping[str, Any], *, events: Sequence[Mapping[str, Any]] = (), log_tail: str = ""
) -> PodState:
    """The state of a pod. `events` are those of the pod; `log_tail` has its last lines, if `needs_log` wants them."""
    status = pod.get("status") or {}
    phase = status.get("phase") or "Pending"
    if phase == "Succeeded":
        ended = terminated(pod) or {}
        return PodState(ReplicaState.SUCCEEDED, Reason.OK, "", 0, _started(pod), seconds(ended.get("finishedAt")))
    if phase == "Failed":
        return _failed(pod, job, log_tail)
    disruption = condition(status, "DisruptionTarget")
    is_evicted = disruption.get("status") == "True"
    if pod["metadata"].get("deletionTimestamp"):
        is_lost = _is_silent(pod) or (is_evicted and _is_node_gone(pod, disruption))
        node = (pod.get("spec") or {}).get("nodeName")
        text = _eviction(disruption) if is_evicted else "the pod is being ended"
        if is_lost:
            text = f"node lost: `{node}` does not answer, and the pod cannot end before it does or is removed ({text})"
        state = ReplicaState.RUNNING if _started(pod) is not None else ReplicaState.PENDING
        return PodState(
            state, Reason.STOPPING, text, started_at=_started(pod), is_evicted=is_evicted, is_node_lost=is_lost
        )
    # A pod is pending until all its containers have started, also while that of the replica runs or has ended.
    if phase in ("Running", "Unknown") or {"running", "terminated"} & _container(pod).keys():
        return _running(pod, phase)
    return _pending(pod, events)


def _running(pod: Mapping[str, Any], phase: str) -> PodState:
    ended, started = terminated(pod), _started(pod)
    node = (pod.get("spec") or {}).get("nodeName")
    if ended is not None:
        others = [name for name, state in _others(pod) if {"running", "waiting"} & state.keys()]
        rest = f"; the pod goes on because of {', '.join(others)}" if others else ""
        text = f"the replica ended with code {ended.get('exitCode')}{rest}"
        # Not `stopping`: nobody stops it, and a launcher that reads this would take the run for one that is cancelled.
        return PodState(ReplicaState.RUNNING, Reason.OK, text, ended.get("exitCode"), started)
    if phase == "Unknown":
        return PodState(ReplicaState.RUNNING, Reason.BACKEND, f"node `{node}` does not answer", started_at=started)
    waiting = _waiting(pod)
    if started is None and waiting is not None:
        return PodState(ReplicaState.PENDING, *_wait_reason(waiting))
    if _is_silent(pod):
        text = f"node `{node}` may be lost: the pod is not ready although its container runs"
        return PodState(ReplicaState.RUNNING, Reason.BACKEND, text, started_at=started)
    held = [(name, *_wait_reason(state["waiting"])) for name, state in _others(pod) if "waiting" in state]
    text = "; ".join(f"container `{name}` waits: {said}" for name, kind, said in held if kind is not Reason.STARTING)
    return PodState(ReplicaState.RUNNING, Reason.OK, text, started_at=started)


def _is_node_gone(pod: Mapping[str, Any], disruption: Mapping[str, Any]) -> bool:
    """Whether the control plane has evicted a pod from a node that is gone. A taint also evicts pods from a node that
    answers; there the pod is ready until its container ends."""
    is_ready = condition(pod.get("status") or {}, "Ready").get("status") == "True"
    kind = disruption.get("reason")
    return kind == "DeletionByPodGC" or (kind == "DeletionByTaintManager" and not is_ready)


def _is_silent(pod: Mapping[str, Any]) -> bool:
    """Whether the control plane, and not the kubelet, has marked a pod with a running container as not ready."""
    ready = condition(pod.get("status") or {}, "Ready")
    return ready.get("status") == "False" and "running" in _container(pod) and not ready.get("reason")


def _pending(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> PodState:
    status = pod.get("status") or {}
    scheduled = condition(status, "PodScheduled")
    if not scheduled:
        text = "the scheduler has not looked at this pod yet, or holds it back until its gang is complete"
        return PodState(ReplicaState.PENDING, Reason.WAITING, text)
    if scheduled.get("status") != "True":
        reason, text = str(scheduled.get("reason") or ""), str(scheduled.get("message") or "")
        is_gated = reason == "SchedulingGated"
        said = f"{reason}: {text}" if text else reason
        return PodState(ReplicaState.PENDING, Reason.WAITING if is_gated else Reason.UNSCHEDULABLE, said)
    if (waiting := _waiting(pod)) is not None:
        reason_found, said = _wait_reason(waiting)
        if reason_found is not Reason.STARTING:
            return PodState(ReplicaState.PENDING, reason_found, said)
    # With its sandbox the pod has its volumes and its network: what went wrong with them before is over.
    has_sandbox = condition(status, "PodReadyToStartContainers").get("status") == "True"
    warned = [event for event in events if event.get("reason") in _WARNINGS]
    if warned and not has_sandbox:
        newest = max(warned, key=event_time)
        said = f"{newest['reason']}: {newest.get('message') or ''}"
        return PodState(ReplicaState.PENDING, _WARNINGS[newest["reason"]], said)
    return PodState(ReplicaState.PENDING, Reason.STARTING, str((waiting or {}).get("reason") or "starting"))


def _wait_reason(waiting: Mapping[str, Any]) -> tuple[Reason, str]:
    reason, text = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    said = f"{reason}: {text}" if text else reason
    kind = Reason.IMAGE if reason in _IMAGE else Reason.CONFIG if reason in _CONFIG else Reason.STARTING
    return kind, said


def _failed(pod: Mapping[str, Any], job: Mapping[str, Any], log_tail: str) -> PodState:
    status, ended = pod["status"], terminated(pod) or _forgotten(pod)
    code = ended.get("exitCode")
    disruption = condition(status, "DisruptionTarget")
    is_evicted = disruption.get("status") == "True"
    started, ended_at = _started(pod), seconds(ended.get("finishedAt"))
    if is_evicted:
        reason, text = Reason.PREEMPTED, _eviction(disruption)
    elif status.get("reason") in _POD_REASONS or str(status.get("reason") or "").startswith("OutOf"):
        kind = str(status["reason"])
        reason = _POD_REASONS.get(kind, Reason.CAPACITY)
        text = f"{kind}: {status.get('message') or ''}".rstrip(": ")
        if kind == "Evicted" and _OWN_LIMIT.search(text):
            reason = Reason.KILLED
    else:
        ran = None if started is None or ended_at is None else ended_at - started
        reason, text = _container_failure(pod, job, ended, ran, log_tail)
    return PodState(ReplicaState.FAILED, reason, text, code, started, ended_at, is_evicted)


def _container_failure(
    pod: Mapping[str, Any], job: Mapping[str, Any], ended: Mapping[str, Any], ran_s: float | None, log_tail: str
) -> tuple[Reason, str]:
    """Why the container of the replica failed, from its exit code, its message and the time that it ran."""
    code, kind = ended.get("exitCode"), str(ended.get("reason") or "")
    said = str(ended.get("message") or log_tail or "").strip()
    last = said.splitlines()[-1].strip() if said else ""
    if not ended:
        return _other_failure(pod)
    if kind == "OOMKilled":
        return Reason.OOM, f"OOMKilled: {last}".rstrip(": ")
    if kind in ("StartError", "ContainerCannotRun"):
        is_image = _NO_PROGRAM.search(said) is not None
        return (Reason.IMAGE if is_image else Reason.CONFIG), f"{kind}: {said or 'the container could not be started'}"
    if kind in _FORGOTTEN:
        return Reason.BACKEND, f"{kind}: {last}".rstrip(": ")
    if code == 0:
        return _other_failure(pod)
    if (command := _mark(job, COMMAND)) != "own" and _NO_ATOLL.search(said):
        return Reason.IMAGE, f"the image has no Atoll, or one that is too old: {last}; {NEXT_STEP}"
    if command != "own" and code == TOO_OLD and (older := _OLD_ATOLL.search(said)):
        return Reason.IMAGE, f"{older[0]}; {NEXT_STEP}"
    if command == "pip" and code == bootstrap.EXIT_CODE:
        words = next((line for line in said.splitlines() if line.startswith(bootstrap.WORDS)), said)
        return Reason.IMAGE, words or "the bootstrap could not install Atoll; the log has pip's output"
    limit_s = _number(_mark(job, TIMEOUT))
    killed_by = ending_signal(code)
    # Kubernetes reports whole seconds, so that a container may seem to have run for one second less.
    is_at_limit = limit_s is not None and ran_s is not None and ran_s + 1 >= limit_s
    # Earlier pods of the rank have used a part of the limit, which a supervisor counts.
    has_less = limit_s is not None and attempt_of(pod) > 0 and command != "own"
    if (is_at_limit and killed_by) or ((is_at_limit or has_less) and code == TIMED_OUT):
        return Reason.TIMEOUT, f"still running after its limit of {limit_s:g} s"
    if killed_by:
        return Reason.KILLED, f"killed by {signal_name(killed_by)}" + (f": {last}" if last else "")
    return Reason.USER_ERROR, f"exit code {code}" + (f": {last}" if last else "")


def _other_failure(pod: Mapping[str, Any]) -> tuple[Reason, str]:
    """The pod failed although the container of the replica did not: another container, or Kubernetes itself."""
    status = pod["status"]
    for each in [*(status.get("initContainerStatuses") or ()), *_statuses(pod)]:
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            kind = str(ended.get("reason") or "Error")
            said = "" if kind == "Error" else f" ({kind})"
            text = f"container `{each['name']}` ended with code {ended['exitCode']}{said}"
            return Reason.CONFIG, f"{text} before the replica ran" if terminated(pod) is None else f"{text}{_AND_OK}"
    text = ": ".join(str(status[name]) for name in ("reason", "message") if status.get(name))
    if terminated(pod) is not None:
        return Reason.BACKEND, text or f"the pod failed{_AND_OK}"
    return Reason.BACKEND, text or "the pod failed before its container ran"


def needs_log(pod: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Whether only the log can say why this pod failed: its code may be ours, and the node has told no last lines. Pods
    ask for them, and a kubelet gives them; other programs that run pods may not."""
    ended = terminated(pod) or {}
    is_failed = (pod.get("status") or {}).get("phase") == "Failed"
    return (
        is_failed
        and ended.get("exitCode") in (1, TOO_OLD)
        and not ended.get("message")
        and _mark(job, COMMAND) != "own"
    )


def _eviction(disruption: Mapping[str, Any]) -> str:
    kind, text = str(disruption.get("reason") or ""), str(disruption.get("message") or "")
    return ": ".join(filter(None, (kind, _EVICTED.get(kind), text)))


def rank_of(pod: Mapping[str, Any]) -> int | None:
    """The completion index of a pod; None if it has none."""
    metadata = pod["metadata"]
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    index = str(marks.get(INDEX, ""))
    return int(index) if index.isdecimal() else None


def failures_before(pod: Mapping[str, Any]) -> int:
    """How many pods of this rank failed before this one, those that were evicted left out."""
    return _count(pod, FAILURES)


def attempt_of(pod: Mapping[str, Any]) -> int:
    """How many pods of this rank ended before this one."""
    return _count(pod, FAILURES) + _count(pod, IGNORED_FAILURES)


def age_key(pod: Mapping[str, Any]) -> tuple[str, int, str]:
    """Sorts the pods of one rank from the oldest to the newest."""
    metadata = pod["metadata"]
    return str(metadata.get("creationTimestamp") or ""), attempt_of(pod), str(metadata.get("name") or "")


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of this type; empty if there is none."""
    return next((each for each in status.get("conditions") or () if each.get("type") == kind), {})


def event_time(event: Mapping[str, Any]) -> str:
    """When an event was last seen, as a text that sorts by time."""
    series = (event.get("series") or {}).get("lastObservedTime")
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return str(series or event.get("lastTimestamp") or event.get("eventTime") or created or "")


def seconds(moment: Any) -> float | None:
    """A time of Kubernetes, such as `2026-08-01T12:00:00Z`, in seconds since 1970; None for the zero time."""
    if not isinstance(moment, str) or not moment:
        return None
    try:
        found = datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
    return found if found > 0 else None


def _count(pod: Mapping[str, Any], key: str) -> int:
    text = str((pod["metadata"].get("annotations") or {}).get(key, "0"))
    return int(text) if text.isdecimal() else 0


def _mark(job: Mapping[str, Any], key: str) -> str:
    return str((job.get("metadata", {}).get("annotations") or {}).get(key, ""))


def _number(text: str) -> float | None:
    try:
        return float(json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def _statuses(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _others(pod: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The containers of a pod besides that of the replica, which an overlay adds, and their states."""
    found = [(str(each.get("name")), each.get("state") or {}) for each in _statuses(pod)]
    return [(name, state) for name, state in found if name != CONTAINER]


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    found = next((each for each in _statuses(pod) if each.get("name") == CONTAINER), {})
    return found.get("state") or {}


def terminated(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The end of the replica's container; None if it has not ended."""
    return _container(pod).get("terminated")


def _forgotten(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The end of a container that ran and that the kubelet does not find any more; empty if there is none. Its state
    is then that of a container that was never started."""
    found = next((each for each in _statuses(pod) if each.get("name") == CONTAINER), {})
    return (found.get("lastState") or {}).get("terminated") or {}


def _waiting(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = [each for each in (pod.get("status") or {}).get("initContainerStatuses") or () if each.get("state")]
    init = [each["state"]["waiting"] for each in found if "waiting" in each["state"]]
    own = _container(pod).get("waiting")
    return next((each for each in init if each.get("reason") in _IMAGE | _CONFIG), own)


def _started(pod: Mapping[str, Any]) -> float | None:
    state = _container(pod)
    return seconds((state.get("running") or state.get("terminated") or {}).get("startedAt"))
