"""Pure: placement -> the plan of a local run, and what the shepherd wrote -> status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.context import LABEL, RunContext, rank_environment
from atoll.executors.base import Capabilities, check
from atoll.executors.local.gpus import Device, share
from atoll.names import native_name
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
    """The request, and every reason it cannot be done."""
    problems = check(placement, CAPABILITIES)
    if sys.platform != "linux":
        problems.append(f"platform=`{sys.platform}`: local runs need Linux; `--on` another backend works from here")
    if context.store_uri.startswith("memory:"):
        problems.append(f"store=`{context.store_uri}`: replicas are other processes and cannot see this one's memory")
    pinned: list[str] | str = [] if placement.gpu is None else share(placement.gpu, placement.replicas, devices())
    if isinstance(pinned, str):
        problems.append(pinned)
    label = str(root / native_name(context.run_id, context.store_uri))
    ranks = range(placement.replicas)
    request = {
        "command": [sys.executable, "-P", "-m", "atoll.replica", "--spool", label],
        "host": os.uname().nodename,
        "label": label,
        "run_id": context.run_id,
        "store": context.store_uri,
        "ranks": list(ranks),
        "environment": {**context.environment(placement.replicas), **placement.env, LABEL: label},
        "secrets": dict(placement.secrets),
        "rank_environment": {str(rank): _rank_environment(placement, rank, pinned) for rank in ranks},
        "timeout_s": placement.timeout_s,
        "grace_s": placement.grace_s,
        "max_restarts": placement.max_restarts,
    }
    return request, problems


def _rank_environment(placement: Placement, rank: int, pinned: list[str] | str) -> dict[str, str]:
    own = rank_environment(rank, placement.rank_env)
    return {**own, "CUDA_VISIBLE_DEVICES": pinned[rank]} if pinned and isinstance(pinned, list) else own


def local_status(
    replicas: int, rows: list[dict[str, Any]] | None, *, shepherd_lives: bool, cancel_asked: bool
) -> RunStatus:
    """Every rank, from the shepherd's table and from whether the shepherd is still there to keep it true."""
    if rows is not None:
        known = [ReplicaStatus.from_json(row) for row in rows]
        return RunStatus(tuple(known if shepherd_lives else map(_abandoned, known)))
    if shepherd_lives:
        return RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.STARTING, "the shepherd is starting")
    if cancel_asked:
        return RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, "cancelled before it started")
    message = "its launcher was interrupted before anything started; launch it again to go on, or cancel it"
    return RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING, message)


def _abandoned(replica: ReplicaStatus) -> ReplicaStatus:
    if replica.state.is_terminal:
        return replica
    message = "the shepherd of this run died, and this replica was killed with it"
    return replace(replica, state=ReplicaState.LOST, reason=Reason.LOST, message=message, native_id=None)
