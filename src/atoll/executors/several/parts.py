"""Pure: the parts of a run as one request, one handle and one status, and back.

The request of a run has the request of each part. The native id of its handle has the handles of the parts as texts, so
that the handle is enough to find every replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from atoll.errors import ConfigError
from atoll.executors.base import Capabilities, Plan
from atoll.handle import RunHandle
from atoll.result import ranks_text
from atoll.status import Progress, Reason, ReplicaState, ReplicaStatus, RunStatus

EXECUTOR = "several"
ANY = Capabilities(code=frozenset({"in_place", "bundle", "image"}))
"""What the parts may support, before they are known."""
_BETWEEN = " "
"""Stands between the handles; no text of a handle contains it."""


def joined_plan(run_id: str, plans: Sequence[Plan]) -> Plan:
    """The plan of a run from those of its parts."""
    request = {"parts": [{"executor": p.executor, "replicas": p.replicas, "request": p.request} for p in plans]}
    replicas, notes = 0, list[str]()
    for plan in plans:
        notes += (f"{title(plan.executor, replicas, plan.replicas)}: {note}" for note in plan.notes)
        replicas += plan.replicas
    return Plan(EXECUTOR, run_id, replicas, request, tuple(notes))


def part_plans(plan: Plan) -> list[Plan]:
    """The plans of the parts, without their notes: the inverse of `joined_plan`."""
    parts: list[dict[str, Any]] = plan.request["parts"]
    return [Plan(part["executor"], plan.run_id, part["replicas"], part["request"]) for part in parts]


def joined_handle(handles: Sequence[RunHandle]) -> RunHandle:
    """The handle of a run from those of its parts."""
    scope = "+".join(handle.executor for handle in handles)
    native = _BETWEEN.join(map(str, handles))
    replicas = sum(handle.replicas for handle in handles)
    return RunHandle(EXECUTOR, scope, native, replicas, handles[0].first_rank)


def part_handles(handle: RunHandle) -> list[RunHandle]:
    """The handles of the parts: the inverse of `joined_handle`."""
    found = [RunHandle.parse(text) for text in handle.native_id.split(_BETWEEN)]
    if sum(part.replicas for part in found) != handle.replicas:
        raise ConfigError(f"`{handle}` is not a run handle: its parts have another number of replicas")
    return found


def joined_status(statuses: Iterable[tuple[str, RunStatus]]) -> RunStatus:
    """The status of a run from those of its parts, each with the name of its backend."""
    rows = [replace(row, backend=name) for name, status in statuses for row in status.replicas]
    return RunStatus(tuple(replace(row, rank=rank) for rank, row in enumerate(rows)))


def unanswered(handle: RunHandle, problem: str) -> RunStatus:
    """The status of a part whose service does not answer."""
    row = ReplicaStatus(0, ReplicaState.PENDING, Reason.NO_ANSWER, problem, progress=Progress(problem=problem))
    return RunStatus(tuple(replace(row, rank=rank) for rank in range(handle.replicas)))


def common(capabilities: Sequence[Capabilities]) -> Capabilities:
    """What all parts support, and what happens if one of them behaves so."""
    limits = [each.max_restarts for each in capabilities if each.max_restarts is not None]
    return Capabilities(
        code=frozenset.intersection(*(each.code for each in capabilities)),
        images=any(each.images for each in capabilities),
        resources=any(each.resources for each in capabilities),
        secret_schemes=frozenset.union(*(each.secret_schemes for each in capabilities)),
        max_restarts=min(limits, default=None),
        cancels_together=len(capabilities) == 1 and capabilities[0].cancels_together,
        fails_together=any(each.fails_together for each in capabilities),
        forgets_cancelled=any(each.forgets_cancelled for each in capabilities),
    )


def title(name: str, first_rank: int, replicas: int) -> str:
    """A part for messages, such as `modal, ranks 2-3`."""
    return f"{name}, {ranks_text(range(first_rank, first_rank + replicas))}"
