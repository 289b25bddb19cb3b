"""What came out of a run: one outcome per rank, and the verdict on all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from atoll.errors import RunFailed
from atoll.failures import completion_text, failure_hint, failure_text
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus, RunStatus

_LAST_LINE_CHARS = 2000
"""A progress bar can make a single line of a whole log."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a replica, as text."""

    type: str
    message: str
    traceback: str = ""
    ranks: tuple[int, ...] = ()
    """Whom it blames: those whose update failed a check, or did not come."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ErrorReport:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known | {"ranks": tuple(data.get("ranks", ()))})


@dataclass(frozen=True)
class ReplicaOutcome:
    """How one rank ended, in its own words if it could still speak."""

    rank: int
    attempt: int
    state: ReplicaState
    reason: Reason
    message: str = ""
    exit_code: int | None = None
    error: ErrorReport | None = None
    result: Any = None
    round_no: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    started_at: float | None = None
    ended_at: float | None = None
    host: str | None = None
    last_lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaOutcome:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}  # a later version may say more
        known |= {"state": ReplicaState(data["state"]), "reason": Reason(data["reason"])}
        known["error"] = ErrorReport.from_json(data["error"]) if data.get("error") else None
        known["last_lines"] = tuple(data.get("last_lines", ()))
        return cls(**known)


@dataclass(frozen=True)
class RunResult:
    """Every rank's outcome, in order."""

    run_id: str
    outcomes: tuple[ReplicaOutcome, ...]
    could_restart: bool = False
    """Nobody asked for restarts, and the backend has them."""
    rounds: int = 0
    """How many rounds replicas agreed on; only looked up where some did not succeed."""

    @property
    def ok(self) -> bool:
        """Whether every rank succeeded."""
        return all(outcome.state is ReplicaState.SUCCEEDED for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        """What each rank returned, in rank order."""
        return [outcome.result for outcome in self.outcomes]

    def failures(self) -> list[ReplicaOutcome]:
        """Outcomes of the ranks that did not succeed."""
        return [outcome for outcome in self.outcomes if outcome.state is not ReplicaState.SUCCEEDED]

    def raise_for_failures(self) -> RunResult:
        """Return self, or raise `RunFailed` naming ranks, reasons, last lines and the command that shows more."""
        failed = self.failures()
        if failed:
            text = failure_text(self.run_id, self.outcomes, rounds=self.rounds)
            raise RunFailed(text, result=self, hint=failure_hint(self.run_id, failed, could_restart=self.could_restart))
        return self

    def to_json(self) -> dict[str, Any]:
        outcomes = [outcome.to_json() for outcome in self.outcomes]
        is_complete = self.ok or bool(completion_text(self.outcomes, self.rounds))
        return {"run_id": self.run_id, "ok": self.ok, "is_complete": is_complete, "outcomes": outcomes}


def join(
    status: RunStatus,
    outcomes: Mapping[int, ReplicaOutcome],
    *,
    cancelled: str | None = None,
    over: Collection[int] = (),
) -> RunStatus:
    """Two witnesses, one answer: the backend's status, corrected by what replicas wrote in the store.

    The store knows better only where the backend forgot (LOST), and where a process that ended well left no outcome.
    `cancelled` is why the store has a request to stop: a replica told to leave then was cancelled, not preempted.
    Not so the ranks that were `over` before: what became of them may be why.
    """
    return status.with_replicas(
        _join_one(r, outcomes.get(r.rank), None if r.rank in over else cancelled) for r in status.replicas
    )


def _join_one(replica: ReplicaStatus, outcome: ReplicaOutcome | None, cancelled: str | None) -> ReplicaStatus:
    if replica.state is ReplicaState.CANCELLED and cancelled not in (None, ON_REQUEST):
        return replace(replica, message=cancelled or "")  # the backend knows that, and not why
    if replica.state is ReplicaState.SUCCEEDED and outcome is None:
        message = "the process ended well but left no outcome record in the store"
        why = f"{message}: {replica.message}" if replica.message else message
        return replace(replica, state=ReplicaState.FAILED, reason=Reason.NO_OUTCOME, message=why)
    if outcome is None or outcome.attempt < replica.attempt:
        return replica
    if replica.state is ReplicaState.LOST:
        if cancelled and outcome.reason is Reason.PREEMPTED:
            return replace(replica, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED, message=cancelled)
        return replace(
            replica,
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            exit_code=outcome.exit_code,
            attempt=outcome.attempt,
        )
    return replica


def outcome_of(status: ReplicaStatus, outcome: ReplicaOutcome | None) -> ReplicaOutcome:
    """The outcome to show for a rank: its own record, under the joined verdict on its state."""
    if outcome is None or outcome.attempt < status.attempt:
        return ReplicaOutcome(
            status.rank,
            status.attempt,
            status.state,
            status.reason,
            status.message,
            status.exit_code,
            started_at=status.started_at,
            ended_at=status.ended_at,
            host=status.host,
        )
    exit_code = outcome.exit_code if status.exit_code is None else status.exit_code
    # A replica that is asked to stop does not know why; only who asked knows that its time was up, or who had failed.
    if status.state is outcome.state and status.reason not in (Reason.TIMEOUT, Reason.CANCELLED):
        return replace(outcome, exit_code=exit_code)
    message = status.message or outcome.message
    return replace(outcome, state=status.state, reason=status.reason, message=message, exit_code=exit_code)


def last_lines(lines: Callable[[], Iterable[str]], count: int = 5) -> tuple[str, ...]:
    """The last lines of a log that may not be there any more."""
    from atoll.errors import AtollError

    try:
        return tuple(line[-_LAST_LINE_CHARS:] for line in lines())[-count:]
    except AtollError as exc:
        return (f"[no log: {exc.message}]",)
