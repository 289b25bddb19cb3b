"""Pure: what Kueue says about a Job or an AppWrapper in one of its queues, from its Workload.

Kueue keeps a Workload for each object with a queue label. While it holds the object back, the object only says that it
is suspended, and the conditions of the Workload have the reason. A time limit or a ready-timeout of Kueue never makes a
Job fail: the Workload is deactivated, and the Job stays suspended for ever.

`queue_state` reads the Workload; `with_position` and `with_preemptor` add what one more request each can say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from atoll.kube.client import path_to
from atoll.kube.gang import KUEUE_QUEUE
from atoll.kube.pod_state import condition, seconds
from atoll.status import Reason, ReplicaState

GROUP, VISIBILITY_GROUP = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""The newest first; releases before 0.15 serve only the second."""
JOB_UID = f"{GROUP}/job-uid"
"""The label of a Workload with the UID of the object that it is for. Its name is no way to find it."""
NO_WORKLOAD_S = 10.0
"""Kueue makes the Workload within a second. Without one after this time, something is wrong."""
_MOST_AHEAD = 3
_FULL = re.compile(
    r"insufficient unused quota(?: in cohort)? for (?P<resource>\S+) (?:in )?flavor (?P<flavor>[^,\s]+), "
    r"(?P<amount>\S+) more needed"
)
_TOO_MUCH = re.compile(
    r"insufficient quota for (?P<resource>\S+) (?:in )?flavor (?P<flavor>[^,\s]+).{0,300}?"
    r"current podset request \((?P<request>[^)]*)\) > maximum capacity \((?P<capacity>[^)]*)\)"
)
_TOO_MUCH_EARLIER = re.compile(
    r"insufficient quota for (?P<resource>\S+) (?:in )?flavor (?P<flavor>[^,\s]+), "
    r"request > maximum capacity \((?P<request>[^>)]*) > (?P<capacity>[^)]*)\)"
)
"""The words of Kueue before 0.14.2."""
_NOT_COVERED = re.compile(r"resource (?P<resource>\S+) unavailable in ClusterQueue")
_PREEMPTING = re.compile(r"Pending the preemption of (\d+) workload")
_PREEMPTOR = re.compile(r"workload \(UID: (?P<workload>[^,)]+), JobUID: (?P<job>[^,)]+)\) due to (?P<why>[^;]+)")
_MISSING = re.compile(r"(?P<kind>LocalQueue|ClusterQueue) (?P<name>\S+) doesn't exist")
_INACTIVE = re.compile(r"(?P<kind>LocalQueue|ClusterQueue) (?P<name>\S+) is inactive")


class Cause(StrEnum):
    """Why Kueue holds an object back, or that it does not."""

    ADMITTED = "admitted"
    NEW = "new"
    """Kueue has not made the Workload yet."""
    NO_WORKLOAD = "no_workload"
    """Kueue should have made the Workload by now: it is down, or it refuses the object without a word."""
    IN_LINE = "in_line"
    """Kueue has not looked at it yet."""
    FULL = "full"
    NEVER_FITS = "never_fits"
    """It asks for more than the queue ever has: it waits until somebody changes the quota."""
    PREEMPTING = "preempting"
    """Kueue ends other workloads to make room for it."""
    CHECKS = "checks"
    """It has its quota, and waits for an admission check of the queue."""
    BACKOFF = "backoff"
    """Its pods were not ready in time, and Kueue waits before it tries again."""
    QUEUE_MISSING = "queue_missing"
    QUEUE_HELD = "queue_held"
    EVICTED = "evicted"
    """Kueue has stopped it, and has not said yet when it may go on."""
    HELD = "held"
    """Somebody has set the Workload inactive."""
    TIME_LIMIT = "time_limit"
    NOT_READY = "not_ready"
    DEACTIVATED = "deactivated"
    """Kueue has set the Workload inactive for another reason, such as an admission check that refuses it."""
    UNREADABLE = "unreadable"
    """We may not read the Workload, or Kueue does not answer."""
    OTHER = "other"


_QUEUED = frozenset({Cause.IN_LINE, Cause.FULL, Cause.PREEMPTING, Cause.EVICTED, Cause.OTHER})
_QUOTA, _CONFIG = Reason.QUOTA, Reason.CONFIG
_ENDS = {
    "MaximumExecutionTimeExceeded": (Cause.TIME_LIMIT, Reason.TIMEOUT, "Kueue ended it at its time limit"),
    "RequeuingLimitExceeded": (
        Cause.NOT_READY,
        Reason.UNSCHEDULABLE,
        "Kueue gave up: the pods were never all ready in time",
    ),
}
"""By the words behind `DeactivatedDueTo`."""


