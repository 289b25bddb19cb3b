"""What is known about a replica and a run, and which moves between states are possible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class ReplicaState(StrEnum):
    """Where a replica is in its life. A terminal state never changes."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The backend no longer knows. Never a guess at one of the others."""

    @property
    def is_terminal(self) -> bool:
        """Whether it is over, however it ended."""
        return self not in (ReplicaState.PENDING, ReplicaState.RUNNING)


class Reason(StrEnum):
    """Why a replica is in its state, in words shared by every backend."""

    OK = "ok"
    WAITING = "waiting"
    STARTING = "starting"
    RESTARTING = "restarting"
    USER_ERROR = "user_error"
    NO_OUTCOME = "no_outcome"
    """The process ended well but never said what came out of it."""
    KILLED = "killed"
    """Ended by a signal that Atoll did not send."""
    TIMEOUT = "timeout"
    OOM = "oom"
    PREEMPTED = "preempted"
    CAPACITY = "capacity"
    QUOTA = "quota"
    IMAGE = "image"
    UNSCHEDULABLE = "unschedulable"
    CANCELLED = "cancelled"
    LOST = "lost"
    BACKEND = "backend"
    """The service itself failed."""


ON_REQUEST = "cancelled on request"
"""The message of a replica that was told to stop, unless it is known why somebody wanted that."""


@dataclass(frozen=True)
class Progress:
    """What a replica last said about itself: the newest heartbeat in the store."""

    round_no: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    last_line: str = ""
    beat_at: float | None = None


@dataclass(frozen=True)
class ReplicaStatus:
    """One rank: its state, why, and in whose words."""

    rank: int
    state: ReplicaState
    reason: Reason = Reason.OK
    message: str = ""
    """The service's own words, or ours where the service has none."""
    exit_code: int | None = None
    host: str | None = None
    attempt: int = 0
    native_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    progress: Progress = Progress()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ReplicaStatus:
        known = dict(data, state=ReplicaState(data["state"]), reason=Reason(data["reason"]))
        known["progress"] = Progress(**data.get("progress", {}))
        return cls(**known)


@dataclass(frozen=True)
class RunStatus:
    """Every rank of a run, in order."""

    replicas: tuple[ReplicaStatus, ...]

    def __post_init__(self) -> None:
        ranks = [replica.rank for replica in self.replicas]
        assert ranks == list(range(len(ranks))), f"ranks out of order: {ranks}"

    @classmethod
    def uniform(cls, replicas: int, state: ReplicaState, reason: Reason, message: str = "") -> RunStatus:
        """The same answer for every rank."""
        return cls(tuple(ReplicaStatus(rank, state, reason, message) for rank in range(replicas)))

    @classmethod
    def lost(cls, replicas: int, message: str) -> RunStatus:
        """The backend knows nothing of any rank."""
        return cls.uniform(replicas, ReplicaState.LOST, Reason.LOST, message)

    @property
    def is_terminal(self) -> bool:
        """Whether every rank is over."""
        return all(replica.state.is_terminal for replica in self.replicas)

    @property
    def state(self) -> ReplicaState:
        """The run in one word: what is still going wins, then the worst ending."""
        states = {replica.state for replica in self.replicas}
        order = (
            ReplicaState.RUNNING,
            ReplicaState.PENDING,
            ReplicaState.FAILED,
            ReplicaState.LOST,
            ReplicaState.CANCELLED,
            ReplicaState.SUCCEEDED,
        )
        if not self.is_terminal and states - {ReplicaState.PENDING}:
            return ReplicaState.RUNNING
        return next((state for state in order if state in states), ReplicaState.PENDING)

    def counts(self) -> dict[ReplicaState, int]:
        """How many ranks are in each state; states nobody is in are left out."""
        found = [replica.state for replica in self.replicas]
        return {state: found.count(state) for state in ReplicaState if state in found}

    def failures(self) -> Iterable[ReplicaStatus]:
        """Ranks that are over and did not succeed."""
        return (r for r in self.replicas if r.state.is_terminal and r.state is not ReplicaState.SUCCEEDED)

    def with_replicas(self, replicas: Iterable[ReplicaStatus]) -> RunStatus:
        return replace(self, replicas=tuple(replicas))

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "replicas": [replica.to_json() for replica in self.replicas]}
