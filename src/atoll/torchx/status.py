"""Pure: the state of an app from its wrapper, its pods and its Workload, for every dialect.

The pods have the truth: MCAD calls an app Running for ever, and the AppWrapper controller notices a failure up to a
minute late. A state that is not known here is UNKNOWN, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchx.specs import AppState, ReplicaState

from atoll import status as atoll_status
from atoll.kube import pod_state as kube_pods
from atoll.kube.appwrapper import PREFIX, components_of
from atoll.kube.kueue import QueueState, queue_of
from atoll.kube.names import COMMAND, CONTAINER
from atoll.torchx.names import APP_NAME, CANCELLED, INSTANCE, MANAGED_BY, MANAGER, REPLICA_ID, ROLE_NAME

STATES: dict[str, AppState] = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "RunningHoldCompletion": AppState.RUNNING,
    "Completed": AppState.SUCCEEDED,
    "Deleted": AppState.CANCELLED,
    "Failed": AppState.FAILED,
}
"""The states of MCAD."""
PHASES: dict[str, AppState] = {
    "Suspended": AppState.PENDING,
    "Resuming": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Resetting": AppState.PENDING,
    "Suspending": AppState.PENDING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
    "Terminating": AppState.RUNNING,
}
"""The phases of the AppWrapper controller."""
TASKS: dict[str, ReplicaState] = {
    "Pending dispatch": ReplicaState.PENDING,
    "pending": ReplicaState.PENDING,
    "running": ReplicaState.RUNNING,
    "Succeeded": ReplicaState.SUCCEEDED,
    "failed": ReplicaState.FAILED,
    "Unknown": ReplicaState.UNKNOWN,
}
"""What MCAD counts."""
_COUNTERS = ("running", "pending", "failed", "Succeeded")
_OF_POD = {
    atoll_status.ReplicaState.PENDING: ReplicaState.PENDING,
    atoll_status.ReplicaState.RUNNING: ReplicaState.RUNNING,
    atoll_status.ReplicaState.SUCCEEDED: ReplicaState.SUCCEEDED,
    atoll_status.ReplicaState.FAILED: ReplicaState.FAILED,
    atoll_status.ReplicaState.CANCELLED: ReplicaState.CANCELLED,
    atoll_status.ReplicaState.LOST: ReplicaState.UNKNOWN,
}
_OWN_COMMAND = {"metadata": {"annotations": {COMMAND: "own"}}}
"""For `pod_state`: the image runs no replica of Atoll, so that its exit codes have no meaning of ours."""


@dataclass(frozen=True)
class Replica:
    """One replica of a role."""

    role: str
    index: int
    state: ReplicaState
    host: str = ""
    message: str = ""


@dataclass(frozen=True)
class AppReading:
    """What is known about an app."""

    state: AppState
    message: str
    restarts: int
    replicas: tuple[Replica, ...]


def reading(
    wrapper: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]] | None,
    queue: QueueState | None = None,
    jobs: Sequence[Mapping[str, Any]] | None = None,
) -> AppReading:
    """The state of an app. `pods` is None if they cannot be read; `queue` is what Kueue says, if it holds the app;
    `jobs` are those of the app, if `needs_jobs` wants them."""
    shapes = role_sizes(wrapper)
    if pods is None:
        replicas = _counted(wrapper, shapes)
    else:
        newest = newest_pods(pods)
        ids = [(role, index) for role, size in shapes.items() for index in range(size)]
        replicas = tuple(_replica(role, index, newest.get((role, index))) for role, index in ids)
    # Of an AppWrapper that TorchX did not create, only its controller can say how it is.
    state, message = _state(wrapper, replicas, is_seen=pods is not None and bool(shapes))
    if state in (AppState.PENDING, AppState.RUNNING, AppState.SUCCEEDED) and (why := _failed_job(jobs or ())):
        state, message = AppState.FAILED, why
    if queue is not None and state is AppState.PENDING:
        message = queue.message
        if queue.state is atoll_status.ReplicaState.FAILED:
            state = AppState.FAILED
    replicas = tuple(_ended(each, state) for each in replicas)
    in_place = max((restarts_in_place(pod) for pod in newest_pods(pods or ()).values()), default=0)
    return AppReading(state, message, _restarts(wrapper, is_seen=pods is not None) + in_place, replicas)


def role_sizes(wrapper: Mapping[str, Any]) -> dict[str, int]:
    """The roles in a wrapper, and how many replicas each has."""
    found: dict[str, int] = {}
    for each in components_of(wrapper):
        role = ((each.get("metadata") or {}).get("labels") or {}).get(ROLE_NAME)
        if role is not None:
            size = int((each.get("spec") or {}).get("completions") or 1) if each.get("kind") == "Job" else 1
            found[role] = found.get(role, 0) + size
    return found


def is_of_torchx(wrapper: Mapping[str, Any]) -> bool:
    """Whether TorchX made this wrapper. TorchX 0.7.0 puts no label on it, but on the pods in it."""
    labels = (wrapper.get("metadata") or {}).get("labels") or {}
    if labels.get(MANAGED_BY) == MANAGER or APP_NAME in labels or "spec" not in wrapper:
        return True
    return any(
        ((each.get("metadata") or {}).get("labels") or {}).get(MANAGED_BY) == MANAGER for each in components_of(wrapper)
    )


def wrapper_state(wrapper: Mapping[str, Any]) -> AppState:
    """The state by the wrapper alone."""
    status = wrapper.get("status") or {}
    if is_cancelled(wrapper):
        return AppState.CANCELLED
    if status.get("phase"):
        return PHASES.get(str(status["phase"]), AppState.UNKNOWN)
    word = str(status.get("state") or "")
    if not word:
        return AppState.PENDING
    if (word == "Completed" and _number(status.get("failed"))) or (word == "Deleted" and _gave_up(status)):
        return AppState.FAILED
    return STATES.get(word, AppState.UNKNOWN)


def is_cancelled(wrapper: Mapping[str, Any]) -> bool:
    """Whether `cancel` has stopped the app and kept its wrapper."""
    metadata = wrapper.get("metadata") or {}
    phase = str((wrapper.get("status") or {}).get("phase") or "")
    return CANCELLED in (metadata.get("annotations") or {}) and phase not in ("Succeeded", "Failed")


def needs_workload(wrapper: Mapping[str, Any]) -> bool:
    """Whether only Kueue can say why the app waits."""
    phase = str((wrapper.get("status") or {}).get("phase") or "")
    return queue_of(wrapper) != "" and phase in ("", "Suspended", "Suspending") and not is_cancelled(wrapper)


def needs_pods(wrapper: Mapping[str, Any]) -> bool:
    """Whether only the pods can say how the app has ended: MCAD calls it Running for ever, or Completed also after a
    failure."""
    state = (wrapper.get("status") or {}).get("state")
    return (state == "Running" and bool(role_sizes(wrapper))) or (state == "Completed" and bool(_in_place(wrapper)))


def needs_jobs(wrapper: Mapping[str, Any], pods: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether only the Jobs can say that the app has failed: a Job whose containers restart in place deletes its pods
    when it gives up, and MCAD does not say that."""
    state = (wrapper.get("status") or {}).get("state")
    if pods is None or state not in ("Running", "Completed"):
        return False
    there, sizes = newest_pods(pods), role_sizes(wrapper)
    return any((role, index) not in there for role in _in_place(wrapper) for index in range(sizes[role]))


