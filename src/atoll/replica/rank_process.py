"""What the supervisor knows about one rank's process, and the verdict on how the process ended. Pure: no I/O."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from atoll.context import signal_name
from atoll.status import CALLED, LOADING, ON_REQUEST, Progress, Reason, ReplicaState, ReplicaStatus

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


class StopReason(StrEnum):
    """Why the supervisor asked a process to stop."""

    NONE = ""
    CANCEL = "cancel"
    TIMEOUT = "timeout"
    PREEMPT = "preempt"
    REPLACED = "replaced"


@dataclass(frozen=True)
class ExitVerdict:
    """The final state of one attempt."""

    state: ReplicaState
    reason: Reason
    message: str
    exit_code: int | None
    is_final: bool = False
    """A restart would not help: the replica ended because another rank is dead."""


def exit_verdict(
    wait_status: int, stop_reason: StopReason, outcome: dict[str, Any] | None, *, limit_s: float, oom: bool
) -> ExitVerdict:
    """The verdict on a process that ended with `wait_status` and may have written its own `outcome` record."""
    code = os.waitstatus_to_exitcode(wait_status)
    shell_code = code if code >= 0 else 128 - code  # as a shell shows it: 137 for SIGKILL
    outcome = outcome if outcome and {"state", "reason", "message"} <= outcome.keys() else None
    reported_success = outcome is not None and outcome["state"] == ReplicaState.SUCCEEDED
    if reported_success and code == 0:
        return ExitVerdict(ReplicaState.SUCCEEDED, Reason.OK, "", 0)
    if stop_reason is StopReason.CANCEL:
        return ExitVerdict(ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST, shell_code)
    if stop_reason is StopReason.TIMEOUT:
        reason, message = Reason.TIMEOUT, f"still running after its limit of {limit_s:g} s"
    elif stop_reason is StopReason.PREEMPT:
        reason, message = Reason.PREEMPTED, "the machine asked this replica to stop (SIGTERM)"
    elif stop_reason is StopReason.REPLACED:
        reason, message = Reason.PREEMPTED, "a later attempt of this rank runs on another machine"
    elif reported_success and code > 0:
        reason, message = Reason.USER_ERROR, f"the entry point returned, and then the process exited with code {code}"
    elif outcome is not None and not reported_success:
        reason = Reason(outcome["reason"]) if outcome["reason"] in set(Reason) else Reason.USER_ERROR
        message = str(outcome["message"])
    elif code >= 0:
        reason = Reason.NO_OUTCOME if code == 0 else Reason.USER_ERROR
        message = f"the process exited with code {code} before it could report"
    elif oom and -code == signal.SIGKILL:
        reason, message = Reason.OOM, "killed by the kernel: out of memory"
    else:
        reason, message = Reason.KILLED, f"killed by {signal_name(-code)}"
    is_final = stop_reason is StopReason.NONE and outcome is not None and outcome.get("is_final") is True
    return ExitVerdict(ReplicaState.FAILED, reason, message, shell_code, is_final)


@dataclass
class RankProcess:
    """One rank. `pid` is set while its process runs; `verdict` from its end until the uploader has stored it."""

    rank: int
    max_restarts: int
    timeout_s: float
    grace_s: float
    attempt: int = 0
    used_s: float = 0.0
    """How long earlier containers of this rank have run; the time limit counts it."""
    state: ReplicaState = ReplicaState.PENDING
    reason: Reason = Reason.STARTING
    message: str = ""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    pid: int | None = None
    stop_reason: StopReason = StopReason.NONE
    verdict: ExitVerdict | None = None
    limit_at: float | None = None
    """When the time limit ends; counted from the first start, over restarts in this container."""
    kill_at: float | None = None
    start_at: float | None = None
    """When a restart is due."""
    is_loading: bool = False
    """Whether the process has not called the entry point yet."""

    @property
    def is_settled(self) -> bool:
        return self.state.is_terminal

    @property
    def next_action_at(self) -> float:
        """The next moment, in monotonic time, at which the supervisor must act on this rank."""
        limit = self.limit_at if self.pid is not None and self.stop_reason is StopReason.NONE else None
        times = [t for t in (limit, self.kill_at, self.start_at) if t is not None]
        return min(times, default=float("inf"))

    def started(self, pid: int, now: float, wall: float) -> None:
        self.pid, self.start_at, self.is_loading = pid, None, True
        self.limit_at = now + self.timeout_s - self.used_s if self.limit_at is None else self.limit_at
        # The message stays: it says why the rank was restarted.
        self.state, self.reason, self.exit_code = ReplicaState.RUNNING, Reason.OK, None
        self.started_at = wall if self.started_at is None else self.started_at

    def ended(self, verdict: ExitVerdict, wall: float) -> None:
        """The process ended; the uploader has not stored its outcome yet."""
        self.pid, self.kill_at, self.verdict, self.ended_at = None, None, verdict, wall
        self.is_loading = False

    def stored(self, now: float, problem: str = "") -> None:
        """The uploader stored the attempt, or could not because of `problem`: settle, or schedule a restart."""
        verdict, self.verdict = self.verdict, None
        assert verdict is not None
        may_restart = self.stop_reason is StopReason.NONE and not verdict.is_final
        has_time = self.limit_at is not None and now < self.limit_at
        is_failure = verdict.state is ReplicaState.FAILED
        if not (is_failure and may_restart and has_time and self.attempt < self.max_restarts):
            self.settle(verdict, problem)
            return
        self.start_at = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.attempt)
        self.attempt += 1
        self.state, self.reason = ReplicaState.PENDING, Reason.RESTARTING
        self.message = f"attempt {self.attempt - 1} ended: {verdict.message}"

    def settle(self, verdict: ExitVerdict, problem: str = "") -> None:
        self.state, self.reason, self.exit_code = verdict.state, verdict.reason, verdict.exit_code
        self.message = f"{verdict.message}; {problem}".strip("; ") if problem else verdict.message
        self.start_at = None

    def status(self, host: str, problem: str = "") -> dict[str, Any]:
        """The row of the supervisor's table; `problem` is what cannot be written at the moment."""
        phase = (LOADING if self.is_loading else CALLED) if self.state is ReplicaState.RUNNING else None
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
            progress=Progress(phase=phase, problem="" if self.is_settled else problem),
        ).to_json()