@dataclass(frozen=True)
class QueueState:
    """What a user is told about an object in a queue of Kueue: the state of replicas that have no running pod."""

    cause: Cause
    state: ReplicaState
    """PENDING, or FAILED if Kueue has ended the object for good."""
    reason: Reason
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The parts of the message: `queue`, `needed`, `position`, `ahead`, `evictions`, `admitted_at` and so on."""
    evictions: int = 0
    """How often Kueue has stopped the object. It comes back as another attempt."""
    at: float | None = None
    """When Kueue ended the object for good, in seconds since 1970."""

    @property
    def is_queued(self) -> bool:
        """Whether it has a place in the queue, which `with_position` adds."""
        return self.cause in _QUEUED

    @property
    def is_hopeless(self) -> bool:
        """Whether it cannot start unless somebody changes the queue; reading this never ends it."""
        return self.cause is Cause.NEVER_FITS

    @property
    def preemptor_uid(self) -> str | None:
        """The UID of the Job or AppWrapper for which Kueue stopped this one; None if there is none, or it is named."""
        found = self.fields.get("preemptor") or {}
        return None if "name" in found or found.get("uid") == "UNKNOWN" else found.get("uid")


def queue_of(thing: Mapping[str, Any]) -> str:
    """The LocalQueue of a Job or an AppWrapper; empty if it has none. A LocalQueue `default` adds the label itself."""
    return str(((thing.get("metadata") or {}).get("labels") or {}).get(KUEUE_QUEUE) or "")


def workloads_path(namespace: str, version: str = VERSIONS[0]) -> str:
    return path_to("workloads", namespace, api=f"/apis/{GROUP}/{version}")


def pending_path(namespace: str, queue: str, version: str = VERSIONS[0]) -> str:
    """Where Kueue's visibility server lists what waits in a LocalQueue, in order."""
    return f"{path_to('localqueues', namespace, queue, api=f'/apis/{VISIBILITY_GROUP}/{version}')}/pendingworkloads"


def selector(*uids: str) -> dict[str, str]:
    """The query for the Workloads of these objects."""
    return {"labelSelector": f"{JOB_UID}={uids[0]}" if len(uids) == 1 else f"{JOB_UID} in ({','.join(uids)})"}


def workload_of(workloads: Iterable[Mapping[str, Any]], uid: str) -> Mapping[str, Any] | None:
    """The newest Workload of the object with this UID, by its label or its owner; None if there is none."""
    found = [each for each in workloads if uid in _owner_uids(each)]
    return max(found, key=lambda each: str(each["metadata"].get("creationTimestamp") or ""), default=None)


def queue_state(workload: Mapping[str, Any] | None, *, queue: str, waited_s: float = 0.0) -> QueueState:
    """What the Workload says. Without one, `waited_s` is how long its object has existed."""
    if workload is None:
        return _without_workload(queue, waited_s)
    status = workload.get("status") or {}
    found = _deactivated(workload, queue) if (workload.get("spec") or {}).get("active") is False else None
    found = found or _admission(status, queue)
    stats = _evictions(status)
    fields = {"queue": queue, **found.fields, **({"evictions": stats} if stats else {})}
    found = replace(found, fields=fields, evictions=sum(stats.values()))
    return found if found.state is ReplicaState.FAILED else _with_eviction(found, status)


def unreadable(queue: str, why: str) -> QueueState:
    """The state of an object whose Workload we cannot read."""
    text = f"queue `{queue}` of Kueue holds it back, and its Workload, which has the reason, cannot be read ({why})"
    return QueueState(Cause.UNREADABLE, ReplicaState.PENDING, Reason.WAITING, text, {"queue": queue})


def with_position(
    state: QueueState, workload: Mapping[str, Any] | None, pending: Sequence[Mapping[str, Any]]
) -> QueueState:
    """The same with its place in the queue. `pending` are the items of `pending_path`."""
    name = None if workload is None else workload["metadata"]["name"]
    own = next((each for each in pending if (each.get("metadata") or {}).get("name") == name), None)
    if own is None or not state.is_queued:
        return state
    place, of_all = int(own.get("positionInLocalQueue") or 0), int(own.get("positionInClusterQueue") or 0)
    ahead = [each for each in pending if int(each.get("positionInLocalQueue") or 0) < place]
    names = [_owner_name(each) for each in ahead]
    others = max(0, of_all - place)
    fields = {**state.fields, "position": of_all + 1, "ahead": names, "ahead_in_other_queues": others}
    return replace(state, fields=fields, message=f"{state.message}; {_place_text(of_all + 1, names, place, others)}")


