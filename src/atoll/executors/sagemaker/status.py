"""Pure: the status of a replica from SageMaker's summary or description of its job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from atoll.context import ending_signal
from atoll.executors.sagemaker.request import parsed_name
from atoll.status import Reason, ReplicaState, ReplicaStatus
from atoll.validation import is_number

# Secondary statuses of a job in progress. SageMaker may add others: an unknown one means that the job runs.
_PENDING: dict[str, Reason] = {
    "Pending": Reason.WAITING,
    "Starting": Reason.STARTING,
    "LaunchingMLInstances": Reason.STARTING,
    "PreparingTrainingStack": Reason.STARTING,
    "Downloading": Reason.STARTING,
    "DownloadingTrainingImage": Reason.STARTING,
    "Interrupted": Reason.RESTARTING,
    "Restarting": Reason.RESTARTING,
}
# Secondary statuses of a stopped job that was not cancelled by a user.
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
    """Whether the job does not run any more. A job that is being deleted was over before."""
    return job["TrainingJobStatus"] in OVER or job["TrainingJobStatus"] == "Deleting"


def needs_description(job: Mapping[str, Any]) -> bool:
    """Whether the summary lacks the reason of a failure or of a stop."""
    if job["TrainingJobStatus"] == "Failed":
        return "FailureReason" not in job
    return job["TrainingJobStatus"] == "Stopped" and not job.get("SecondaryStatus")


def replica_status(rank: int, job: Mapping[str, Any] | None) -> ReplicaStatus:
    """The status of one rank. `job` is None if SageMaker has no such job."""
    if job is None:
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, "SageMaker no longer has this job")
    state, reason, exit_code = _verdict(job)
    name = parsed_name(str(job["TrainingJobName"]))
    ended = job.get("TrainingEndTime") if state.is_terminal else None
    return ReplicaStatus(
        rank,
        state,
        reason,
        _message(job),
        exit_code,
        attempt=name.replacement
        if name is not None
        else 0,  # at least: SageMaker does not know restarts in a container
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
        is_cancelled = reason is None or (secondary == "Stopped" and reason is Reason.PREEMPTED)
        if is_cancelled:
            return ReplicaState.CANCELLED, Reason.CANCELLED, None
        return ReplicaState.FAILED, reason or Reason.TIMEOUT, None
    if status == "Deleting":
        return ReplicaState.LOST, Reason.LOST, None
    if status == "Stopping":
        return ReplicaState.RUNNING, Reason.STOPPING, None
    if status == "InProgress" and secondary in _PENDING:
        return ReplicaState.PENDING, _PENDING[secondary], None
    return ReplicaState.RUNNING, Reason.OK, None


def failure(text: str) -> tuple[Reason, int | None]:
    """Why a job failed and with which exit code, from its `FailureReason`."""
    found = _EXIT_CODE.search(text)
    code = int(found[1]) if found else None
    kind = text.partition(":")[0].strip()
    if kind == "CapacityError":
        return Reason.CAPACITY, code
    if kind == "InternalServerError":
        return Reason.BACKEND, code
    if _QUOTA.search(kind) or (kind == "ClientError" and _QUOTA.search(text)):
        return Reason.QUOTA, code
    if _OOM.search(text):
        return Reason.OOM, code
    if kind == "ClientError" and _IMAGE.search(text):
        return Reason.IMAGE, code
    return (Reason.KILLED if ending_signal(code) else Reason.USER_ERROR), code


def _past(job: Mapping[str, Any]) -> list[str]:
    """Earlier secondary statuses of a described job, newest first."""
    return [str(each.get("Status", "")) for each in reversed(job.get("SecondaryStatusTransitions") or [])]


def _message(job: Mapping[str, Any]) -> str:
    """SageMaker's own status and failure reason, and the billed seconds if it reports them."""
    status, secondary = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus") or "")
    text = status if secondary in ("", status) else f"{status}, {secondary}"
    if reason := job.get("FailureReason"):
        text = f"{text}: {reason}"
    billed = job.get("BillableTimeInSeconds")
    return text if billed is None else f"{text} ({billed} s billed)"


def _seconds(moment: Any) -> float | None:
    """A time as botocore returns it, or as a number; None if it is neither."""
    if isinstance(moment, datetime):
        return moment.timestamp()
    return float(moment) if is_number(moment) else None
