"""Which updates count, decided from what one observer sees. Pure: no clock, no store, no other machine's time.

Times are the observer's own monotonic seconds since it began to wait. Observers may decide differently; the commit
record settles it, because only the first one written counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.errors import InvalidSpec


@dataclass(frozen=True)
class Wait:
    """Look again, at the latest when `until` seconds have passed since the wait began."""

    until: float


@dataclass(frozen=True)
class Commit:
    """Propose these ranks, in order."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """No quorum can be had any more."""

    reason: str
    missing: tuple[int, ...]


Decision: TypeAlias = Wait | Commit | GiveUp


@dataclass(frozen=True)
class Quorum:
    """How many updates a round needs, and how long to wait for more.

    `least=None` is strict: every member. Otherwise a round may go on with `least` updates, once `grace_s` have passed
    since that many were there; or, with `spread` set, once the usual lateness has passed: the median of past arrivals
    plus `spread` times their median absolute deviation, but no longer than `grace_s`.
    """

    least: int | None = None
    grace_s: float = 30.0
    deadline_s: float = 1800.0
    spread: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.least is not None and self.least < 1:
            problems.append(f"least={self.least}: 1 or more, or None for every member")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            problems.append(f"grace_s={self.grace_s}: seconds, 0 or more")
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            problems.append(f"deadline_s={self.deadline_s}: seconds above 0")
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread >= 0):
            problems.append(f"spread={self.spread}: 0 or more, or None")
        if problems:
            raise InvalidSpec("quorum", problems)

    @property
    def is_strict(self) -> bool:
        return self.least is None

    def to_json(self) -> dict[str, Any]:
        return {
            "least": self.least,
            "grace_s": self.grace_s,
            "deadline_s": self.deadline_s,
            "spread": self.spread,
        }


def strict(deadline_s: float = 1800.0) -> Quorum:
    """Every member, or give up at the deadline."""
    return Quorum(None, deadline_s=deadline_s)


def at_least(count: int, *, grace_s: float = 30.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates and a fixed grace for the rest."""
    return Quorum(count, grace_s, deadline_s)


def adaptive(count: int, *, spread: float = 4.0, grace_s: float = 300.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates and a grace learnt from past rounds, capped by `grace_s`."""
    return Quorum(count, grace_s, deadline_s, spread)


def decide(
    policy: Quorum,
    *,
    members: Collection[int],
    arrived: Mapping[int, float],
    elapsed_s: float,
    rejected: Collection[int] = (),
    gone: Collection[int] = (),
    lateness: Sequence[float] = (),
) -> Decision:
    """What to do after `elapsed_s` of waiting.

    `arrived`: rank → when its usable update was first seen. `rejected`: ranks whose update will not be used.
    `gone`: ranks that said they left, or have been away for rounds; nobody waits for them, and strict gives up.
    `lateness`: past arrivals, in seconds after the round's `least`-th one.
    """
    usable = tuple(sorted(arrived))
    awaited = set(members) - set(arrived) - set(rejected) - set(gone)
    lost = sorted(set(members) - set(arrived))
    if policy.least is None:
        if not lost and usable:
            return Commit(usable)
        if not awaited:
            return GiveUp(_because(lost, rejected, gone), tuple(lost))
        if elapsed_s >= policy.deadline_s:
            return GiveUp(f"no update within {policy.deadline_s:g} s from rank {_listed(lost)}", tuple(lost))
        return Wait(policy.deadline_s)
    if len(usable) >= policy.least:
        if not awaited:
            return Commit(usable)
        patient_until = min(policy.deadline_s, sorted(arrived.values())[policy.least - 1] + grace(policy, lateness))
        return Commit(usable) if elapsed_s >= patient_until else Wait(patient_until)
    if elapsed_s >= policy.deadline_s:
        return GiveUp(
            f"{len(usable)} of {policy.least} needed updates within {policy.deadline_s:g} s; "
            f"missing rank {_listed(lost)}",
            tuple(lost),
        )
    return Wait(policy.deadline_s)


def grace(policy: Quorum, lateness: Sequence[float]) -> float:
    """How long to wait for stragglers once enough updates are there."""
    if policy.spread is None or len(lateness) < 3:
        return policy.grace_s
    middle = statistics.median(lateness)
    deviation = statistics.median(abs(late - middle) for late in lateness)
    return min(policy.grace_s, middle + policy.spread * deviation)


def _because(lost: Sequence[int], rejected: Collection[int], gone: Collection[int]) -> str:
    words = []
    if refused := sorted(set(lost) & set(rejected)):
        words.append(f"the update of rank {_listed(refused)} was rejected")
    if left := sorted(set(lost) & set(gone)):
        words.append(f"rank {_listed(left)} has left")
    return "every member is needed, but " + (" and ".join(words) or f"rank {_listed(lost)} is missing")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
