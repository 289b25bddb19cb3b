"""Faults and actions on cue: which calls they meet, and what the service answers instead."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, main_thread
from typing import Any

from atoll.testing.bench import Call, Fault

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


@dataclass
class _Rule:
    operation: Call | str
    nth: int
    times: int | None
    after_effect: bool
    act: Callable[[str], None]
    name: str = ""
    """Only calls about a job whose name has this part."""
    seen: int = 0

    def meets(self, operation: str, request: Mapping[str, Any]) -> bool:
        if self.operation not in (operation, CALLS.get(operation), "*"):
            return False
        if self.name not in str(request.get("TrainingJobName", "")):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class Faults:
    """The `Faults` of the executor contract, for this service. A call is named as there, as by AWS, or `*`."""

    calls: frozenset[Call] = frozenset(Call)

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._lock = Lock()
        self._healed = Event()

    def fail(
        self, call: Call | str, fault: Fault, *, nth: int = 1, times: int | None = None, after_effect: bool = False
    ) -> None:
        def act(operation: str) -> None:
            if fault is Fault.SILENT:
                self._healed.wait(60)
                raise Refusal("InternalFailure", "nobody listens any more", 500)
            raise _refusal(operation, fault)

        self._add(_Rule(call, nth, times, after_effect, act))

    def refuse(
        self, call: Call | str, code: str, message: str, *, nth: int = 1, times: int | None = None, name: str = ""
    ) -> None:
        """Answer with an error of one's own; with `name`, only to calls about such jobs."""

        def act(_: str) -> None:
            raise Refusal(code, message)

        self._add(_Rule(call, nth, times, False, act, name))

    def lose_answer_then_refuse(self, call: Call | str, why: str, *, name: str = "") -> None:
        """The first such call takes effect and its answer is lost; the calls after it are refused. (`REFUSALS`)"""
        self._add(_Rule(call, 1, 1, True, _lost, name))
        self.refuse(call, *REFUSALS[why], nth=2, name=name)

    def interrupt(self, call: Call | str, *, nth: int = 1, after_effect: bool = False, name: str = "") -> None:
        """Ctrl-C for this process at such a call: its main thread gets SIGINT before the answer."""
        thread = main_thread().ident
        assert thread is not None
        self._add(_Rule(call, nth, 1, after_effect, lambda _: signal.pthread_kill(thread, signal.SIGINT), name))

    def on(
        self,
        call: Call | str,
        act: Callable[[], None],
        *,
        nth: int = 1,
        times: int | None = 1,
        after_effect: bool = False,
        name: str = "",
    ) -> None:
        """Do something at such calls."""
        self._add(_Rule(call, nth, times, after_effect, lambda _: act(), name))

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()
            self._healed.set()
            self._healed = Event()

    @contextmanager
    def around(self, operation: str, request: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Let the rules that this call meets act before it, or after its effect."""
        with self._lock:
            met = [rule for rule in self._rules if rule.meets(operation, request or {})]
        for rule in met:
            if not rule.after_effect:
                rule.act(operation)
        yield
        for rule in met:
            if rule.after_effect:
                rule.act(operation)

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)


def _lost(_: str) -> None:
    raise Refusal("InternalFailure", "The answer is lost.", 500)


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
