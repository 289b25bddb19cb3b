"""When a round has enough updates, decided from what one replica has seen. Pure: no clock and no store.

Times are the replica's own monotonic seconds since it began to wait. Replicas may decide differently: the first commit
record that is created counts for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from atoll.errors import InvalidSpec
from atoll.spec import ON_DEAD
from atoll.validation import SECONDS, SECONDS_ABOVE_0, Kind, check_fields, is_count, is_number, one_of


@dataclass(frozen=True)
class Wait:
    """Look again, at the latest when `until` seconds have passed since the wait began."""

    until: float


@dataclass(frozen=True)
class CommitDecision:
    """Create a commit of these ranks, in order."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """The round cannot reach its quorum."""

    reason: str
    missing: tuple[int, ...]
    dead: tuple[int, ...] = ()
    """The missing ranks that are dead, if the round gave up because of them."""
    is_diverged: bool = False
    """Every update was rejected because training diverged."""


Decision: TypeAlias = Wait | CommitDecision | GiveUp


_GRACE_S = 30.0
_DIVERGED = {"finite", "norm"}
"""If all updates of a round fail these checks, then training has diverged."""
_KINDS = {
    "least": Kind("a whole number from 1, or None for every member", is_count, may_be_none=True),
    "grace_s": SECONDS,
    "deadline_s": SECONDS_ABOVE_0,
    "spread": Kind("a number, 0 or more, or None", lambda value: is_number(value) and value >= 0, may_be_none=True),
    "on_rejected": Kind("`continue` or `stop`", one_of("continue", "stop")),
    "on_dead": Kind("`fail`, `wait`, or None for the setting of the run", one_of(*ON_DEAD), may_be_none=True),
    "on_dead_after_s": Kind("seconds, 0 or more, or None for the setting of the run", SECONDS.fits, may_be_none=True),
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
    """`continue` goes on without an update that failed a check; `stop` ends the run with an error that names it."""
    on_dead: str | None = None
    """`fail` gives up when a round needs a rank that has been dead for `on_dead_after_s`; `wait` waits for it until
    `deadline_s`. None: what the run was launched with (`--on-dead`, `--on-dead-after`)."""
    on_dead_after_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        if self.deadline_s < self.grace_s != _GRACE_S:  # the default grace is cut by the deadline
            rule = f"at most deadline_s={self.deadline_s:g}, which ends every wait"
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
            "on_dead": self.on_dead,
            "on_dead_after_s": self.on_dead_after_s,
        }


def strict(deadline_s: float = 1800.0) -> Quorum:
    """Every member, or give up at the deadline."""
    return Quorum(None, deadline_s=deadline_s)


def at_least(count: int, *, grace_s: float = 30.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates, and a fixed grace for the rest."""
    return Quorum(count, min(grace_s, deadline_s), deadline_s)


def adaptive(count: int, *, spread: float = 4.0, grace_s: float = 300.0, deadline_s: float = 1800.0) -> Quorum:
    """`count` updates, and a grace learnt from past rounds, at most `grace_s`."""
    return Quorum(count, min(grace_s, deadline_s), deadline_s, spread)


def decide(
    policy: Quorum,
    *,
    members: Collection[int],
    arrived: Mapping[int, float],
    elapsed_s: float,
    rejected: Collection[int] = (),
    failed_checks: Collection[str] = (),
    left: Collection[int] = (),
    dead: Mapping[int, float] = MappingProxyType({}),
    absent: Collection[int] = (),
    lateness: Sequence[float] = (),
) -> Decision:
    """What to do after `elapsed_s` of waiting.

    `arrived`: rank → when its usable update was first seen. `rejected`: ranks whose update will not be used.
    `failed_checks`: the checks that their updates failed. `left`: ranks that have left the run.
    `dead`: rank → until when the round waits for this dead rank, if it needs the rank.
    `absent`: ranks missing for rounds, which get no grace.
    `lateness`: past arrivals, in seconds after the round's `least`-th one.
    """
    usable = tuple(sorted(arrived))
    missing = sorted(set(members) - set(arrived))
    awaited = set(missing) - set(rejected) - set(left)
    if not usable and not awaited and failed_checks and set(failed_checks) <= _DIVERGED:
        return GiveUp("every update was rejected", (), is_diverged=True)
    if rejected and policy.on_rejected == "stop":
        return GiveUp(f"the update of {_listed(sorted(rejected))} was rejected", tuple(sorted(rejected)))
    if policy.least is None:
        return _decide_strict(policy, usable, sorted(set(missing) - set(rejected)), awaited, dead, elapsed_s)
    if len(usable) >= policy.least:
        if not awaited - set(absent):
            return CommitDecision(usable)
        grace_ends = min(policy.deadline_s, sorted(arrived.values())[policy.least - 1] + grace(policy, lateness))
        return CommitDecision(usable) if elapsed_s >= grace_ends else Wait(grace_ends)
    if elapsed_s >= policy.deadline_s or not awaited:
        reason = f"{len(usable)} of {policy.least} needed updates after {elapsed_s:.0f} s; missing {_listed(missing)}"
        return GiveUp(reason, tuple(missing))
    spare = len(usable) + len(awaited) - policy.least
    return _wait_for(policy, missing, awaited, dead, spare, elapsed_s)


def _decide_strict(
    policy: Quorum,
    usable: tuple[int, ...],
    missing: Sequence[int],
    awaited: Collection[int],
    dead: Mapping[int, float],
    elapsed_s: float,
) -> Decision:
    if not missing:
        return CommitDecision(usable) if usable else GiveUp("every update was rejected", ())
    if not awaited:
        have = "has" if len(missing) == 1 else "have"
        return GiveUp(f"every member is needed, but {_listed(missing)} {have} left", tuple(missing))
    if elapsed_s >= policy.deadline_s:
        return GiveUp(f"no update within {policy.deadline_s:g} s from {_listed(missing)}", tuple(missing))
    return _wait_for(policy, missing, awaited, dead, 0, elapsed_s)


def _wait_for(
    policy: Quorum,
    missing: Sequence[int],
    awaited: Collection[int],
    dead: Mapping[int, float],
    spare: int,
    elapsed_s: float,
) -> Decision:
    """Wait until the deadline, or until so many of the awaited ranks are dead that the others are too few.

    `spare` is the number of awaited ranks that the round does not need.
    """
    found = {rank: until for rank, until in dead.items() if rank in awaited}
    until = min(policy.deadline_s, sorted(found.values())[spare]) if 0 <= spare < len(found) else policy.deadline_s
    if elapsed_s < until:
        return Wait(until)
    gone = tuple(sorted(rank for rank, at in found.items() if at <= elapsed_s))
    return GiveUp(f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} dead", tuple(missing), dead=gone)


def grace(policy: Quorum, lateness: Sequence[float]) -> float:
    """How long to wait for more updates once `least` are there."""
    if policy.spread is None or len(lateness) < 3:
        return policy.grace_s
    middle = statistics.median(lateness)
    deviation = statistics.median(abs(late - middle) for late in lateness)
    return min(policy.grace_s, middle + policy.spread * deviation)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
