"""Pure: the status of a run from its AppWrapper, the Job inside, the pods of the Job, and the Workload of Kueue.

The Job and its pods say how replicas are; the AppWrapper says whether there is a next attempt. A failed Job with
restarts left is no end, and neither is one rank that succeeds while all may start again. The controller deletes Job and
pods when it resets or gives up, so each attempt's end is kept in an annotation of the AppWrapper (`kept_end`), which
`wrapper_status` reads when the pods are gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.context import TIMED_OUT, TOO_OLD
from atoll.kube.appwrapper import PREFIX, Phase, WrapperView, components_of
from atoll.kube.kueue import QueueState, queue_of
from atoll.kube.names import ATTEMPT, COMMAND, CONTROLLER_UID, ENDED, MAX_RESTARTS, POKE
from atoll.kube.pod_state import rank_of, seconds
from atoll.kube.reading import JobView, indexes, lost_nodes, run_status
from atoll.kube.stopping import is_alive
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

Object = Mapping[str, Any]
GONE = "Kubernetes has no such AppWrapper: it was removed, or the context or the namespace is another one"
DELETED = "the AppWrapper is being deleted"
ALONE = "its AppWrapper was removed; its Job goes on without it"
SILENT_S = 10.0
"""A controller that is up looks at a new AppWrapper within a second."""
_MOST_CHARS = 2000
"""Of the message and of the last lines of one rank in an annotation."""
_MOST_WAYS = 8
"""So many different ends of ranks are kept; a run of a thousand replicas has few of them."""
_MOST_BYTES = 24_000
"""Of the end of one attempt. A character that is not ASCII takes 6 or 12 bytes."""
_MOST_BYTES_IN_ALL = 200_000
"""Of all annotations of an AppWrapper; Kubernetes refuses more than 256 KiB."""
_ENDS = {
    "CreateFailed": Reason.CONFIG,
    "MissingComponent": Reason.KILLED,
    "FailedComponent": Reason.USER_ERROR,
    "FoundFailedPods": Reason.USER_ERROR,
    "InsufficientPodsReady": Reason.UNSCHEDULABLE,
}
"""What a failed AppWrapper says -> the reason of its ranks, if nothing better is known."""


@dataclass(frozen=True)
class Snapshot:
    """What the cluster says about a run at one moment."""

    wrapper: Object | None
    job: Object | None
    pods: Sequence[Object] = ()
    """All pods with the name of the Job: also those of a Job that had its name before."""
    events: Sequence[Object] = ()
    log_tails: Mapping[str, str] = field(default_factory=dict)
    """The last lines of failed pods, by pod name."""
    queue: QueueState | None = None
    """What Kueue says about the AppWrapper; None if it has no queue."""
    now: float = 0.0

    @property
    def job_pods(self) -> list[Object]:
        """The pods of the present Job."""
        if self.job is None:
            return []
        uid = self.job["metadata"].get("uid")
        return [pod for pod in self.pods if (pod["metadata"].get("labels") or {}).get(CONTROLLER_UID) == uid]

    def job_rows(self, replicas: int) -> RunStatus | None:
        """What the Job and its pods say; None if there is no Job."""
        if self.job is None:
            return None
        return run_status(
            self.job, self.job_pods, replicas=replicas, events=self.events, log_tails=dict(self.log_tails)
        )


def wrapper_status(seen: Snapshot, *, replicas: int) -> RunStatus:
    """Every rank, in order. Never raises, whatever the controller says."""
    rows = seen.job_rows(replicas)
    if seen.wrapper is None:
        return _without_wrapper(seen, rows, replicas)
    view = WrapperView.of(seen.wrapper)
    if view.is_mcad:
        found = _mcad(seen, view, rows, replicas)
    else:
        found = _v1beta2(seen, view, rows, replicas)
    if seen.job is None:
        found = _with_pods_that_end(seen, found)
    if view.is_deleted:
        found = _each(found, _deleted)
    count = attempt_of(seen.wrapper, seen.queue)
    return _each(found, lambda row: _counted(row, count, is_own=_is_own(seen)))


def attempt_of(wrapper: Object, queue: QueueState | None = None) -> int:
    """How often all replicas were started again: by the controller, by Kueue after an eviction, and by Atoll."""
    return WrapperView.of(wrapper).resets + (0 if queue is None else queue.evictions) + restarts_by_atoll(wrapper)


def restarts_by_atoll(wrapper: Object) -> int:
    """How often Atoll has created this AppWrapper again, on MCAD."""
    return _number(wrapper, ATTEMPT)


def has_restart(wrapper: Object, rows: RunStatus) -> bool:
    """Whether all replicas start again after a failure that looks like these rows."""
    view = WrapperView.of(wrapper)
    limit = _number(wrapper, MAX_RESTARTS)
    codes = {row.exit_code for row in rows.replicas if row.state is ReplicaState.FAILED and row.exit_code}
    if view.is_mcad:  # the request for v1beta2 has these codes in `terminalExitCodes`
        is_final = bool(codes & {TOO_OLD, TIMED_OUT}) and not runs_own_program(components_of(wrapper))
        return _number(wrapper, ATTEMPT) < limit and not is_final
    retryable = _codes(wrapper, "retryableExitCodes")
    is_terminal = bool(codes & _codes(wrapper, "terminalExitCodes")) or bool(retryable and codes - retryable)
    return view.resets < limit and not is_terminal


def may_be_created_again(wrapper: Object) -> bool:
    """Whether a command that watches may delete this AppWrapper and create it again, for a restart on MCAD."""
    return WrapperView.of(wrapper).is_mcad and has_restart(wrapper, RunStatus(()))


def replaced(last: RunStatus) -> RunStatus:
    """The rows while the AppWrapper is gone, perhaps because another command creates it again."""
    text = "its AppWrapper was deleted, perhaps by a command that starts all replicas again"
    change = {"state": ReplicaState.PENDING, "reason": Reason.RESTARTING, "message": text}
    return _each(last, lambda row: replace(row, **change, exit_code=None, ended_at=None))


# The two kinds of controllers.


def _v1beta2(seen: Snapshot, view: WrapperView, rows: RunStatus | None, replicas: int) -> RunStatus:
    assert seen.wrapper is not None
    match view.phase:
        case Phase.SUCCEEDED:
            return _each(rows or _pending(replicas, ""), _succeeded)
        case Phase.FAILED:
            return _failed(seen, view, rows, replicas)
        case Phase.RESETTING:
            return _each(rows or _pending(replicas, ""), lambda row: _restarts(row, _reset_text(seen.wrapper, view)))
        case Phase.STOPPING if not view.is_deleted:
            return _each(_provisional(seen, rows) or _queued(seen, view, replicas), _suspending)
        case Phase.NEW | Phase.QUEUED:
            return _queued(seen, view, replicas)
    if rows is not None:
        return _going(seen, rows)
    kept = kept_end(seen.wrapper, view.resets, replicas)
    if kept is not None and not has_restart(seen.wrapper, kept):  # it says in a moment that it has failed
        return kept
    return _without_job(seen, view, replicas)


def _mcad(seen: Snapshot, view: WrapperView, rows: RunStatus | None, replicas: int) -> RunStatus:
    if rows is not None:
        return _going(seen, rows)
    if view.phase is Phase.ENDED:
        text = f"MCAD says `{view.word}`, and the Job was deleted, which alone knew how replicas ended"
        return RunStatus.lost(replicas, text)
    return _without_job(seen, view, replicas)


def _going(seen: Snapshot, rows: RunStatus) -> RunStatus:
    """The rows of a Job that the AppWrapper has not given up."""
    assert seen.wrapper is not None
    assert seen.job is not None
    view = JobView.of(seen.job, len(rows.replicas))
    if view.is_complete:
        return rows
    if not view.failing:
        return _provisional(seen, rows) or rows
    if not has_restart(seen.wrapper, rows):
        return rows
    texts = [f"rank {row.rank}: {row.message}" for row in rows.replicas if row.state is ReplicaState.FAILED]
    why = texts[0] if texts else str(view.failing.get("reason") or "the Job failed")
    if WrapperView.of(seen.wrapper).is_mcad:
        text = f"waits for a watching command (`atoll wait`), which starts all replicas again, after {why}"
    else:
        text = f"all replicas start again after {why}"
    return _each(rows, lambda row: _restarts(row, text))


def _provisional(seen: Snapshot, rows: RunStatus | None) -> RunStatus | None:
    """The rows without ends that do not count yet: another rank may fail, or Kueue may stop the run, and then every
    rank starts again. A failure counts when the Job says so; only then is it kept, too."""
    if rows is None or seen.job is None or JobView.of(seen.job, len(rows.replicas)).is_over:
        return rows
    assert seen.wrapper is not None
    if has_restart(seen.wrapper, RunStatus(())) or queue_of(seen.wrapper):
        return _each(rows, _not_final)
    return _each(rows, lambda row: row if row.state is ReplicaState.SUCCEEDED else _not_final(row))


def _with_pods_that_end(seen: Snapshot, rows: RunStatus) -> RunStatus:
    """The rows of an AppWrapper whose Job is deleted already: a rank whose pod still runs has not ended."""
    alive = {rank_of(pod) for pod in seen.pods if is_alive(pod)}
    return _each(rows, lambda row: _ending(row) if row.state.is_terminal and row.rank in alive else row)


def _failed(seen: Snapshot, view: WrapperView, rows: RunStatus | None, replicas: int) -> RunStatus:
    """The end of a v1beta2 AppWrapper that has given up. Job and pods may still be there, or be gone."""
    assert seen.wrapper is not None
    kept = kept_end(seen.wrapper, view.resets, replicas)
    if rows is not None and seen.job is not None and JobView.of(seen.job, replicas).failing:
        return rows
    if kept is not None and rows is None:
        return kept
    if rows is not None:  # the controller deletes the Job, and its pods end
        said = f"the AppWrapper has failed ({view.said})" if view.said else "the AppWrapper has failed"
        return _each(rows, lambda row: row if row.state.is_terminal else _stopping(row, said))
    reason = _ENDS.get(view.reason, Reason.BACKEND)
    retries = f" after {view.resets} restarts" if view.resets else ""
    text = f"the AppWrapper has failed{retries} ({view.said or 'it does not say why'})"
    if view.reason in ("FailedComponent", "FoundFailedPods"):
        text += "; no command watched when it deleted the pods, so that rank and exit code are unknown"
    return RunStatus.uniform(replicas, ReplicaState.FAILED, reason, text)


def _queued(seen: Snapshot, view: WrapperView, replicas: int) -> RunStatus:
    """An AppWrapper that waits. Under Kueue only the Workload knows for what."""
    if seen.queue is not None:
        queue = seen.queue
        text = queue.message
        if (at := queue.fields.get("admitted_at")) is not None and seen.now - at > SILENT_S:
            text += "; the AppWrapper controller has not created the Job; ask the administrator whether it is down"
        row = ReplicaStatus(0, queue.state, queue.reason, text, ended_at=queue.at)
        return RunStatus(tuple(replace(row, rank=rank) for rank in range(replicas)))
    if view.phase is Phase.NEW:
        return _pending(replicas, _silence(seen, "the AppWrapper controller"))
    if (seen.wrapper or {}).get("spec", {}).get("suspend"):
        return _pending(replicas, "the AppWrapper is suspended: somebody holds it back (`spec.suspend: true`)")
    return _pending(replicas, "the AppWrapper controller is about to create the Job")


def _without_job(seen: Snapshot, view: WrapperView, replicas: int) -> RunStatus:
    """The AppWrapper says that it goes on, and there is no Job."""
    reason = Reason.WAITING
    controller = "MCAD" if view.is_mcad else "the AppWrapper controller"
    if view.phase is Phase.NEW:
        text = _silence(seen, controller)
    elif view.phase is Phase.UNKNOWN:
        reason, text = Reason.BACKEND, f"{controller} says `{view.word}`, which this version of Atoll does not know"
    elif view.phase is Phase.FAILED:  # MCAD tries again without end
        reason, text = Reason.CONFIG, f"MCAD cannot create the Job, and tries again: {view.said or view.word}"
    elif view.phase is Phase.DISPATCHED and view.is_mcad:
        text = f"MCAD says `{view.word}`, and there is no Job yet"
    elif view.phase is Phase.DISPATCHED:
        said = f" ({view.said})" if view.said else ""
        text = f"there is no Job: the controller is about to create it, or somebody has deleted it{said}"
    else:
        text = f"waits for MCAD ({view.said})" if view.said else "waits for MCAD"
        if "Insufficient resources" in view.message:
            reason = Reason.CAPACITY
    return RunStatus.uniform(replicas, ReplicaState.PENDING, reason, text)


def _silence(seen: Snapshot, controller: str) -> str:
    created = seconds(((seen.wrapper or {}).get("metadata") or {}).get("creationTimestamp"))
    if created is not None and seen.now - created > SILENT_S:
        return f"{controller} has not looked at it yet; ask the administrator whether it is down"
    return f"{controller} has not looked at it yet"


def _without_wrapper(seen: Snapshot, rows: RunStatus | None, replicas: int) -> RunStatus:
    if rows is None:
        alone = run_status(None, seen.pods, replicas=replicas)
        return _each(alone, lambda row: replace(row, message=GONE) if row.state is ReplicaState.LOST else row)
    if (seen.job or {}).get("metadata", {}).get("deletionTimestamp"):
        return rows
    is_fine = {ReplicaState.RUNNING, ReplicaState.PENDING}
    return _each(rows, lambda row: replace(row, reason=Reason.BACKEND, message=ALONE) if row.state in is_fine else row)


# One row.


def _each(status: RunStatus, change: Any) -> RunStatus:
    return RunStatus(tuple(change(row) for row in status.replicas))


def _pending(replicas: int, text: str) -> RunStatus:
    return RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING, text)


def _succeeded(row: ReplicaStatus) -> ReplicaStatus:
    return replace(row, state=ReplicaState.SUCCEEDED, reason=Reason.OK, message="", exit_code=0)


def _not_final(row: ReplicaStatus) -> ReplicaStatus:
    """A rank that has ended while all may start again."""
    if not row.state.is_terminal:
        return row
    text = row.message or f"ended with code {row.exit_code}; it counts when every rank has ended"
    return replace(row, state=ReplicaState.RUNNING, reason=Reason.OK, message=text, ended_at=None)


def _restarts(row: ReplicaStatus, text: str) -> ReplicaStatus:
    if row.state is ReplicaState.RUNNING:
        return _stopping(row, text)
    return replace(
        row, state=ReplicaState.PENDING, reason=Reason.RESTARTING, message=text, exit_code=None, ended_at=None
    )


def _suspending(row: ReplicaStatus) -> ReplicaStatus:
    if row.state is ReplicaState.RUNNING:
        return _stopping(row, "the AppWrapper was suspended, and its pods end; it starts again later")
    return row


def _deleted(row: ReplicaStatus) -> ReplicaStatus:
    return row if row.state.is_terminal else _stopping(row, DELETED)


def _stopping(row: ReplicaStatus, text: str) -> ReplicaStatus:
    return replace(row, reason=Reason.STOPPING, message=text)


def _ending(row: ReplicaStatus) -> ReplicaStatus:
    going = replace(row, state=ReplicaState.RUNNING, exit_code=None, ended_at=None)
    return _stopping(going, "the AppWrapper has ended, and the pod of this rank is about to")


def _counted(row: ReplicaStatus, count: int, *, is_own: bool) -> ReplicaStatus:
    """The row with its attempt. Restarts before a replica began are no attempts in the store, whose outcome a success
    that counted them would deny."""
    if row.state is ReplicaState.SUCCEEDED and not is_own:
        return row
    return replace(row, attempt=row.attempt + count)


# The end of an attempt, in an annotation.


def notes_to_keep(seen: Snapshot, replicas: int, tails: Mapping[int, str]) -> dict[str, str | None]:
    """Annotations to write on a v1beta2 AppWrapper whose Job has failed, or has lost a node; empty if they are there.

    The first one is written when the failure is visible, and again when every pod has ended. Any write also wakes the
    controller, which otherwise looks at a running AppWrapper every 60 s only. None removes an annotation.
    """
    if seen.wrapper is None or seen.job is None:
        return {}
    view = WrapperView.of(seen.wrapper)
    if view.is_mcad or view.is_deleted:
        return {}
    earlier = int(view.phase is Phase.RESETTING and view.resets > 0)  # the controller counts a reset before it deletes
    key, there = f"{ENDED}{view.resets - earlier}", _annotations(seen.wrapper)
    rows = ended_rows(seen, replicas)
    if rows is None:  # a pod of a lost node cannot end, and the Job waits for it; the controller need not
        lost = sorted(lost_nodes(seen.job_pods))
        return {POKE: lost[0]} if lost and there.get(POKE) != lost[0] else {}
    has_counted, uid = JobView.of(seen.job, replicas).has_counted, str(seen.job["metadata"]["uid"])
    if there.get(POKE) == uid if has_counted else key in there:
        return {}
    text = end_annotation(rows, tails, attempt_of(seen.wrapper, seen.queue) - earlier)
    notes: dict[str, str | None] = dict.fromkeys(crowded_out(there, key, text))
    return {**notes, key: text, **({POKE: uid} if has_counted else {})}


def ended_rows(seen: Snapshot, replicas: int) -> RunStatus | None:
    """How the present attempt has failed, as far as it is visible; None if it has not failed.

    Ranks that are still being stopped count as cancelled, because the controller may delete them at any time.
    """
    rows = seen.job_rows(replicas)
    if rows is None or seen.job is None or not JobView.of(seen.job, replicas).failing:
        return None
    return _each(
        rows,
        lambda row: (
            row if row.state.is_terminal else replace(row, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED)
        ),
    )


def end_annotation(rows: RunStatus, tails: Mapping[int, str], attempt: int) -> str:
    """The end of an attempt as text of a limited size: equal ends of ranks together, and the last lines of some."""
    texts = (_ended_text(rows, tails, attempt, chars) for chars in (_MOST_CHARS, 1000, 500, 250, 100, 0))
    return next((text for text in texts if len(text) <= _MOST_BYTES), "[]")


def _ended_text(rows: RunStatus, tails: Mapping[int, str], attempt: int, chars: int) -> str:
    ways: dict[str, list[int]] = {}
    for row in rows.replicas:
        way: dict[str, Any] = {
            "state": str(row.state),
            "reason": str(row.reason),
            "message": row.message[:chars],
            "exit_code": row.exit_code,
            "attempt": attempt,
        }
        if row.state is ReplicaState.FAILED:
            way |= {"native_id": row.native_id, "host": row.host, "started": row.started_at, "ended": row.ended_at}
        if row.rank in tails and chars:
            way["tail"] = tails[row.rank][-chars:]
        ways.setdefault(json.dumps(way, sort_keys=True), []).append(row.rank)
    kept = [{**json.loads(way), "ranks": _ranges(ranks, most_chars=_MOST_CHARS)} for way, ranks in ways.items()]
    kept.sort(key=lambda way: way["state"] != ReplicaState.FAILED)
    return json.dumps(kept[:_MOST_WAYS], sort_keys=True)


def crowded_out(there: Mapping[str, str], key: str, text: str) -> list[str]:
    """The ends of the oldest attempts for which there is no room beside this annotation."""
    others = {name: value for name, value in there.items() if name != key}
    total = len(key) + len(text) + sum(len(name) + len(value.encode()) for name, value in others.items())
    gone = []
    for number in _kept_numbers(others):
        if total <= _MOST_BYTES_IN_ALL:
            break
        gone.append(f"{ENDED}{number}")
        total -= len(gone[-1]) + len(others[gone[-1]].encode())
    return gone


def kept_end(wrapper: Object, attempt: int, replicas: int) -> RunStatus | None:
    """The end of this attempt, from the annotation; None if nobody has kept it."""
    ways = _kept(wrapper, attempt)
    if not ways:
        return None
    stopped = ReplicaStatus(0, ReplicaState.CANCELLED, Reason.CANCELLED, "stopped because another rank failed")
    rows = {rank: replace(stopped, rank=rank) for rank in range(replicas)}
    for way in ways:
        for rank in indexes(str(way.get("ranks")), replicas):
            rows[rank] = ReplicaStatus(
                rank,
                ReplicaState(way["state"]),
                Reason(way["reason"]),
                str(way.get("message") or ""),
                way.get("exit_code"),
                host=way.get("host"),
                native_id=way.get("native_id"),
                started_at=way.get("started"),
                ended_at=way.get("ended"),
            )
    return RunStatus(tuple(rows[rank] for rank in range(replicas)))


def kept_number(wrapper: Object, attempt: int) -> int | None:
    """The number in the annotation of an attempt, which does not count evictions by Kueue; None if there is none."""
    for number in _kept_numbers(_annotations(wrapper)):
        if any(way.get("attempt", number) == attempt for way in _kept(wrapper, number)):
            return number
    return None


def _kept_numbers(annotations: Mapping[str, str]) -> list[int]:
    numbers = [name.removeprefix(ENDED) for name in annotations if name.startswith(ENDED)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def kept_tail(wrapper: Object, number: int, rank: int) -> list[str] | None:
    """The last lines of a rank in an attempt that failed; None if nobody has kept them."""
    for way in _kept(wrapper, number):
        if rank in indexes(str(way.get("ranks")), rank + 1) and "tail" in way:
            return str(way["tail"]).splitlines()
    return None


def _kept(wrapper: Object, attempt: int) -> list[dict[str, Any]]:
    """What the annotation of an attempt says; empty if there is none, or if somebody has changed it."""
    text = _annotations(wrapper).get(f"{ENDED}{attempt}")
    try:
        found = json.loads(text or "[]")
        return [
            way for way in found if ReplicaState(way["state"]).is_terminal and Reason(way["reason"]) and way["ranks"]
        ]
    except (ValueError, TypeError, KeyError):
        return []


def _ranges(ranks: Iterable[int], *, most_chars: int) -> str:
    """The inverse of `indexes`, such as `0,2-4`; without the last ones if it gets too long."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= most_chars else text[:most_chars].rpartition(",")[0]


def _reset_text(wrapper: Object | None, view: WrapperView) -> str:
    limit = _number(wrapper or {}, MAX_RESTARTS)
    return f"restart {view.resets} of {limit} of all replicas{f' after {view.said}' if view.said else ''}"


def _is_own(seen: Snapshot) -> bool:
    """Whether replicas run a program of the image, which writes no outcomes."""
    return runs_own_program([seen.job] if seen.job is not None else components_of(seen.wrapper or {}))


def runs_own_program(inside: Iterable[Object]) -> bool:
    """Whether one of these objects of an AppWrapper is a Job whose replicas run a program of the image."""
    return any(_annotations(each).get(COMMAND) == "own" for each in inside)


def _annotations(thing: Object) -> Mapping[str, str]:
    return (thing.get("metadata") or {}).get("annotations") or {}


def _number(thing: Object, key: str) -> int:
    text = str(_annotations(thing).get(key, "0"))
    return int(text) if text.isdecimal() else 0


def _codes(wrapper: Object, name: str) -> set[int]:
    text = str(_annotations(wrapper).get(f"{PREFIX}{name}", ""))
    return {int(part) for part in text.split(",") if part.isdecimal()}