def _in_place(wrapper: Mapping[str, Any]) -> list[str]:
    """The roles whose containers restart in place."""
    jobs = [each for each in components_of(wrapper) if each.get("kind") == "Job" and role_of(each) is not None]
    pods = [((each.get("spec") or {}).get("template") or {}).get("spec") or {} for each in jobs]
    return [str(role_of(job)) for job, pod in zip(jobs, pods, strict=True) if pod.get("restartPolicy") == "OnFailure"]


def listed_state(
    wrapper: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]] | None,
    jobs: Sequence[Mapping[str, Any]] | None = None,
) -> AppState:
    """The state of an app in a list. `pods` and `jobs` are those of all apps; None if they cannot be read."""
    if pods is None or not needs_pods(wrapper):
        return wrapper_state(wrapper)
    return reading(wrapper, of_app(wrapper, pods), jobs=of_app(wrapper, jobs)).state


def of_app(wrapper: Mapping[str, Any], things: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """The pods or Jobs of this app among those of a namespace."""
    if things is None:
        return None
    name = wrapper["metadata"]["name"]
    return [each for each in things if (each["metadata"].get("labels") or {}).get(INSTANCE) == name]


def tasks_description(status: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of MCAD that are there."""
    return {name: status[name] for name in _COUNTERS if name in status}


def _state(wrapper: Mapping[str, Any], replicas: Sequence[Replica], *, is_seen: bool) -> tuple[AppState, str]:
    status, state = wrapper.get("status") or {}, wrapper_state(wrapper)
    if "status" not in wrapper and "spec" not in wrapper:
        return AppState.UNKNOWN, ""
    if (wrapper.get("metadata") or {}).get("deletionTimestamp"):
        has_pods = any(each.state is ReplicaState.RUNNING for each in replicas)
        return (AppState.RUNNING if has_pods else AppState.CANCELLED), "the wrapper is being deleted"
    if state is AppState.CANCELLED and is_cancelled(wrapper):
        return state, "cancelled; `torchx delete` removes the wrapper"
    failed = [each for each in replicas if each.state is ReplicaState.FAILED]
    if not is_seen or state not in (AppState.RUNNING, AppState.SUCCEEDED):
        words = [_first_message(failed), _wrapper_message(wrapper, state)]
        return state, "; ".join(filter(None, words))
    if state is AppState.SUCCEEDED:  # MCAD says Completed also if a Job has failed
        return (AppState.FAILED, _first_message(failed)) if failed and not status.get("phase") else (state, "")
    return _running(wrapper, replicas, failed)


def _running(
    wrapper: Mapping[str, Any], replicas: Sequence[Replica], failed: Sequence[Replica]
) -> tuple[AppState, str]:
    """The state of a wrapper that says Running, which is only that its objects were created."""
    if replicas and all(each.state is ReplicaState.SUCCEEDED for each in replicas):
        return AppState.SUCCEEDED, ""
    if failed:
        text, left = _first_message(failed), _restarts_left(wrapper)
        if left is None or left > 0:
            more = "the controller starts the app again" if left is None else f"{left} restarts left"
            return AppState.RUNNING, f"{text}; {more}"
        return AppState.FAILED, text
    waiting = [each for each in replicas if each.state is ReplicaState.PENDING]
    if any(each.state in (ReplicaState.RUNNING, ReplicaState.SUCCEEDED) for each in replicas):
        return AppState.RUNNING, _wrapper_message(wrapper, AppState.RUNNING) or _first_message(waiting)
    return AppState.PENDING, _first_message(waiting) or "dispatched; no pod runs yet"


def _restarts_left(wrapper: Mapping[str, Any]) -> int | None:
    """How often the controller still restarts the app; None for MCAD with requeuing, which knows no end."""
    status = wrapper.get("status") or {}
    if status.get("phase"):
        limit = (wrapper["metadata"].get("annotations") or {}).get(f"{PREFIX}retryLimit", "3")
        return max(0, _number(limit) - _number(status.get("resettingCount")))
    has_requeuing = ((wrapper.get("spec") or {}).get("schedulingSpec") or {}).get("requeuing")
    return None if has_requeuing else 0


def _restarts(wrapper: Mapping[str, Any], *, is_seen: bool) -> int:
    status = wrapper.get("status") or {}
    found = status.get("resettingCount", status.get("numberOfRequeueings"))
    if found is None:
        return 0 if is_seen or status.get("phase") else -1
    return _number(found)


def _counted(wrapper: Mapping[str, Any], shapes: Mapping[str, int]) -> tuple[Replica, ...]:
    """Replicas by the counters of MCAD, which do not say which replica is which."""
    counters = tasks_description(wrapper.get("status") or {})
    states = [TASKS[name] for name, count in counters.items() for _ in range(_number(count))]
    ids = [(role, index) for role, size in shapes.items() for index in range(size)]
    states += [ReplicaState.PENDING] * (len(ids) - len(states))
    if "status" not in wrapper:
        return ()
    return tuple(Replica(role, index, state) for (role, index), state in zip(ids, states, strict=False))


def newest_pods(pods: Sequence[Mapping[str, Any]]) -> dict[tuple[str | None, int | None], Mapping[str, Any]]:
    """The newest pod of each replica, by role and number."""
    return {(role_of(pod), replica_of(pod)): pod for pod in sorted(pods, key=kube_pods.age_key)}


def _replica(role: str, index: int, pod: Mapping[str, Any] | None) -> Replica:
    if pod is None:
        return Replica(role, index, ReplicaState.PENDING)
    found = kube_pods.pod_state(_with_known_container(pod), _OWN_COMMAND)
    spec = pod.get("spec") or {}
    host = str(spec.get("hostname") or "")
    if host and spec.get("subdomain"):
        host = f"{host}.{spec['subdomain']}.{pod['metadata'].get('namespace')}.svc"
    return Replica(role, index, _OF_POD[found.state], host, found.message)


def _failed_job(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Why the first of the Jobs that have failed did; empty if none has."""
    for job in jobs:
        failed = kube_pods.condition(job.get("status") or {}, "Failed")
        if failed.get("status") == "True":
            return f"{role_of(job)}: {_told({**failed, 'type': 'the Job has failed'})}"
    return ""


def role_of(thing: Mapping[str, Any]) -> str | None:
    """The role of a pod or a Job."""
    return ((thing.get("metadata") or {}).get("labels") or {}).get(ROLE_NAME)


def replica_of(pod: Mapping[str, Any]) -> int | None:
    """The number of a replica: from our label, or the completion index of a Job."""
    text = str((pod["metadata"].get("labels") or {}).get(REPLICA_ID, ""))
    return int(text) if text.isdecimal() else kube_pods.rank_of(pod)


def restarts_in_place(pod: Mapping[str, Any]) -> int:
    """How often the kubelet has started the container of the replica again."""
    name, statuses = own_container(pod), (pod.get("status") or {}).get("containerStatuses") or ()
    return sum(_number(each.get("restartCount")) for each in statuses if each.get("name") == name)


def own_container(pod: Mapping[str, Any]) -> str:
    """The container of the replica: the first one."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return str(containers[0].get("name") or CONTAINER)


def _with_known_container(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with the container of the replica under the name that `pod_state` looks for."""
    name, status = own_container(pod), dict(pod.get("status") or {})
    statuses = status.get("containerStatuses") or ()
    status["containerStatuses"] = [
        {**each, "name": CONTAINER} if each.get("name") == name else each for each in statuses
    ]
    return {**pod, "status": status}


_WITHOUT_POD = {
    AppState.SUCCEEDED: ReplicaState.SUCCEEDED,
    AppState.FAILED: ReplicaState.UNKNOWN,
    AppState.CANCELLED: ReplicaState.CANCELLED,
}
"""The state of a replica whose pod is gone, by that of its app; the controllers remove pods of ended apps."""


def _ended(each: Replica, state: AppState) -> Replica:
    if state not in _WITHOUT_POD or each.state is not ReplicaState.PENDING or each.host:
        return each
    return Replica(each.role, each.index, _WITHOUT_POD[state])


def _first_message(replicas: Sequence[Replica]) -> str:
    """What the first of the replicas says, and how many there are."""
    told = [each for each in replicas if each.message]
    if not told:
        return ""
    more = f" (and {len(replicas) - 1} more)" if len(replicas) > 1 else ""
    return f"{told[0].role}[{told[0].index}]: {told[0].message}{more}"


def _wrapper_message(wrapper: Mapping[str, Any], state: AppState) -> str:
    """The reason in the words of the controller."""
    status = wrapper.get("status") or {}
    conditions = list(status.get("conditions") or ())
    if status.get("phase"):
        unhealthy = kube_pods.condition(status, "Unhealthy")
        said = _told(unhealthy) if unhealthy.get("status") == "True" else ""
        phase = str(status["phase"])
        if phase == "Suspended" and not (wrapper.get("spec") or {}).get("suspend"):
            return "the controller is about to create the objects"  # every wrapper begins with this phase
        if phase == "Resetting":
            return f"restart {_number(status.get('resettingCount'))}: {said or 'the controller starts the app again'}"
        return said if phase in ("Failed", "Running") else f"{phase}{f': {said}' if said else ''}"
    if not status.get("state"):
        return "no controller has looked at the wrapper yet; if this lasts, the controller may be down"
    if state in (AppState.RUNNING, AppState.SUCCEEDED) or not conditions:
        return str(status.get("message") or "")
    return _told(conditions[-1]) or str(status.get("message") or "")


def _told(found: Mapping[str, Any]) -> str:
    words = [str(found[name]) for name in ("type", "reason", "message") if found.get(name)]
    return ": ".join(words)


def _gave_up(status: Mapping[str, Any]) -> bool:
    """Whether MCAD has deleted the objects itself, because restarts were used up."""
    kinds = [str(each.get("type")) for each in status.get("conditions") or ()]
    return "PreemptCandidate" in kinds or _number(status.get("numberOfRequeueings")) > 0


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0
