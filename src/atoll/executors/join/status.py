"""Pure: the status of a replica from the records of the machines that have claimed its rank."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from atoll.replica.joined import Condition, JoinPart, RankRow
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus


def replica_status(rank: int, row: RankRow, part: JoinPart, line: str) -> ReplicaStatus:
    """The status of one rank, which counts from 0 in its part. `line` is the command with which a machine joins."""
    condition = row.condition(part.max_restarts)
    if condition is Condition.OVER:
        return _over(rank, row)
    if condition is Condition.RUNNING:
        reason = Reason.STOPPING if row.is_stopping else Reason.OK
        return ReplicaStatus(rank, ReplicaState.RUNNING, reason, f"joined from {row.host}", **_place(row))
    if condition is Condition.RESTARTING:
        message = f"attempt {row.attempt} ended: {(row.outcome or {}).get('message', '')}"
        return ReplicaStatus(rank, ReplicaState.PENDING, Reason.RESTARTING, message, **_place(row))
    reason = Reason.STOPPING if row.is_stopping else Reason.WAITING
    return ReplicaStatus(
        rank,
        ReplicaState.PENDING,
        reason,
        _why_free(condition, row, line),
        attempt=row.attempt or 0,
        started_at=row.first_at,
    )


def native_id(row: RankRow) -> str | None:
    """The machine and the process that has the rank."""
    pid = (row.start or {}).get("pid")
    return f"joined {row.host}:{pid}" if row.host and isinstance(pid, int) else row.host


def _over(rank: int, row: RankRow) -> ReplicaStatus:
    if row.is_barred:
        message = ON_REQUEST if row.attempt else "cancelled before a machine joined"
        return ReplicaStatus(rank, ReplicaState.CANCELLED, Reason.CANCELLED, message, started_at=row.first_at)
    outcome = row.outcome or {}
    state, reason = outcome.get("state"), outcome.get("reason")
    if state not in list(ReplicaState) or reason not in list(Reason):
        message = f"attempt {row.attempt} has ended, and its outcome in the store is damaged"
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, message, **_place(row))
    code, ended_at = outcome.get("exit_code"), outcome.get("ended_at")
    return ReplicaStatus(
        rank,
        ReplicaState(state),
        Reason(reason),
        str(outcome.get("message", "")),
        exit_code=code if isinstance(code, int) else None,
        ended_at=ended_at if isinstance(ended_at, int | float) else None,
        **_place(row),
    )


def _place(row: RankRow) -> dict[str, Any]:
    return {
        "host": row.host,
        "attempt": row.attempt or 0,
        "native_id": native_id(row),
        "started_at": row.first_at,
    }


def _why_free(condition: Condition, row: RankRow, line: str) -> str:
    if condition is Condition.WAITING:
        return f"waits for a machine: {line}"
    if condition is Condition.SILENT:
        since = datetime.fromtimestamp(row.heard_at or 0.0, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"no heartbeat of {row.host} since {since}; waits for another machine: {line}"
    return f"{row.host} left; waits for another machine: {line}"
