"""Pure: the request of a local run from its placement, and its status from the supervisor's table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.context import LABEL, RunContext, rank_environment
from atoll.executors.base import Capabilities, check
from atoll.executors.local.gpus import Device, share
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

CAPABILITIES = Capabilities(
    code=frozenset({"in_place", "bundle"}),
    images=False,
    resources=False,
    secret_schemes=frozenset({"env", "file"}),
    max_replicas=1024,
    network_between_replicas=True,
)


def local_request(
    context: RunContext, placement: Placement, root: Path, devices: Callable[[], Sequence[Device]]
) -> tuple[dict[str, Any], list[str]]:
    """The request, and every reason why it cannot run here."""
    problems = check(placement, CAPABILITIES)
    if sys.platform != "linux":
        problems.append(f"platform=`{sys.platform}`: local runs need Linux; `--on` another backend works from here")
    if context.store_uri.startswith("memory:"):
        problems.append(
            f"store=`{context.store_uri}`: replicas are other processes, which cannot see the memory of this process"
        )
    devices_by_rank: list[str] | str = (
        [] if placement.gpu is None else share(placement.gpu, placement.replicas, devices())
    )
    if isinstance(devices_by_rank, str):
        problems.append(devices_by_rank)
    label = str(root / context.native_name())
    ranks = context.ranks(placement.replicas)
    request = {
        "command": [sys.executable, "-P", "-m", "atoll.replica", "--spool", label],
        "host": os.uname().nodename,
        "label": label,
        "run_id": context.run_id,
        **({"launch": context.launch} if context.launch > 1 else {}),
        "store": context.store_uri,
        "ranks": list(ranks),
        "environment": {**context.environment(placement.replicas), **placement.env, LABEL: label},
        "secrets": dict(placement.secrets),
        "rank_environment": {
            str(rank): _rank_environment(placement, rank, devices_by_rank, place) for place, rank in enumerate(ranks)
        },
        "timeout_s": placement.timeout_s,
        "grace_s": placement.grace_s,
        "max_restarts": placement.max_restarts,
    }
    return request, problems


def _rank_environment(placement: Placement, rank: int, devices_by_rank: list[str] | str, place: int) -> dict[str, str]:
    own = rank_environment(rank, placement.rank_env)
    return (
        {**own, "CUDA_VISIBLE_DEVICES": devices_by_rank[place]}
        if devices_by_rank and isinstance(devices_by_rank, list)
        else own
    )


def local_status(
    replicas: int,
    rows: list[dict[str, Any]] | None,
    *,
    supervisor_runs: bool,
    cancelled: Collection[int],
    first_rank: int = 0,
) -> RunStatus:
    """Every replica, from the supervisor's table. Without a running supervisor, those that were not over are LOST.

    `cancelled` are the replicas whose cancellation was requested; it counts if the run has not started. The ranks of
    the table begin with `first_rank`, and those of the status with 0.
    """
    if rows is not None:
        known = [ReplicaStatus.from_json({**row, "rank": row["rank"] - first_rank}) for row in rows]
        return RunStatus(tuple(known if supervisor_runs else map(_lost, known)))
    if supervisor_runs:
        return RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.STARTING, "the supervisor is starting")
    stopped = RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, "cancelled before it started")
    message = "the launcher was interrupted before any replica started; launch the run again, or cancel it"
    waiting = RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING, message)
    pairs = zip(stopped.replicas, waiting.replicas, strict=True)
    return RunStatus(tuple(over if over.rank in cancelled else idle for over, idle in pairs))


def with_problem(status: RunStatus, problem: str) -> RunStatus:
    """The status with a problem that this machine has at the moment, for the ranks that have not ended."""
    if not problem:
        return status
    return status.with_replicas(
        r if r.state.is_terminal else replace(r, progress=replace(r.progress, problem=r.progress.problem or problem))
        for r in status.replicas
    )


def _lost(replica: ReplicaStatus) -> ReplicaStatus:
    if replica.state.is_terminal:
        return replica
    message = "the supervisor of this run died, and this replica was killed with it"
    return replace(replica, state=ReplicaState.LOST, reason=Reason.LOST, message=message, native_id=None)
