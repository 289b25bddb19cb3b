"""A charge: what the shepherd knows about one rank, and when it next has to act on it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.replica.fate import Asked, Fate
from atoll.status import Reason, ReplicaState, ReplicaStatus

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


@dataclass
class Charge:
    """One rank. `pid` is set while its process lives; `fate` from its end until the scribe has stored it."""

    rank: int
    max_restarts: int
    timeout_s: float
    grace_s: float
    attempt: int = 0
    state: ReplicaState = ReplicaState.PENDING
    reason: Reason = Reason.STARTING
    message: str = ""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    pid: int | None = None
    asked: Asked = Asked.NOTHING
    fate: Fate | None = None
    limit_at: float | None = None
    """When the time limit strikes; counts from the first start, restarts included."""
    kill_at: float | None = None
    start_at: float | None = None
    """When a restart is due."""

    @property
    def is_settled(self) -> bool:
        return self.state.is_terminal

    @property
    def wakes_at(self) -> float:
        """The next moment at which something is due, in monotonic time."""
        limit = self.limit_at if self.pid is not None and self.asked is Asked.NOTHING else None
        times = [t for t in (limit, self.kill_at, self.start_at) if t is not None]
        return min(times, default=float("inf"))

    def started(self, pid: int, now: float, wall: float) -> None:
        self.pid, self.start_at = pid, None
        self.limit_at = now + self.timeout_s if self.limit_at is None else self.limit_at
        self.state, self.reason, self.exit_code = ReplicaState.RUNNING, Reason.OK, None  # the message: why it restarted
        self.started_at = wall if self.started_at is None else self.started_at

    def ended(self, fate: Fate, wall: float) -> None:
        """The process is gone; what it was is known, but not stored yet."""
        self.pid, self.kill_at, self.fate, self.ended_at = None, None, fate, wall

    def stored(self, now: float, trouble: str = "") -> None:
        """The scribe has stored the attempt (or says what was in the way): settle, or plan a restart."""
        fate = self.fate
        assert fate is not None
        self.fate = None
        may_restart = fate.may_restart and self.attempt < self.max_restarts and self.asked is Asked.NOTHING
        if may_restart and self.limit_at is not None and now < self.limit_at:
            self.start_at = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.attempt)
            self.attempt += 1
            self.state, self.reason = ReplicaState.PENDING, Reason.RESTARTING
            self.message = f"attempt {self.attempt - 1} ended: {fate.message}"
            return
        self.settle(fate, trouble)

    def settle(self, fate: Fate, trouble: str = "") -> None:
        self.state, self.reason, self.exit_code = fate.state, fate.reason, fate.exit_code
        self.message = f"{fate.message}; {trouble}".strip("; ") if trouble else fate.message
        self.start_at = None

    def status(self, host: str) -> dict[str, Any]:
        return ReplicaStatus(
            rank=self.rank,
            state=self.state,
            reason=self.reason,
            message=self.message,
            exit_code=self.exit_code,
            host=host,
            attempt=self.attempt,
            native_id=None if self.pid is None else str(self.pid),
            started_at=self.started_at,
            ended_at=self.ended_at if self.is_settled else None,
        ).to_json()
