"""Pure: the status of a run from its Job, the pods of the Job and their events.

The state of a rank is that of its newest pod, merged with the index sets of the Job, which remain when pods are gone.
The Job's decision counts as soon as it is visible (`FailureTarget`, `SuccessCriteriaMet`): its final condition waits
until every pod has ended, and on a lost node no pod ends. A failed pod is the end of its rank only if the Job will not
start another one, because a terminal state never changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.kube.coscheduling import with_group
from atoll.kube.errors import QUOTA
from atoll.kube.kueue import QueueState, queue_of
from atoll.kube.names import COMMAND, QUEUE_TIMEOUT
from atoll.kube.pod_state import (
    PodState,
    age_key,
    attempt_of,
    condition,
    event_time,
    failures_before,
    pod_state,
    rank_of,
    seconds,
    terminated,
)
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_REFUSED = re.compile(r"violates PodSecurity|serviceaccount|forbidden|denied|is invalid|not found", re.I)
_HAS_RUN = (Reason.STOPPING, Reason.RESTARTING, Reason.PREEMPTED)
DELETED = "the Job is being deleted"
ORPHANED = "its Job was removed; this pod goes on without it"
GONE = "Kubernetes has no such Job: it was removed, or the context or the namespace is another one"


def indexes(text: str | None, replicas: int) -> set[int]:
    """The ranks of `completedIndexes` or `failedIndexes`, such as `0,2-4`; what is no rank of the run is left out."""
    found: set[int] = set()
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        if match := _RANGE.match(part):
            found.update(range(int(match[1]), min(int(match[2] or match[1]), replicas - 1) + 1))
    return {index for index in found if index < replicas}


@dataclass(frozen=True)
class JobView:
    """What the Job says about all ranks."""

    job: Mapping[str, Any]
    completed: set[int]
    failed: set[int]
    failing: Mapping[str, Any]
    """The condition by which the whole Job fails; empty if it does not."""
    is_complete: bool
    is_suspended: bool
    is_deleted: bool
    limit: int | None
    """Restarts of each rank; None if the Job counts failures of all ranks together."""
    queue: QueueState | None = None
    """What the queue says that has suspended the Job; None if it has no queue, or is not suspended."""

    @classmethod
    def of(cls, job: Mapping[str, Any], replicas: int, queue: QueueState | None = None) -> JobView:
        status, spec = job.get("status") or {}, job.get("spec") or {}
        failing = next(
            (found for kind in ("FailureTarget", "Failed") if _is_true(found := condition(status, kind))), {}
        )
        is_complete = any(_is_true(condition(status, kind)) for kind in ("SuccessCriteriaMet", "Complete"))
        completed = indexes(status.get("completedIndexes"), replicas)
        return cls(
            job,
            completed,
            indexes(status.get("failedIndexes"), replicas) - completed,
            failing,
            is_complete,
            bool(spec.get("suspend")) and not failing and not is_complete,
            bool(job.get("metadata", {}).get("deletionTimestamp")),
            spec.get("backoffLimitPerIndex"),
            queue,
        )

    @property
    def has_counted(self) -> bool:
        """Whether the Job has counted the end of every pod."""
        status = self.job.get("status") or {}
        return any(_is_true(condition(status, kind)) for kind in ("Failed", "Complete"))

    @property
    def is_over(self) -> bool:
        """Whether the Job starts no further pod."""
        return bool(self.failing) or self.is_complete


def run_status(
    job: Mapping[str, Any] | None,
    pods: Iterable[Mapping[str, Any]],
    *,
    replicas: int,
    events: Sequence[Mapping[str, Any]] = (),
    log_tails: Mapping[str, str] | None = None,
    queue: QueueState | None = None,
    evictions: int = 0,
) -> RunStatus:
    """Every rank, in order. `pods` are those of this Job, `events` those of the Job and of its pods, `log_tails` the
    last lines of the pods that `needs_log` names, by pod name. `queue` is what Kueue says about a suspended Job, and
    `evictions` how often it has stopped the Job. Without a Job a rank is LOST unless a pod is left."""
    newest = newest_pods(pods, replicas)
    if job is None:
        return RunStatus(tuple(_row(rank, newest.get(rank), _alone(newest.get(rank))) for rank in range(replicas)))
    view = JobView.of(job, replicas, queue)
    evictions = evictions if queue is None else queue.evictions
    grouped = _grouped(events)
    states = {
        rank: pod_state(
            pod,
            job,
            events=_about(pod, grouped),
            log_tail=(log_tails or {}).get(pod["metadata"]["name"], ""),
        )
        for rank, pod in newest.items()
    }
    states = with_group(states, newest, events)
    culprits = sorted(_culprits(view, newest, states))
    refused = _refused(_about(job, grouped))
    without_pod = _without_pod(view, refused)
    rows = []
    for rank in range(replicas):
        pod, state = newest.get(rank), states.get(rank)
        if pod is not None and state is not None:
            state = _merged(rank, view, pod, state, culprits)
            state = _not_replaced(pod, state, refused)
        else:
            state = _from_sets(rank, view, culprits) or without_pod
        rows.append(_row(rank, pod, state, 0 if state.state.is_terminal and has_outcomes(job) else evictions))
    return RunStatus(tuple(rows))


def newest_pods(pods: Iterable[Mapping[str, Any]], replicas: int) -> dict[int, Mapping[str, Any]]:
    """The newest pod of each rank that has one."""
    found: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=age_key):
        rank = rank_of(pod)
        if rank is not None and rank < replicas:
            found[rank] = pod
    return found


def has_outcomes(job: Mapping[str, Any]) -> bool:
    """Whether each attempt of a rank is counted in the store. An eviction that came before the replica began is none
    there, so that an end that counted it would deny the outcome."""
    return ((job.get("metadata") or {}).get("annotations") or {}).get(COMMAND) != "own"


def may_have_pods(job: Mapping[str, Any]) -> bool:
    """Whether to list the pods of this Job: one that waits in a queue and has counted none has none."""
    status = job.get("status") or {}
    counts = ("active", "ready", "terminating", "succeeded", "failed", "completedIndexes", "failedIndexes")
    is_held = bool(queue_of(job)) and bool((job.get("spec") or {}).get("suspend"))
    return not is_held or any(status.get(name) for name in counts)


def queue_limit_s(job: Mapping[str, Any]) -> float | None:
    """How long replicas of this Job may wait; None if there is no limit."""
    limit = ((job.get("metadata") or {}).get("annotations") or {}).get(QUEUE_TIMEOUT)
    return None if limit is None else float(limit)


def queue_left_s(
    job: Mapping[str, Any], status: RunStatus, pods: Iterable[Mapping[str, Any]], now: float, limit_s: float
) -> float:
    """How much longer the replica that waits longest may wait; below 0 if it has waited for too long.

    A rank waits from when its newest pod was created. Without a pod it waits from when the Job was created, or was last
    suspended or started: the ranks of a suspended Job may have run before. What Kueue has evicted has no limit.
    """
    began = _waits_since(job)
    newest = newest_pods(pods, len(status.replicas))
    left = [limit_s]
    for row in status.replicas:
        pod = newest.get(row.rank)
        has_run = row.reason in _HAS_RUN or (pod is None and row.attempt > 0)
        is_waiting = row.state is ReplicaState.PENDING and not has_run
        since = began if pod is None else seconds(pod["metadata"].get("creationTimestamp"))
        if is_waiting and since is not None:
            left.append(limit_s - (now - since))
    return min(left)


def _waits_since(job: Mapping[str, Any]) -> float | None:
    """From when on ranks without a pod wait. Kubernetes clears the start time of a Job that is suspended."""
    status = job.get("status") or {}
    suspended = condition(status, "Suspended")
    moments = [(job.get("metadata") or {}).get("creationTimestamp"), status.get("startTime")]
    moments += [suspended.get("lastTransitionTime")] if _is_true(suspended) else []
    return max(filter(None, map(seconds, moments)), default=None)


def lost_nodes(pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Pods that cannot end because their node does not answer, each with its node."""
    return {
        str(pod["metadata"]["name"]): str((pod.get("spec") or {}).get("nodeName"))
        for pod in pods
        if pod_state(pod, {}).is_node_lost
    }


