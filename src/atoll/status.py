"""The states of replicas and runs, with reasons, progress and the JSON form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class ReplicaState(StrEnum):
    """The state of a replica. A terminal state never changes."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The backend has no record of the replica. Never used as a guess for another state."""

    @property
    def is_terminal(self) -> bool:
        """Whether the replica has ended, in any way."""
        return self not in (ReplicaState.PENDING, ReplicaState.RUNNING)


class Reason(StrEnum):
    """Why a replica is in its state; every backend uses the same reasons."""

    OK = "ok"
    WAITING = "waiting"
    STARTING = "starting"
    RESTARTING = "restarting"
    USER_ERROR = "user_error"
    NO_OUTCOME = "no_outcome"
    """The process ended with exit code 0 but wrote no outcome."""
    KILLED = "killed"
    """Ended by a signal that Atoll did not send."""
    TIMEOUT = "timeout"
    OOM = "oom"
    PREEMPTED = "preempted"
    CAPACITY = "capacity"
    QUOTA = "quota"
    IMAGE = "image"
    UNSCHEDULABLE = "unschedulable"
    CONFIG = "config"
    """The backend cannot start the replica as it is configured: a secret is missing, or a policy forbids it."""
    CANCELLED = "cancelled"
    STOPPING = "stopping"
    """The backend is ending the replica, on request or at its time limit."""
    LOST = "lost"
    BACKEND = "backend"
    """The service itself failed."""
    NO_ANSWER = "no_answer"
    """The host or the service of this replica does not answer; the state is what the store shows."""


ON_REQUEST = "cancelled on request"
"""The message of a cancelled replica if no other reason was recorded."""


LOADING, CALLED = "loading", "running"
"""The phases of a running replica: before the call of its entry point, and after it."""


@dataclass(frozen=True)
class Progress:
    """The newest heartbeat of a replica in the store."""

    round_no: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    last_line: str = ""
    beat_at: float | None = None
    rounds_total: int | None = None
    """The number of rounds of the whole run; None if the replica has not reported it."""
    eta_s: float | None = None
    """How long the remaining rounds will take at the pace of the last ones, counted from `beat_at`."""
    phase: str | None = None
    """`loading` until the entry point is called, then `running`; None if the replica does not run."""
    is_line_open: bool = False
    """Whether the replica has not ended `last_line` yet, such as a progress bar that it redraws."""
    problem: str = ""
    """Why the replica's logs or results cannot be written at the moment, such as `disk full: /scratch`."""


@dataclass(frozen=True)
class ReplicaStatus:
    """The state of one rank, with its reason."""

    rank: int
    state: ReplicaState
    reason: Reason = Reason.OK
    message: str = ""
    """The message of the service, or Atoll's if the service has none."""
    exit_code: int | None = None
    host: str | None = None
    attempt: int = 0
    native_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    progress: Progress = Progress()
    warnings: tuple[str, ...] = ()
    """The warnings of the rank's outcome; only a run that has ended has them."""
    backend: str | None = None
    """The backend that has this replica, if the run is on several; None if all replicas are on one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ReplicaStatus:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}  # a later version may have more fields
        known |= {"state": ReplicaState(data["state"]), "reason": Reason(data["reason"])}
        known["warnings"] = tuple(data.get("warnings", ()))
        progress = data.get("progress", {})
        names = (f.name for f in fields(Progress) if f.name in progress)
        known["progress"] = Progress(**{name: progress[name] for name in names})
        return cls(**known)


def with_progress(replica: ReplicaStatus, beat: Progress | None) -> ReplicaStatus:
    """The status with the newest heartbeat; what the backend knows about phase and problem is newer than that."""
    own, found = replica.progress, beat or replica.progress
    problem = "" if replica.state.is_terminal else own.problem or found.problem
    if replica.state is not ReplicaState.RUNNING:
        return replace(replica, progress=replace(found, eta_s=None, phase=None, problem=problem))
    # No heartbeat yet: the process that sends them is about to start, and the entry point is called after that.
    phase = own.phase or (LOADING if beat is None else found.phase)
    return replace(replica, progress=replace(found, phase=phase, problem=problem))


@dataclass(frozen=True)
class RunStatus:
    """Every rank of a run, in order."""

    replicas: tuple[ReplicaStatus, ...]

    def __post_init__(self) -> None:
        ranks = [replica.rank for replica in self.replicas]
        assert ranks == list(range(len(ranks))), f"ranks out of order: {ranks}"

    @classmethod
    def uniform(cls, replicas: int, state: ReplicaState, reason: Reason, message: str = "") -> RunStatus:
        """The same status for every rank."""
        return cls(tuple(ReplicaStatus(rank, state, reason, message) for rank in range(replicas)))

    @classmethod
    def lost(cls, replicas: int, message: str) -> RunStatus:
        """The backend has no record of any rank."""
        return cls.uniform(replicas, ReplicaState.LOST, Reason.LOST, message)

    @property
    def is_terminal(self) -> bool:
        """Whether every rank has ended."""
        return all(replica.state.is_terminal for replica in self.replicas)

    @property
    def state(self) -> ReplicaState:
        """The state of the run: running or pending if any rank is, else the worst end of a rank."""
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
        """The number of ranks in each state; states without ranks are left out."""
        found = [replica.state for replica in self.replicas]
        return {state: found.count(state) for state in ReplicaState if state in found}

    def problems(self) -> dict[str, list[int]]:
        """What cannot be written at the moment, such as `disk full: /scratch`, with the ranks that it concerns."""
        found: dict[str, list[int]] = {}
        for replica in self.replicas:
            if replica.progress.problem and not replica.state.is_terminal:
                found.setdefault(replica.progress.problem, []).append(replica.rank)
        return found

    def failures(self) -> Iterable[ReplicaStatus]:
        """Ranks that ended without success."""
        return (r for r in self.replicas if r.state.is_terminal and r.state is not ReplicaState.SUCCEEDED)

    def with_replicas(self, replicas: Iterable[ReplicaStatus]) -> RunStatus:
        return replace(self, replicas=tuple(replicas))

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "replicas": [replica.to_json() for replica in self.replicas]}
