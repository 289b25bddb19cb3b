"""Which updates count, decided from what one observer sees. Pure: no clock, no store, no other machine's time.

Times are the observer's own monotonic seconds since it began to wait. Observers may decide differently; the commit
record settles it, because only the first one written counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.errors import InvalidSpec
from atoll.validation import SECONDS, SECONDS_ABOVE_0, Kind, check_fields, is_count, is_number, one_of


@dataclass(frozen=True)
class Wait:
    """Look again, at the latest when `until` seconds have passed since the wait began."""

    until: float


@dataclass(frozen=True)
class CommitDecision:
    """Propose these ranks, in order."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """No quorum can be had any more."""

    reason: str
    missing: tuple[int, ...]


Decision: TypeAlias = Wait | CommitDecision | GiveUp


_GRACE_S = 30.0
_KINDS = {
    "least": Kind("a whole number from 1, or None for every member", is_count, may_be_none=True),
    "grace_s": SECONDS,
    "deadline_s": SECONDS_ABOVE_0,
    "spread": Kind("a number, 0 or more, or None", lambda value: is_number(value) and value >= 0, may_be_none=True),
    "on_rejected": Kind("`continue` or `stop`", one_of("continue", "stop")),
}


@dataclass(frozen=True)
class Quorum:
    """How many updates a round needs, and how long to wait for more.

    `least=None` is strict: every member. Otherwise a round may go on with `least` updates, once `grace_s` have passed
    since that many were there; or, with `spread` set, once the usual lateness has passed: the median of past arrivals
    plus `spread` times their median absolute deviation, but no longer than `grace_s`.
    """

    least: int | None = None
    grace_s: float = _GRACE_S
    deadline_s: float = 1800.0
    spread: float | None = None
    on_rejected: str = "continue"
    """`continue` goes on without an update that failed a check; `stop` ends the run, naming it."""

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        if self.deadline_s < self.grace_s != _GRACE_S:  # a grace that nobody has chosen just ends with the deadline
            rule = f"at most deadline_s={self.deadline_s:g}: no round waits for longer than that"
            raise InvalidSpec("Quorum", [f"grace_s={self.grace_s:g}: {rule}"])

    def check_reachable(self, world_size: int) -> None:
        """Raise `InvalidSpec` if a round needs more updates than there are replicas."""
        if self.least is not None and self.least > world_size:
            raise InvalidSpec("Quorum", [f"least={self.least}: at most {world_size}, the number of replicas"])

    @property
    def is_strict(self) -> bool:
        return self.least is None

    def to_json(self) -> dict[str, Any]:
        return {
            "least": self.least,
            "grace_s": self.grace_s,
            "deadline_s": self.deadline_s,
            "spread": self.spread,
            "on_rejected": self.on_rejected,
        }


def strict(deadline_s: float = 1800.0) -> Quorum:
    """Every member, or give up at the deadline."""
    return Quorum(None, deadline_s=deadline_s)


def at_least(count: int, *, grace_s: float = 30.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates and a fixed grace for the rest."""
    return Quorum(count, min(grace_s, deadline_s), deadline_s)


def adaptive(count: int, *, spread: float = 4.0, grace_s: float = 300.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates and a grace learnt from past rounds, capped by `grace_s`."""
    return Quorum(count, min(grace_s, deadline_s), deadline_s, spread)


def decide(
    policy: Quorum,
    *,
    members: Collection[int],
    arrived: Mapping[int, float],
    elapsed_s: float,
    rejected: Collection[int] = (),
    left: Collection[int] = (),
    away: Collection[int] = (),
    lateness: Sequence[float] = (),
) -> Decision:
    """What to do after `elapsed_s` of waiting.

    `arrived`: rank → when its usable update was first seen. `rejected`: ranks whose update will not be used.
    `left`: ranks that said they will not come back. `away`: ranks missing for rounds; the grace is not for them.
    `lateness`: past arrivals, in seconds after the round's `least`-th one.
    """
    usable = tuple(sorted(arrived))
    lost = sorted(set(members) - set(arrived))
    hoped_for = set(lost) - set(rejected) - set(left)
    if rejected and policy.on_rejected == "stop":
        return GiveUp(f"the update of {_listed(sorted(rejected))} was rejected", tuple(sorted(rejected)))
    if policy.least is None:
        return _decide_strict(policy, usable, sorted(set(lost) - set(rejected)), hoped_for, elapsed_s)
    if len(usable) >= policy.least:
        if not hoped_for - set(away):
            return CommitDecision(usable)
        patient_until = min(policy.deadline_s, sorted(arrived.values())[policy.least - 1] + grace(policy, lateness))
        return CommitDecision(usable) if elapsed_s >= patient_until else Wait(patient_until)
    if elapsed_s >= policy.deadline_s or not hoped_for:
        reason = f"{len(usable)} of {policy.least} needed updates after {elapsed_s:.0f} s; missing {_listed(lost)}"
        return GiveUp(reason, tuple(lost))
    return Wait(policy.deadline_s)


def _decide_strict(
    policy: Quorum, usable: tuple[int, ...], lost: Sequence[int], hoped_for: Collection[int], elapsed_s: float
) -> Decision:
    if not lost:
        return CommitDecision(usable) if usable else GiveUp("every update was rejected", ())
    if not hoped_for:
        have = "has" if len(lost) == 1 else "have"
        return GiveUp(f"every member is needed, but {_listed(lost)} {have} left", tuple(lost))
    if elapsed_s >= policy.deadline_s:
        return GiveUp(f"no update within {policy.deadline_s:g} s from {_listed(lost)}", tuple(lost))
    return Wait(policy.deadline_s)


def grace(policy: Quorum, lateness: Sequence[float]) -> float:
    """How long to wait for stragglers once enough updates are there."""
    if policy.spread is None or len(lateness) < 3:
        return policy.grace_s
    middle = statistics.median(lateness)
    deviation = statistics.median(abs(late - middle) for late in lateness)
    return min(policy.grace_s, middle + policy.spread * deviation)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
