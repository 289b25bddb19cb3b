"""Pure: a job as this package sees it, and the status of a replica from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from atoll.context import CLAIMED, GRACE, TIMED_OUT, TIMEOUT, TOO_OLD, ending_signal
from atoll.executors.hf_jobs.request import RANK, TOKEN, job_limit_s
from atoll.status import Reason, ReplicaState, ReplicaStatus

OVER = frozenset({"COMPLETED", "CANCELED", "CANCELLED", "ERROR", "DELETED"})
_ORDER = ("COMPLETED", "RUNNING", "SCHEDULING", "CANCELED", "CANCELLED", "ERROR", "DELETED")
_EXIT_CODE = re.compile(r"exit\s*(?:code|status)\D{0,3}(\d{1,3})\b", re.I)
_TIMEOUT = re.compile(r"time\W?out|timed out|deadline", re.I)
_OOM = re.compile(r"out\W?of\W?memory|\bOOM|memory limit", re.I)
_IMAGE = re.compile(r"\b(image|pull|manifest|registry)\b", re.I)
_CAPACITY = re.compile(r"capacity|no available|unschedulable", re.I)
_PREEMPTED = re.compile(r"preempt|evict|\bspot\b", re.I)
_QUOTA = re.compile(r"quota|credit|billing", re.I)


@dataclass(frozen=True)
class Job:
    """The parts of a `JobInfo` that are used here."""

    id: str
    stage: str
    message: str = ""
    rank: int = -1
    token: str = ""
    labels: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None
    flavor: str = ""
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    running_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.stage in OVER

    def has_label(self, name: str, value: str) -> bool:
        return (self.labels or {}).get(name) == value

    @property
    def grace_s(self) -> float:
        """How long its replica may take to end after a stop."""
        try:
            return float((self.environment or {})[GRACE])
        except (KeyError, ValueError):
            return 10.0

    @property
    def is_past_limit(self) -> bool:
        """Whether the job ran for longer than its replica may."""
        limits = self._limits_s
        return limits is not None and self.running_s is not None and self.running_s >= limits[0]

    @property
    def is_at_service_limit(self) -> bool:
        """Whether the job ran until the service ends it. The service may round times to seconds."""
        limits = self._limits_s
        return limits is not None and self.running_s is not None and self.running_s >= limits[1] - 1

    @property
    def _limits_s(self) -> tuple[float, float] | None:
        """The time limits of the supervisor and of the service."""
        given = self.environment or {}
        try:
            timeout_s, grace_s = float(given[TIMEOUT]), float(given[GRACE])
        except (KeyError, ValueError):
            return None
        return timeout_s, job_limit_s(timeout_s, grace_s)


def job_of(info: Any) -> Job:
    """A `JobInfo`, or an object with such attributes."""
    labels, status = dict(getattr(info, "labels", None) or {}), info.status
    rank = str(labels.get(RANK, ""))
    stage = getattr(status, "stage", None)
    durations = getattr(info, "durations", None)
    started, finished = (_seconds(getattr(info, name, None)) for name in ("started_at", "finished_at"))
    told = getattr(durations, "running_secs", None)
    return Job(
        str(info.id),
        str(getattr(stage, "value", stage) or ""),
        str(getattr(status, "message", None) or ""),
        int(rank) if rank.isdecimal() else -1,
        str(labels.get(TOKEN, "")),
        labels,
        dict(getattr(info, "environment", None) or {}),
        str(getattr(info, "flavor", None) or ""),
        _seconds(getattr(info, "created_at", None)) or 0.0,
        started,
        finished,
        finished - started if started is not None and finished is not None else told,
    )


def chosen(jobs: Iterable[Job]) -> Job | None:
    """The job of a rank. A create that was repeated may have made a second one, which ends without running the rank.

    Such a job ends with an error, so a job that completed is the one that ran; then one that runs, waits, was
    cancelled, or failed with another exit code.
    """
    order = {stage: place for place, stage in enumerate(_ORDER)}
    return min(
        jobs,
        key=lambda job: (order.get(job.stage, 1), exit_code(job.message) == CLAIMED, job.created_at, job.id),
        default=None,
    )


def replica_status(rank: int, job: Job | None) -> ReplicaStatus:
    """The status of one rank. `job` is None if the service has no such job."""
    if job is None:
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, "Hugging Face no longer has this job")
    state, reason, code = _verdict(job)
    return ReplicaStatus(
        rank,
        state,
        reason,
        f"{job.stage}: {job.message}" if job.message else job.stage,
        code,
        native_id=job.id,
        started_at=job.started_at,
        ended_at=job.finished_at if state.is_terminal else None,
    )


def _verdict(job: Job) -> tuple[ReplicaState, Reason, int | None]:
    if job.stage == "COMPLETED":
        return ReplicaState.SUCCEEDED, Reason.OK, 0
    if job.stage == "ERROR":
        return ReplicaState.FAILED, *_failure(job)
    if job.stage in ("CANCELED", "CANCELLED"):
        if job.is_at_service_limit or _TIMEOUT.search(job.message):
            return ReplicaState.FAILED, Reason.TIMEOUT, None
        return ReplicaState.CANCELLED, Reason.CANCELLED, None
    if job.stage == "DELETED":
        return ReplicaState.LOST, Reason.LOST, None
    if job.stage == "SCHEDULING":
        return ReplicaState.PENDING, Reason.CAPACITY if _CAPACITY.search(job.message) else Reason.WAITING, None
    return ReplicaState.RUNNING, Reason.OK, None


def _failure(job: Job) -> tuple[Reason, int | None]:
    """Why a job failed, from its message and its running time: the service has no field for an exit code."""
    text, code = job.message, exit_code(job.message)
    is_late = job.is_at_service_limit or (code is None and job.is_past_limit)
    if code == TIMED_OUT or is_late or (code is None and _TIMEOUT.search(text)):
        return Reason.TIMEOUT, code
    if _OOM.search(text):
        return Reason.OOM, code
    if code == TOO_OLD:
        return Reason.IMAGE, code
    if code is not None:
        return Reason.KILLED if ending_signal(code) else Reason.USER_ERROR, code
    known = (
        (_PREEMPTED, Reason.PREEMPTED),
        (_QUOTA, Reason.QUOTA),
        (_CAPACITY, Reason.CAPACITY),
        (_IMAGE, Reason.IMAGE),
    )
    return next((reason for pattern, reason in known if pattern.search(text)), Reason.USER_ERROR), None


def exit_code(message: str) -> int | None:
    """The exit code in a message of the service; None if it names none."""
    found = _EXIT_CODE.search(message)
    return int(found[1]) if found else None


def _seconds(moment: Any) -> float | None:
    return moment.timestamp() if isinstance(moment, datetime) else None
