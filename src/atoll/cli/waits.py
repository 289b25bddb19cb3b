"""The ranks that a round waits for, what happens next, and what a user can do, as text. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from atoll import units
from atoll.result import better_text
from atoll.rounds.metrics import Waiting
from atoll.status import ReplicaState, ReplicaStatus, RunStatus

SILENT_S = 60.0
"""A replica without a heartbeat for longer than this may be dead, even if its backend reports that it runs."""
_MOST_LISTED = 8


def waiting_text(waiting: Waiting | None, status: RunStatus, now: float) -> str:
    """Such as `round 12 waits for rank 3 (failed)` or `… ranks 1, 3 (rank 3 failed)`; empty if no round waits."""
    if waiting is None:
        return ""
    missing, conditions = _missing(waiting, status), dict[str, list[ReplicaStatus]]()
    for replica in missing:
        if text := _condition(replica, now):
            conditions.setdefault(text, []).append(replica)
    notes = [f"{_subject(replicas, missing)}{text}" for text, replicas in conditions.items()]
    return f"{waiting} ({'; '.join(notes)})" if notes else str(waiting)


def outlook_text(waiting: Waiting | None, status: RunStatus, run_id: str, now: float) -> str:
    """What happens next, and the commands that show more or end the run; empty if there is nothing to add."""
    if waiting is None:
        return ""
    missing = _missing(waiting, status)
    ended = [replica for replica in missing if replica.state.is_terminal]
    run, ranks = shlex.quote(run_id), ",".join(str(replica.rank) for replica in (ended or missing)[:_MOST_LISTED])
    shows = f"why {'it' if len(ended) == 1 else 'they'} ended" if ended else "the last output"
    logs = f"`atoll logs {run} --rank {ranks}` shows {shows}"
    outlook = waiting.outlook
    if outlook is None:
        return logs if ended else ""
    left = units.duration_text(outlook.until - now) if outlook.until - now >= 1 else "a moment"
    them = "it" if len(missing) == 1 else "them"
    if outlook.goes_on:
        return f"the round continues without {them} in {left}" + (f"; {logs}" if ended else "")
    if needed := _needed(waiting, missing, ended):
        have = f"{_named(ended)} {'has' if len(ended) == 1 else 'have'} ended"
        how_many = ("it" if len(ended) == 1 else "them") if needed == len(ended) else f"{needed} of them"
        return (
            f"{have} and the round needs {how_many}: it fails in {left}; {logs}; `atoll cancel {run}` ends the run now"
        )
    return f"the round waits {left} more for {them}, then it fails; {logs}"


def advice_text(waiting: Waiting | None, status: RunStatus, *, could_restart: bool) -> str:
    """How to avoid such a wait in the next run; empty if the round does not need a replica that has ended."""
    if waiting is None:
        return ""
    missing = _missing(waiting, status)
    if not _needed(waiting, missing, [replica for replica in missing if replica.state.is_terminal]):
        return ""
    return better_text(could_restart=could_restart, could_go_on=not waiting.is_committed)


def _needed(waiting: Waiting, missing: Sequence[ReplicaStatus], ended: Sequence[ReplicaStatus]) -> int:
    """How many of the ended replicas the round needs, even if all other missing ones arrive."""
    return max(0, waiting.needed - (len(missing) - len(ended)))


def _missing(waiting: Waiting, status: RunStatus) -> list[ReplicaStatus]:
    return [status.replicas[rank] for rank in waiting.missing if rank < len(status.replicas)]


def _condition(replica: ReplicaStatus, now: float) -> str:
    """Why a missing replica may never arrive; empty if it runs and sends heartbeats."""
    if replica.state is not ReplicaState.RUNNING:
        return str(replica.state)
    at = replica.progress.beat_at
    return f"no heartbeat for {units.duration_text(now - at)}" if at is not None and now - at > SILENT_S else ""


def _subject(some: Sequence[ReplicaStatus], listed: Sequence[ReplicaStatus]) -> str:
    """`rank 3 `, `both `, `all `; empty if there is only one rank, which the sentence has named."""
    if len(some) < len(listed):
        return f"{_named(some)} "
    return {1: "", 2: "both "}.get(len(listed), "all ")


def _named(replicas: Sequence[ReplicaStatus]) -> str:
    """Such as `rank 3` or `ranks 1, 3`."""
    more = ", …" if replicas[_MOST_LISTED:] else ""
    ranks = ", ".join(str(replica.rank) for replica in replicas[:_MOST_LISTED]) + more
    return f"rank {ranks}" if len(replicas) == 1 else f"ranks {ranks}"
