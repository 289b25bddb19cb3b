"""Whom a round waits for, what comes of it, and what a person can do, in words. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from atoll import units
from atoll.result import better_text
from atoll.rounds.metrics import Waiting
from atoll.status import ReplicaState, ReplicaStatus, RunStatus

SILENT_S = 60.0
"""A replica that has not been heard of for longer than this may be dead, whatever its backend says."""
_LISTED = 8


def waiting_text(waiting: Waiting | None, status: RunStatus, now: float) -> str:
    """Such as `round 12 waits for rank 3 (failed)`, or `… ranks 1, 3 (rank 3 failed)`; empty when nobody waits."""
    if waiting is None:
        return ""
    missing, troubles = _missing(waiting, status), dict[str, list[ReplicaStatus]]()
    for replica in missing:
        if text := _trouble(replica, now):
            troubles.setdefault(text, []).append(replica)
    told = [f"{_which(who, missing)}{text}" for text, who in troubles.items()]
    return f"{waiting} ({'; '.join(told)})" if told else str(waiting)


def outlook_text(waiting: Waiting | None, status: RunStatus, run_id: str, now: float) -> str:
    """What happens next, and the commands that tell more or end it; empty when there is nothing to say."""
    if waiting is None:
        return ""
    missing = _missing(waiting, status)
    ended = [replica for replica in missing if replica.state.is_terminal]
    run, ranks = shlex.quote(run_id), ",".join(str(replica.rank) for replica in (ended or missing)[:_LISTED])
    why = f"`atoll logs {run} --rank {ranks}` " + (f"says why {_it(ended)} ended" if ended else "shows the last of it")
    outlook = waiting.outlook
    if outlook is None:
        return why if ended else ""
    left = units.duration_text(outlook.until - now) if outlook.until - now >= 1 else "a moment"
    if outlook.goes_on:
        return f"goes on without {_them(missing)} in {left}" + (f"; {why}" if ended else "")
    if needed := _needed(waiting, missing, ended):
        how = (
            "needed"
            if needed == len(ended)
            else f"{'one of them is' if needed == 1 else f'{needed} of them are'} needed"
        )
        return f"{_are(ended)} over and {how}: the round fails in {left}; {why}, `atoll cancel {run}` ends the run now"
    return f"waits {left} more for {_them(missing)}, then the round fails; {why}"


def avoid_text(waiting: Waiting | None, status: RunStatus, *, could_restart: bool) -> str:
    """How not to wait for a dead replica again; empty when nobody does."""
    missing = _missing(waiting, status) if waiting is not None else []
    ended = [replica for replica in missing if replica.state.is_terminal]
    if waiting is None or not _needed(waiting, missing, ended):
        return ""
    return better_text(could_restart=could_restart, could_go_on=not waiting.is_committed)


def _needed(waiting: Waiting, missing: Sequence[ReplicaStatus], ended: Sequence[ReplicaStatus]) -> int:
    """How many of those who are over would have to come."""
    return max(0, waiting.needed - (len(missing) - len(ended)))


def _missing(waiting: Waiting, status: RunStatus) -> list[ReplicaStatus]:
    return [status.replicas[rank] for rank in waiting.missing if rank < len(status.replicas)]


def _trouble(replica: ReplicaStatus, now: float) -> str:
    """Why it may not come, if that is to be seen."""
    if replica.state is not ReplicaState.RUNNING:
        return str(replica.state)
    at = replica.progress.beat_at
    return f"silent for {units.duration_text(now - at)}" if at is not None and now - at > SILENT_S else ""


def _it(replicas: Sequence[ReplicaStatus]) -> str:
    return "it" if len(replicas) == 1 else "they"


def _them(replicas: Sequence[ReplicaStatus]) -> str:
    return "it" if len(replicas) == 1 else "them"


def _are(replicas: Sequence[ReplicaStatus]) -> str:
    """Such as `rank 3 is` or `ranks 1, 3 are`."""
    return f"{_named(replicas)} {'is' if len(replicas) == 1 else 'are'}"


def _which(some: Sequence[ReplicaStatus], listed: Sequence[ReplicaStatus]) -> str:
    """Which of the ranks that are listed already."""
    if len(some) < len(listed):
        return f"{_named(some)} "
    return {1: "", 2: "both "}.get(len(listed), "all ")


def _named(replicas: Sequence[ReplicaStatus]) -> str:
    """Such as `rank 3` or `ranks 1, 3`."""
    ranks = ", ".join(str(replica.rank) for replica in replicas[:_LISTED]) + (", …" if replicas[_LISTED:] else "")
    return f"rank {ranks}" if len(replicas) == 1 else f"ranks {ranks}"
