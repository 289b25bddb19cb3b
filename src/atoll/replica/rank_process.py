"""A charge: what the shepherd knows about one rank, and when it next has to act on it. No I/O.

Pure: how a replica's process ended, and what that means.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus


class StopReason(StrEnum):
    """Why we told a process to stop, if we did."""

    NOTHING = ""
    CANCEL = "cancel"
    TIMEOUT = "timeout"
    PREEMPT = "preempt"


@dataclass(frozen=True)
class ExitVerdict:
    """The verdict on one attempt."""

    state: ReplicaState
    reason: Reason
    message: str
    exit_code: int | None

    @property
    def may_restart(self) -> bool:
        """As far as this end is concerned; who was asked to stop is not started again, whatever became of it."""
        return self.state is ReplicaState.FAILED


def fate_of(
    wait_status: int, asked: StopReason, outcome: dict[str, Any] | None, *, limit_s: float, oom: bool
) -> ExitVerdict:
    """What became of a process that ended with `wait_status`, and may have left its own `outcome` record."""
    code = os.waitstatus_to_exitcode(wait_status)
    outcome = outcome if outcome and {"state", "reason", "message"} <= outcome.keys() else None
    said_success = outcome is not None and outcome["state"] == ReplicaState.SUCCEEDED
    if said_success and code == 0:
        return ExitVerdict(ReplicaState.SUCCEEDED, Reason.OK, "", 0)
    if asked is StopReason.TIMEOUT:
        return ExitVerdict(
            ReplicaState.FAILED, Reason.TIMEOUT, f"still running after its limit of {limit_s:g} s", _shell(code)
        )
    if asked is StopReason.CANCEL:
        return ExitVerdict(ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST, _shell(code))
    if asked is StopReason.PREEMPT:
        message = "the machine asked this replica to stop (SIGTERM)"
        return ExitVerdict(ReplicaState.FAILED, Reason.PREEMPTED, message, _shell(code))
    if said_success and code > 0:
        message = f"the entry point returned, and then the process exited with code {code}"
        return ExitVerdict(ReplicaState.FAILED, Reason.USER_ERROR, message, code)
    if outcome is not None and not said_success:
        return ExitVerdict(ReplicaState.FAILED, _reason(outcome), str(outcome["message"]), _shell(code))
    return _silent(code, oom)


def _reason(outcome: dict[str, Any]) -> Reason:
    return Reason(outcome["reason"]) if outcome["reason"] in set(Reason) else Reason.USER_ERROR


def _silent(code: int, oom: bool) -> ExitVerdict:
    """A process that ended without a word."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        if oom and -code == signal.SIGKILL:
            return ExitVerdict(ReplicaState.FAILED, Reason.OOM, "killed by the kernel: out of memory", _shell(code))
        return ExitVerdict(ReplicaState.FAILED, Reason.KILLED, f"killed by {name}", _shell(code))
    message = f"the process exited with code {code} before it could report"
    reason = Reason.NO_OUTCOME if code == 0 else Reason.USER_ERROR
    return ExitVerdict(ReplicaState.FAILED, reason, message, code)


def _shell(code: int) -> int:
    """Exit codes as a shell shows them: 137 for SIGKILL."""
    return code if code >= 0 else 128 - code


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


@dataclass
class RankProcess:
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
    asked: StopReason = StopReason.NOTHING
    fate: ExitVerdict | None = None
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
        limit = self.limit_at if self.pid is not None and self.asked is StopReason.NOTHING else None
        times = [t for t in (limit, self.kill_at, self.start_at) if t is not None]
        return min(times, default=float("inf"))

    def started(self, pid: int, now: float, wall: float) -> None:
        self.pid, self.start_at = pid, None
        self.limit_at = now + self.timeout_s if self.limit_at is None else self.limit_at
        self.state, self.reason, self.exit_code = ReplicaState.RUNNING, Reason.OK, None  # the message: why it restarted
        self.started_at = wall if self.started_at is None else self.started_at

    def ended(self, fate: ExitVerdict, wall: float) -> None:
        """The process is gone; what it was is known, but not stored yet."""
        self.pid, self.kill_at, self.fate, self.ended_at = None, None, fate, wall

    def stored(self, now: float, trouble: str = "") -> None:
        """The scribe has stored the attempt (or says what was in the way): settle, or plan a restart."""
        fate = self.fate
        assert fate is not None
        self.fate = None
        may_restart = fate.may_restart and self.attempt < self.max_restarts and self.asked is StopReason.NOTHING
        if may_restart and self.limit_at is not None and now < self.limit_at:
            self.start_at = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.attempt)
            self.attempt += 1
            self.state, self.reason = ReplicaState.PENDING, Reason.RESTARTING
            self.message = f"attempt {self.attempt - 1} ended: {fate.message}"
            return
        self.settle(fate, trouble)

    def settle(self, fate: ExitVerdict, trouble: str = "") -> None:
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