def _merged(rank: int, view: JobView, pod: Mapping[str, Any], state: PodState, culprits: Sequence[int]) -> PodState:
    """The state of a rank whose newest pod says `state`, after a look at the Job."""
    if rank in view.completed:
        return replace(state, state=ReplicaState.SUCCEEDED, reason=Reason.OK, message="", exit_code=0)
    is_ending = bool(pod["metadata"].get("deletionTimestamp"))
    if state.state is ReplicaState.SUCCEEDED and is_ending:  # only the Job knows whether this counts
        if view.has_counted:
            return _stopped(view, culprits, state)
        state = _ending(state)
    if state.state is ReplicaState.SUCCEEDED or (state.state is ReplicaState.FAILED and rank in view.failed):
        return state
    if view.is_suspended and not view.is_deleted and (is_ending or state.state is not ReplicaState.FAILED):
        return _suspended(view, state)
    if view.is_deleted and is_ending:
        text = state.message if state.is_node_lost else DELETED
        return replace(state, state=ReplicaState.RUNNING, reason=Reason.STOPPING, message=text)
    if state.state is ReplicaState.FAILED:
        if view.is_over:
            return _stopped(view, culprits, state) if is_ending or state.is_evicted else state
        if not _is_last(view, pod, state):
            return _restarting(view, state)
        # The Job has not said yet whether it counts a pod that something deleted: it does not if it was suspended.
        return _ending(state) if is_ending else state
    if view.is_over and state.is_node_lost:
        return replace(state, state=ReplicaState.FAILED, reason=Reason.PREEMPTED)
    if view.is_over:
        return replace(state, reason=Reason.STOPPING, message=_stopped(view, culprits, state).message)
    return state