def with_preemptor(state: QueueState, workload: Mapping[str, Any] | None) -> QueueState:
    """The same with the name of the object for which Kueue stopped this one; `workload` is that object's Workload."""
    if workload is None or state.preemptor_uid is None:
        return state
    name = _owner_name(workload)
    preemptor = {**state.fields["preemptor"], "name": name}
    message = state.message.replace(_uid_text(state.preemptor_uid), name)
    return replace(state, message=message, fields={**state.fields, "preemptor": preemptor})


def _without_workload(queue: str, waited_s: float) -> QueueState:
    if waited_s < NO_WORKLOAD_S:
        text = f"Kueue has not seen it yet (queue `{queue}`)"
        return QueueState(Cause.NEW, ReplicaState.PENDING, Reason.WAITING, text, {"queue": queue})
    text = (
        f"Kueue has made no Workload for it (queue `{queue}`): the priority class does not exist, or Kueue is down; it "
        "waits for ever without one"
    )
    return QueueState(Cause.NO_WORKLOAD, ReplicaState.PENDING, _CONFIG, text, {"queue": queue})


def _deactivated(workload: Mapping[str, Any], queue: str) -> QueueState:
    """The state of a Workload with `active: false`. Kueue sets it for good; people set it to hold the object."""
    status = workload.get("status") or {}
    evicted, target = condition(status, "Evicted"), condition(status, "DeactivationTarget")
    text = next((str(each["message"]) for each in (evicted, target) if each.get("message")), "")
    why = str(evicted.get("reason") or "").removeprefix("DeactivatedDueTo")
    if evicted.get("status") != "True" or not str(evicted.get("reason") or "").startswith("DeactivatedDueTo"):
        why = str(target.get("reason") or "") if target.get("status") == "True" else ""
    if not why:
        said = f"its Workload in queue `{queue}` is inactive: somebody holds it back (`active: false`)"
        return QueueState(Cause.HELD, ReplicaState.PENDING, Reason.WAITING, said)
    cause, reason, said = _ENDS.get(why, (Cause.DEACTIVATED, Reason.BACKEND, "Kueue ended it for good"))
    message = f"{said} (queue `{queue}`, {why}{f': {text}' if text else ''})"
    at = seconds(evicted.get("lastTransitionTime"))
    return QueueState(cause, ReplicaState.FAILED, reason, message, {"why": why}, at=at)


def _admission(status: Mapping[str, Any], queue: str) -> QueueState:
    """Whether Kueue has admitted it, or why not."""
    pending = ReplicaState.PENDING
    admitted = condition(status, "Admitted")
    if admitted.get("status") == "True":
        at = seconds(admitted.get("lastTransitionTime"))
        fields = {} if at is None else {"admitted_at": at}
        return QueueState(Cause.ADMITTED, pending, Reason.STARTING, f"admitted by queue `{queue}`", fields)
    reserved = condition(status, "QuotaReserved")
    if reserved.get("status") == "True":
        return _checks(status, queue)
    until = (status.get("requeueState") or {}).get("requeueAt")
    if until and condition(status, "Requeued").get("status") == "False":
        text = f"Kueue tries again at {until}"
        return QueueState(Cause.BACKOFF, pending, Reason.UNSCHEDULABLE, text, {"requeue_at": until})
    if not reserved:
        return QueueState(Cause.IN_LINE, pending, _QUOTA, f"in line in queue `{queue}`")
    return _not_reserved(str(reserved.get("reason") or ""), str(reserved.get("message") or ""), queue)


def _checks(status: Mapping[str, Any], queue: str) -> QueueState:
    open_checks = [each for each in status.get("admissionChecks") or () if each.get("state") != "Ready"]
    names = [str(each.get("name")) for each in open_checks]
    said = "; ".join(str(each["message"]) for each in open_checks if each.get("message"))
    text = f"has quota in queue `{queue}`, and waits for its admission checks"
    text += f" {', '.join(names)}" if names else ""
    return QueueState(
        Cause.CHECKS, ReplicaState.PENDING, Reason.CAPACITY, f"{text}: {said}" if said else text, {"checks": names}
    )


