"""Pure: what SageMaker says about a job -> what we say about a replica."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atoll.status import Reason, ReplicaState, ReplicaStatus

# Secondary words of a job in progress. They are "subject to change": an unknown one is a job that runs.
_ON_THE_WAY: dict[str, Reason] = {
    "Pending": Reason.WAITING,
    "Starting": Reason.STARTING,
    "LaunchingMLInstances": Reason.STARTING,
    "PreparingTrainingStack": Reason.STARTING,
    "Downloading": Reason.STARTING,
    "DownloadingTrainingImage": Reason.STARTING,
    "Interrupted": Reason.RESTARTING,
    "Restarting": Reason.RESTARTING,
}
# Secondary words of a job that was stopped, where that was nobody's wish.
_NOT_CANCELLED: dict[str, Reason] = {
    "MaxRuntimeExceeded": Reason.TIMEOUT,
    "MaxWaitTimeExceeded": Reason.TIMEOUT,
    "Interrupted": Reason.PREEMPTED,
}
_EXIT_CODE = re.compile(r"exit\s*code\W{0,3}(\d{1,3})\b", re.I)
_OOM = re.compile(r"out\W?of\W?memory|more memory|\bOOM\b", re.I)
_IMAGE = re.compile(r"\b(image|pull|ECR|repository|manifest|registry)\b", re.I)
_QUOTA = re.compile(r"ResourceLimitExceeded|service limit|quota", re.I)
OVER = frozenset({"Completed", "Failed", "Stopped"})


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether nothing of the job runs any more. A job that is being deleted was over before."""
    return job["TrainingJobStatus"] in OVER or job["TrainingJobStatus"] == "Deleting"


def needs_description(job: Mapping[str, Any]) -> bool:
    """Whether a summary does not say enough: why a job failed, or whether it was told to stop."""
    if job["TrainingJobStatus"] == "Failed":
        return "FailureReason" not in job
    return job["TrainingJobStatus"] == "Stopped" and not job.get("SecondaryStatus")


def replica_status(rank: int, job: Mapping[str, Any] | None) -> ReplicaStatus:
    """One rank, from the summary or description of its job; None if SageMaker does not know it."""
    if job is None:
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, "SageMaker has no such job any more")
    state, reason, exit_code = _verdict(job)
    ended = job.get("TrainingEndTime") if state.is_terminal else None
    return ReplicaStatus(
        rank,
        state,
        reason,
        _words(job),
        exit_code,
        native_id=str(job["TrainingJobName"]),
        started_at=_seconds(job.get("TrainingStartTime")),
        ended_at=_seconds(ended),
    )


def _verdict(job: Mapping[str, Any]) -> tuple[ReplicaState, Reason, int | None]:
    status, secondary = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus") or "")
    if status == "Completed":
        return ReplicaState.SUCCEEDED, Reason.OK, 0
    if status == "Failed":
        return ReplicaState.FAILED, *failure(str(job.get("FailureReason") or ""))
    if status == "Stopped":
        reason = next((_NOT_CANCELLED[word] for word in (secondary, *_past(job)) if word in _NOT_CANCELLED), None)
        is_wish = reason is None or (secondary == "Stopped" and reason is Reason.PREEMPTED)
        if is_wish:
            return ReplicaState.CANCELLED, Reason.CANCELLED, None
        return ReplicaState.FAILED, reason or Reason.TIMEOUT, None
    if status == "Deleting":
        return ReplicaState.LOST, Reason.LOST, None
    if status == "InProgress" and secondary in _ON_THE_WAY:
        return ReplicaState.PENDING, _ON_THE_WAY[secondary], None
    return ReplicaState.RUNNING, Reason.OK, None


def failure(words: str) -> tuple[Reason, int | None]:
    """Why a job failed and with which exit code, from the first words of `FailureReason`."""
    found = _EXIT_CODE.search(words)
    code = int(found[1]) if found else None
    kind = words.partition(":")[0].strip()
    if kind == "CapacityError":
        return Reason.CAPACITY, code
    if kind == "InternalServerError":
        return Reason.BACKEND, code
    if _QUOTA.search(kind) or (kind == "ClientError" and _QUOTA.search(words)):
        return Reason.QUOTA, code
    if _OOM.search(words):
        return Reason.OOM, code
    if kind == "ClientError" and _IMAGE.search(words):
        return Reason.IMAGE, code
    return (Reason.KILLED if code is not None and code > 128 else Reason.USER_ERROR), code


def _past(job: Mapping[str, Any]) -> list[str]:
    """Secondary words a described job has had, newest first."""
    return [str(each.get("Status", "")) for each in reversed(job.get("SecondaryStatusTransitions") or [])]


def _words(job: Mapping[str, Any]) -> str:
    """The service's own words, and what it billed where it says so."""
    status, secondary = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus") or "")
    said = status if secondary in ("", status) else f"{status}, {secondary}"
    if reason := job.get("FailureReason"):
        said = f"{said}: {reason}"
    billed = job.get("BillableTimeInSeconds")
    return said if billed is None else f"{said} ({billed} s billed)"


def _seconds(moment: Any) -> float | None:
    return None if moment is None else float(moment.timestamp())