def _ending(state: PodState) -> PodState:
    text = f"the pod is being ended: {state.message or 'it has ended with code 0'}"
    return PodState(ReplicaState.RUNNING, Reason.STOPPING, text, started_at=state.started_at)


def _is_last(view: JobView, pod: Mapping[str, Any], state: PodState) -> bool:
    """Whether this failed pod has used up the restarts of its rank, although the Job does not say so yet."""
    if state.is_evicted:
        return False
    rules = ((view.job.get("spec") or {}).get("podFailurePolicy") or {}).get("rules") or ()
    codes = [rule.get("onExitCodes") or {} for rule in rules if rule.get("action") == "FailIndex"]
    is_ruled = any(code.get("operator") == "In" and state.exit_code in code.get("values", ()) for code in codes)
    return is_ruled or (view.limit is not None and failures_before(pod) >= view.limit)


def _restarting(view: JobView, state: PodState) -> PodState:
    """The Job will start another pod for this rank."""
    if view.is_deleted:
        return replace(state, state=ReplicaState.RUNNING, reason=Reason.STOPPING, message=DELETED)
    text = f"starts again after: {state.message}"
    return PodState(ReplicaState.PENDING, Reason.RESTARTING, text, started_at=state.started_at, is_restart=True)


def _suspended(view: JobView, state: PodState | None = None) -> PodState:
    """The Job is suspended: it deletes its pods, counts none of them as failed, and starts new ones when it goes on."""
    found = condition(view.job.get("status") or {}, "Suspended")
    said = ": ".join(str(found[name]) for name in ("reason", "message") if found.get(name))
    text = f"the Job is suspended{f' ({said})' if said else ''}"
    queue = view.queue
    if state is not None and state.state is ReplicaState.RUNNING:
        return replace(state, reason=Reason.STOPPING, message=text if queue is None else queue.message)
    if queue is None:
        return PodState(ReplicaState.PENDING, Reason.WAITING, text)
    return PodState(queue.state, queue.reason, queue.message, ended_at=queue.at)


def _not_replaced(pod: Mapping[str, Any], state: PodState, refused: Mapping[str, Any] | None) -> PodState:
    """The state of a rank that should start again, if the Job has been refused a pod since its last one ended."""
    ended = seconds((terminated(pod) or {}).get("finishedAt"))
    at = None if refused is None else seconds(event_time(refused))
    if state.reason is not Reason.RESTARTING or refused is None or (ended and at and at < ended):
        return state
    return replace(_refusal(refused), started_at=state.started_at, is_restart=True)


def _stopped(view: JobView, culprits: Sequence[int], pod: PodState | None) -> PodState:
    """The end of a rank that was stopped because the Job is over."""
    reason, text = str(view.failing.get("reason") or ""), str(view.failing.get("message") or "")
    said = f"{reason}: {text}" if text else reason
    ranks = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {', '.join(map(str, culprits))}"
    if view.is_complete:
        said = "stopped because the Job counted as complete without this rank"
    elif reason != "DeadlineExceeded":
        said = f"stopped because {ranks if culprits else 'the Job'} failed ({said})"
    is_late = reason == "DeadlineExceeded"
    return PodState(
        ReplicaState.FAILED if is_late else ReplicaState.CANCELLED,
        Reason.TIMEOUT if is_late else Reason.CANCELLED,
        said,
        started_at=None if pod is None else pod.started_at,
        ended_at=None if pod is None else pod.ended_at,
    )


