"""Which operations the contract's calls are here, and what the service answers instead."""

from __future__ import annotations

import signal
from functools import partial
from threading import main_thread

from atoll.testing.bench import Call, Fault
from services.peer_faults import PeerFaults

CALLS = {
    "CreateTrainingJob": Call.CREATE,
    "DescribeTrainingJob": Call.DESCRIBE,
    "ListTrainingJobs": Call.DESCRIBE,
    "StopTrainingJob": Call.STOP,
    "DescribeLogStreams": Call.LOG,
    "GetLogEvents": Call.LOG,
}
_ANSWERS = {
    Fault.UNAUTHORIZED: ("UnrecognizedClientException", "The security token included in the request is invalid.", 400),
    Fault.FORBIDDEN: ("AccessDeniedException", "User is not authorized to perform this action.", 400),
    Fault.CONFLICT: ("ConflictException", "There was a conflict when processing this request.", 400),
    Fault.THROTTLED: ("ThrottlingException", "Rate exceeded", 400),
    Fault.BROKEN: ("InternalFailure", "The request processing has failed because of an unknown error.", 500),
}
_LIMIT = "The account-level service limit 'ml.m5.xlarge for training job usage' is 2 Instances"
_WHO = "User: arn:aws:sts::123456789012:assumed-role/launcher/me"
REFUSALS = {
    "quota": ("ResourceLimitExceeded", f"{_LIMIT}, with current utilization of 2 Instances and a request delta of 1."),
    "expired": ("ExpiredTokenException", "The security token included in the request is expired"),
    "denied": ("AccessDeniedException", f"{_WHO} is not authorized to perform this action with an explicit deny"),
}
"""Definite refusals in the words of AWS, by a short name."""
_TAKEN = "Training job names must be unique within an AWS account and region, and this one already exists."


class Refusal(Exception):
    """An answer that is not what the caller hoped for."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class Empty(Exception):
    """A list without anything in it: what a list says when the service has forgotten."""


class Faults(PeerFaults):
    """Faults of this service, by the operations of AWS."""

    kinds = CALLS

    def answer(self, operation: str, fault: Fault) -> Exception:
        return _refusal(operation, fault)

    def refuse(
        self, call: Call | str, code: str, message: str, *, nth: int = 1, times: int | None = None, name: str = ""
    ) -> None:
        """Answer with an error of one's own; with `name`, only to calls about such jobs."""
        self.raise_at(call, Refusal(code, message), nth=nth, times=times, name=name)

    def lose_answer_then_refuse(self, call: Call | str, why: str, *, name: str = "") -> None:
        """The first such call takes effect and its answer is lost; the calls after it are refused. (`REFUSALS`)"""
        lost = Refusal("InternalFailure", "The answer is lost.", 500)
        self.raise_at(call, lost, times=1, after_effect=True, name=name)
        self.refuse(call, *REFUSALS[why], nth=2, name=name)

    def interrupt(self, call: Call | str, *, nth: int = 1, after_effect: bool = False, name: str = "") -> None:
        """Ctrl-C for this process at such a call: its main thread gets SIGINT before the answer."""
        thread = main_thread().ident
        assert thread is not None
        send = partial(signal.pthread_kill, thread, signal.SIGINT)
        self.on(call, send, nth=nth, after_effect=after_effect, name=name)


def _refusal(operation: str, fault: Fault) -> Exception:
    if fault is Fault.NOT_FOUND:
        if operation == "ListTrainingJobs":
            return Empty()
        if operation in ("DescribeTrainingJob", "StopTrainingJob"):
            return Refusal("ValidationException", "Requested resource not found.")
        is_log = CALLS[operation] is Call.LOG
        return Refusal("ResourceNotFoundException" if is_log else "ResourceNotFound", "It does not exist.")
    if fault is Fault.CONFLICT and operation == "CreateTrainingJob":
        return Refusal("ResourceInUse", _TAKEN)
    return Refusal(*_ANSWERS[fault])
