"""Pure: how a replica's process ended, and what that means."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from atoll.status import ON_REQUEST, Reason, ReplicaState


class Asked(StrEnum):
    """Why we told a process to stop, if we did."""

    NOTHING = ""
    CANCEL = "cancel"
    TIMEOUT = "timeout"
    PREEMPT = "preempt"


@dataclass(frozen=True)
class Fate:
    """The verdict on one attempt."""

    state: ReplicaState
    reason: Reason
    message: str
    exit_code: int | None

    @property
    def may_restart(self) -> bool:
        """As far as this end is concerned; who was asked to stop is not started again, whatever became of it."""
        return self.state is ReplicaState.FAILED


def fate_of(wait_status: int, asked: Asked, outcome: dict[str, Any] | None, *, limit_s: float, oom: bool) -> Fate:
    """What became of a process that ended with `wait_status`, and may have left its own `outcome` record."""
    code = os.waitstatus_to_exitcode(wait_status)
    outcome = outcome if outcome and {"state", "reason", "message"} <= outcome.keys() else None
    said_success = outcome is not None and outcome["state"] == ReplicaState.SUCCEEDED
    if said_success and code == 0:
        return Fate(ReplicaState.SUCCEEDED, Reason.OK, "", 0)
    if asked is Asked.TIMEOUT:
        return Fate(
            ReplicaState.FAILED, Reason.TIMEOUT, f"still running after its limit of {limit_s:g} s", _shell(code)
        )
    if asked is Asked.CANCEL:
        return Fate(ReplicaState.CANCELLED, Reason.CANCELLED, ON_REQUEST, _shell(code))
    if asked is Asked.PREEMPT:
        message = "the machine asked this replica to stop (SIGTERM)"
        return Fate(ReplicaState.FAILED, Reason.PREEMPTED, message, _shell(code))
    if said_success and code > 0:
        message = f"the entry point returned, and then the process exited with code {code}"
        return Fate(ReplicaState.FAILED, Reason.USER_ERROR, message, code)
    if outcome is not None and not said_success:
        return Fate(ReplicaState.FAILED, _reason(outcome), str(outcome["message"]), _shell(code))
    return _silent(code, oom)


def _reason(outcome: dict[str, Any]) -> Reason:
    return Reason(outcome["reason"]) if outcome["reason"] in set(Reason) else Reason.USER_ERROR


def _silent(code: int, oom: bool) -> Fate:
    """A process that ended without a word."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        if oom and -code == signal.SIGKILL:
            return Fate(ReplicaState.FAILED, Reason.OOM, "killed by the kernel: out of memory", _shell(code))
        return Fate(ReplicaState.FAILED, Reason.KILLED, f"killed by {name}", _shell(code))
    message = f"the process exited with code {code} before it could report"
    reason = Reason.NO_OUTCOME if code == 0 else Reason.USER_ERROR
    return Fate(ReplicaState.FAILED, reason, message, code)


def _shell(code: int) -> int:
    """Exit codes as a shell shows them: 137 for SIGKILL."""
    return code if code >= 0 else 128 - code