def _not_reserved(reason: str, text: str, queue: str) -> QueueState:
    """The state of a Workload that Kueue has looked at and holds back, from the words of Kueue."""
    pending = ReplicaState.PENDING
    if match := _MISSING.search(text) or _INACTIVE.search(text):
        cause = Cause.QUEUE_MISSING if _MISSING.search(text) else Cause.QUEUE_HELD
        thing = {"kind": match["kind"], "name": match["name"]}
        return QueueState(cause, pending, _CONFIG, f"queue `{queue}`: {text}", {"missing_or_held": thing})
    needed = {match["resource"]: match["amount"] for match in _FULL.finditer(text)}
    found = [*_TOO_MUCH.finditer(text), *_TOO_MUCH_EARLIER.finditer(text)]
    too_much = [match.groupdict() for match in found if match["resource"] not in needed]
    not_covered = [match["resource"] for match in _NOT_COVERED.finditer(text)]
    if too_much or not_covered:
        fields = {"too_much": too_much, "not_covered": not_covered}
        return QueueState(Cause.NEVER_FITS, pending, _QUOTA, f"never fits in queue `{queue}`: {text}", fields)
    if needed:
        listed = ", ".join(f"{amount} more {resource}" for resource, amount in needed.items())
        if match := _PREEMPTING.search(text):
            others = f"{match[1]} other workload{'s' if match[1] != '1' else ''}"
            said = f"Kueue ends {others} of lower priority to make room in queue `{queue}`"
            fields = {"needed": needed, "preempting": int(match[1])}
            return QueueState(Cause.PREEMPTING, pending, _QUOTA, f"{said} ({listed} needed)", fields)
        said = f"queue `{queue}` is full: {listed} needed"
        return QueueState(Cause.FULL, pending, _QUOTA, said, {"needed": needed})
    is_odd = reason == "Inadmissible"
    return QueueState(Cause.OTHER, pending, _CONFIG if is_odd else _QUOTA, f"queue `{queue}`: {text or reason}")


def _with_eviction(state: QueueState, status: Mapping[str, Any]) -> QueueState:
    """The state of what Kueue has stopped and not yet started again: it says why, and how often that has happened."""
    evicted = condition(status, "Evicted")
    if evicted.get("status") != "True" or state.cause is Cause.HELD:
        return state
    reason, text = str(evicted.get("reason") or ""), str(evicted.get("message") or "")
    often = {1: "once", 2: "twice"}.get(state.evictions, f"{state.evictions} times")
    count = f"; evicted {often} so far" if state.evictions else ""
    fields: dict[str, Any] = {**state.fields, "evicted": reason}
    said = f"evicted by Kueue ({reason}: {text})"
    if match := _PREEMPTOR.search(text):
        uid, why = match["job"], match["why"].strip()
        fields["preemptor"] = {"uid": uid, "workload_uid": match["workload"], "why": why}
        said = f"preempted for {_uid_text(uid)} ({why})"
    is_new = state.cause is Cause.ADMITTED or (state.cause is Cause.OTHER and text in state.message)
    if is_new:  # the conditions that say what it waits for come later
        message, cause = f"{said}{count}", Cause.EVICTED
        return replace(state, cause=cause, reason=Reason.PREEMPTED, message=message, fields=fields)
    # What needs somebody to act keeps its reason: it does not start again by itself.
    shown = state.reason if state.reason is _CONFIG or state.is_hopeless else Reason.PREEMPTED
    return replace(state, reason=shown, message=f"{said}{count}; {state.message}", fields=fields)


def _evictions(status: Mapping[str, Any]) -> dict[str, int]:
    """How often Kueue has stopped it, by the words of Kueue for the reason."""
    found: dict[str, int] = {}
    for each in (status.get("schedulingStats") or {}).get("evictions") or ():
        name = str(each.get("reason") or "")
        found[name] = found.get(name, 0) + int(each.get("count") or 0)
    return found


def _place_text(position: int, names: Sequence[str], place: int, others: int) -> str:
    if position == 1:
        return "first in line"
    listed = ", ".join([*names[-_MOST_AHEAD:], *([f"{place - _MOST_AHEAD} more"] if place > _MOST_AHEAD else [])])
    parts = [listed] if place and listed else []
    parts += [f"{others} of other queues"] if others else []
    return f"position {position}, behind {' and '.join(parts)}" if parts else f"position {position}"


def _uid_text(uid: str) -> str:
    return f"the workload of uid {uid}"


def _owner_uids(workload: Mapping[str, Any]) -> set[str]:
    metadata = workload.get("metadata") or {}
    labelled = (metadata.get("labels") or {}).get(JOB_UID)
    return {str(each.get("uid")) for each in metadata.get("ownerReferences") or ()} | {str(labelled)}


def _owner_name(workload: Mapping[str, Any]) -> str:
    """Such as `Job `x``: what people know; the name of the Workload if it has no owner."""
    metadata = workload.get("metadata") or {}
    owners = metadata.get("ownerReferences") or ()
    owner = next((each for each in owners if each.get("controller")), owners[0] if owners else None)
    return f"Workload `{metadata.get('name')}`" if owner is None else f"{owner.get('kind')} `{owner.get('name')}`"
