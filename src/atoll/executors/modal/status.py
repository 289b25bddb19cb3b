"""Pure: the status of a replica from the records of its calls and from what Modal says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.context import CLAIMED, TIMED_OUT, TOO_OLD, ending_signal
from atoll.executors.modal.calls import Look, Phase
from atoll.executors.modal.records import BARRED, RankCalls
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus

_ENDS: dict[Phase, tuple[ReplicaState, Reason, str]] = {
    Phase.FAILED: (ReplicaState.FAILED, Reason.KILLED, "the call failed: its container ended without an answer"),
    Phase.NOT_STARTED: (ReplicaState.FAILED, Reason.IMAGE, "the container could not be started"),
    Phase.TERMINATED: (ReplicaState.FAILED, Reason.PREEMPTED, "Modal terminated the call, and no cancel was sent"),
    Phase.TIMED_OUT: (ReplicaState.FAILED, Reason.TIMEOUT, "Modal's time limit has passed"),
    Phase.GONE: (ReplicaState.LOST, Reason.LOST, "Modal no longer has this call or its output"),
}


def replica_status(rank: int, calls: RankCalls, looks: Mapping[str, Look]) -> ReplicaStatus:
    """The status of one rank. `looks` has every call in `calls.ids`."""
    if calls.holder == BARRED:
        return ReplicaStatus(rank, ReplicaState.CANCELLED, Reason.CANCELLED, "cancelled before it started")
    if not calls.ids:
        if calls.has_unknown:
            message = "a launcher was about to start it"
            return ReplicaStatus(rank, ReplicaState.PENDING, Reason.STARTING, message)
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, "no record of a call of this rank")
    if calls.holder:
        return _of_call(rank, looks[calls.holder], calls)
    waiting = [looks[each] for each in calls.sent if not looks[each].is_over]
    return _of_call(rank, waiting[0] if waiting else looks[calls.sent[-1]], calls)


def _of_call(rank: int, look: Look, calls: RankCalls) -> ReplicaStatus:
    if look.phase is Phase.PENDING:
        is_claimed = bool(calls.holder) or calls.claimed_at is not None
        state = ReplicaState.RUNNING if is_claimed else ReplicaState.PENDING
        reason = Reason.OK if is_claimed else Reason.WAITING
        return ReplicaStatus(
            rank,
            state,
            Reason.STOPPING if calls.is_stopped else reason,
            look.message,
            started_at=calls.claimed_at,
            native_id=look.call_id,
        )
    if look.phase is Phase.RETURNED and look.envelope is not None:
        return _of_envelope(rank, look.call_id, look.envelope, calls)
    state, reason, message = _ENDS.get(look.phase, _ENDS[Phase.FAILED])
    if calls.is_stopped and look.phase in (Phase.TERMINATED, Phase.FAILED):
        state, reason, message = ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST
    return ReplicaStatus(rank, state, reason, look.message or message, native_id=look.call_id)


def _of_envelope(rank: int, call_id: str, envelope: Mapping[str, Any], calls: RankCalls) -> ReplicaStatus:
    native: dict[str, Any] = {"native_id": call_id, "host": envelope.get("host")}
    state = envelope["state"]
    if state == "cancelled":
        return ReplicaStatus(rank, ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST, **native)
    if state == "duplicate":
        message = f"another call runs this rank: {envelope.get('claimed_by')}"
        return ReplicaStatus(rank, ReplicaState.PENDING, Reason.STARTING, message, **native)
    if state == "too_old":
        return ReplicaStatus(rank, ReplicaState.FAILED, Reason.IMAGE, str(envelope.get("message", "")), **native)
    if state != "ran":
        message = str(envelope.get("message") or f"the function says `{state}`")
        return ReplicaStatus(rank, ReplicaState.FAILED, Reason.CONFIG, message, **native)
    times: dict[str, Any] = {"started_at": envelope.get("started_at"), "ended_at": envelope.get("ended_at")}
    code = int(envelope.get("exit_code", 1))
    if code == 0:
        return ReplicaStatus(rank, ReplicaState.SUCCEEDED, Reason.OK, "", code, **native, **times)
    if calls.is_stopped and (code > 128 or code == CLAIMED):
        return ReplicaStatus(rank, ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST, code, **native, **times)
    return ReplicaStatus(rank, ReplicaState.FAILED, _reason(code), f"exit code {code}", code, **native, **times)


def _reason(code: int) -> Reason:
    if code == TIMED_OUT:
        return Reason.TIMEOUT
    if code == TOO_OLD:
        return Reason.IMAGE
    return Reason.KILLED if ending_signal(code) else Reason.USER_ERROR
