"""What a run costs: so far, expected, and at most; and the time limit that keeps a limit of the cost. Pure.

The price of a replica is recorded at the launch, so every command computes with the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll import units
from atoll.errors import InvalidSpec
from atoll.result import ranks_text
from atoll.spec import Part
from atoll.status import ReplicaState, ReplicaStatus, RunStatus
from atoll.validation import is_number, shown

_LEAST_S = 60.0


@dataclass(frozen=True)
class Cost:
    """The cost of one launch of a run, in dollars, at the price per hour that was known when it was launched."""

    hourly_usd: float
    """The price of one replica for an hour."""
    so_far_usd: float
    expected_usd: float | None
    """When the remaining rounds are done, at the current pace; None if that is not known."""
    at_most_usd: float
    """When every replica has reached its time limit."""
    unpriced: tuple[str, ...] = ()
    """The parts of the run whose price is not known; they are not counted."""
    untimed: tuple[int, ...] = ()
    """Lost ranks of which nothing says how long they ran; they are not counted."""

    def __str__(self) -> str:
        expected = f", about ${self.expected_usd:,.2f} expected" if self.expected_usd is not None else ""
        rest = f", without {', '.join(self.unpriced)}" if self.unpriced else ""
        rest += f"; how long {ranks_text(self.untimed)} ran is not known" if self.untimed else ""
        return f"${self.so_far_usd:,.2f} so far{expected}, at most ${self.at_most_usd:,.2f}{rest}"

    def to_json(self) -> dict[str, Any]:
        lists = {"unpriced": list(self.unpriced), "untimed": list(self.untimed)}
        found = {name: value for name, value in asdict(self).items() if name not in lists}
        return {**found, **{name: value for name, value in lists.items() if value}}


def cost_of(
    status: RunStatus,
    hourly_usd: float,
    *,
    timeout_s: float,
    now: float,
    parts: Sequence[Part] = (),
    part_usd: Sequence[float | None] = (),
) -> Cost:
    """The cost of a launch with this status. A replica costs from its start to its end.

    With `parts`, the replicas of each part have their own price, `part_usd`; `hourly_usd` is the mean.
    """
    prices = _price_of_ranks(status, hourly_usd, parts, part_usd)
    spent = [_running_s(replica, now) * usd / 3600 for replica, usd in zip(status.replicas, prices, strict=True)]
    left = [_left_s(replica) if usd else 0.0 for replica, usd in zip(status.replicas, prices, strict=True)]
    known = [seconds * usd / 3600 for seconds, usd in zip(left, prices, strict=True) if seconds is not None]
    untimed = tuple(row.rank for row, usd in zip(status.replicas, prices, strict=True) if usd and _is_untimed(row))
    expected = sum(spent) + sum(known) if len(known) == len(left) and not untimed else None
    unpriced = tuple(part.on for part, usd in zip(parts, part_usd, strict=False) if usd is None)
    return Cost(hourly_usd, sum(spent), expected, sum(prices) * timeout_s / 3600, unpriced, untimed)


def mean_usd(parts: Sequence[Part], part_usd: Sequence[float | None]) -> float:
    """The mean price of a replica; a part whose price is not known counts as 0."""
    known = [(usd or 0.0) * part.replicas for part, usd in zip(parts, part_usd, strict=True)]
    return sum(known) / sum(part.replicas for part in parts)


def _price_of_ranks(
    status: RunStatus, hourly_usd: float, parts: Sequence[Part], part_usd: Sequence[float | None]
) -> list[float]:
    """The price of each rank for an hour."""
    if not parts or len(parts) != len(part_usd):
        return [hourly_usd] * len(status.replicas)
    return [usd or 0.0 for part, usd in zip(parts, part_usd, strict=True) for _ in range(part.replicas)]


def limit_s(max_cost: float, hourly_usd: float | None, replicas: int, *, backend: str) -> float:
    """The time limit of each replica with which the run costs at most `max_cost` dollars."""
    if not is_number(max_cost) or not max_cost > 0:
        raise InvalidSpec("this run", [f"max_cost={shown(max_cost)}: a number of dollars above 0"])
    if hourly_usd is None:
        raise InvalidSpec("this run", [f"max_cost={max_cost:g}: the price of a replica on `{backend}` is not known"])
    seconds = math.floor(max_cost * 3600 / (hourly_usd * replicas)) if hourly_usd else math.inf
    if seconds < _LEAST_S:
        reached = f"{replicas} × ${hourly_usd:,.2f}/h reaches it after {units.duration_text(seconds)}"
        raise InvalidSpec("this run", [f"max_cost={max_cost:g}: {reached}, and a run needs at least a minute"])
    return seconds


def limit_note(max_cost: float, hourly_usd: float, replicas: int, limit: float, timeout_s: float) -> str:
    """The arithmetic of a limit of the cost, for the plan."""
    price = f"${max_cost:,.2f} / ({replicas} × ${hourly_usd:,.2f}/h) = {units.duration_text(limit)}"
    if limit >= timeout_s:
        most = hourly_usd * replicas * timeout_s / 3600
        return f"max cost: {price}; the time limit of {units.duration_text(timeout_s)} is shorter: at most ${most:,.2f}"
    return f"max cost: {price}, which is the time limit of each replica, restarts included"


def _running_s(replica: ReplicaStatus, now: float) -> float:
    if replica.started_at is None:
        return 0.0
    ended_at = replica.ended_at if replica.ended_at is not None else now
    if replica.ended_at is None and replica.state is ReplicaState.LOST:  # it sends no heartbeats any more
        ended_at = replica.progress.beat_at or replica.started_at
    return max(0.0, ended_at - replica.started_at)


def _is_untimed(replica: ReplicaStatus) -> bool:
    return replica.state is ReplicaState.LOST and (
        replica.started_at is None or (replica.ended_at is None and replica.progress.beat_at is None)
    )


def _left_s(replica: ReplicaStatus) -> float | None:
    return 0.0 if replica.state.is_terminal else replica.progress.eta_s