def _culprits(view: JobView, newest: Mapping[int, Mapping[str, Any]], states: Mapping[int, PodState]) -> Iterator[int]:
    """The ranks whose own failure ended the Job: those that it counts as failed, and those that ended before it
    stopped the others."""
    if not view.failing or view.failing.get("reason") == "DeadlineExceeded":
        return
    yield from view.failed
    for rank, state in states.items():
        is_own = state.state is ReplicaState.FAILED and not state.is_evicted
        if is_own and rank not in view.failed and not newest[rank]["metadata"].get("deletionTimestamp"):
            yield rank


def _from_sets(rank: int, view: JobView, culprits: Sequence[int]) -> PodState | None:
    """The state of a rank without a pod, as far as the Job knows it."""
    if rank in view.completed:
        return PodState(ReplicaState.SUCCEEDED, Reason.OK, "", 0)
    if rank in view.failed:
        text = "the Job counts this rank as failed, and its pod was deleted: by hand, or together with its node"
        return PodState(ReplicaState.FAILED, Reason.KILLED, text)
    return _stopped(view, culprits, None) if view.is_over else None


def _without_pod(view: JobView, refused: Mapping[str, Any] | None) -> PodState:
    """The state of ranks that have no pod while the Job goes on."""
    if view.is_deleted:
        return PodState(ReplicaState.PENDING, Reason.STOPPING, DELETED)
    if view.is_suspended:
        return _suspended(view)
    if refused is not None:
        return _refusal(refused)
    return PodState(ReplicaState.PENDING, Reason.WAITING, "the Job has not created the pod of this rank yet")


def _refused(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest event in which the cluster refused a pod of the Job."""
    return max((event for event in events if event.get("reason") == "FailedCreate"), key=event_time, default=None)


def _refusal(refused: Mapping[str, Any]) -> PodState:
    text = str(refused.get("message") or "")
    kind = Reason.QUOTA if QUOTA.search(text) else Reason.CONFIG if _REFUSED.search(text) else Reason.BACKEND
    return PodState(ReplicaState.PENDING, kind, f"FailedCreate: {text}")


def _alone(pod: Mapping[str, Any] | None) -> PodState:
    """The state of a rank whose Job is gone: a pod is left while it ends, or if the Job was deleted without it."""
    if pod is None:
        return PodState(ReplicaState.LOST, Reason.LOST, GONE)
    state = pod_state(pod, {})
    if state.state is ReplicaState.RUNNING and state.reason is Reason.OK:
        return replace(state, reason=Reason.BACKEND, message=ORPHANED)
    is_ending = bool(pod["metadata"].get("deletionTimestamp"))
    if state.state.is_terminal and is_ending:  # it is gone in a moment
        return PodState(ReplicaState.LOST, Reason.LOST, GONE)
    return state


def _row(rank: int, pod: Mapping[str, Any] | None, state: PodState, evictions: int = 0) -> ReplicaStatus:
    attempt = state.is_restart if pod is None else attempt_of(pod) + state.is_restart
    return ReplicaStatus(
        rank,
        state.state,
        state.reason,
        state.message,
        state.exit_code,
        host=None if pod is None else (pod.get("spec") or {}).get("nodeName"),
        attempt=attempt + evictions,
        native_id=None if pod is None else str(pod["metadata"]["name"]),
        started_at=state.started_at,
        ended_at=state.ended_at if state.state.is_terminal else None,
    )


_Grouped = dict[tuple[str, str], list[Mapping[str, Any]]]


def _grouped(events: Iterable[Mapping[str, Any]]) -> _Grouped:
    """Events by the thing that they are about: its uid, or its name if they do not say the uid."""
    found: _Grouped = {}
    for event in events:
        about = event.get("involvedObject") or event.get("regarding") or {}
        key = ("uid", str(about["uid"])) if about.get("uid") else ("name", str(about.get("name")))
        found.setdefault(key, []).append(event)
    return found


def _about(thing: Mapping[str, Any], grouped: _Grouped) -> list[Mapping[str, Any]]:
    """The events about this Job or pod."""
    metadata = thing.get("metadata") or {}
    keys = (("uid", str(metadata.get("uid"))), ("name", str(metadata.get("name"))))
    return [event for key in keys for event in grouped.get(key, ())]


def _is_true(found: Mapping[str, Any]) -> bool:
    return found.get("status") == "True"
