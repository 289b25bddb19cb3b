"""What Modal says about single calls: looks, cancels, and the observation that a call has ended."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from atoll._threads import map_in_background
from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, RunNotFound
from atoll.executors.modal.client import ModalClient
from atoll.executors.modal.errors import EXECUTOR

_AT_ONCE = 16
log = logging.getLogger("atoll.executors")


class Phase(StrEnum):
    """How far a call is."""

    PENDING = "pending"
    """It waits or runs; Modal does not say which."""
    RETURNED = "returned"
    FAILED = "failed"
    """The function raised, or its container died."""
    NOT_STARTED = "not_started"
    """The container could not be started."""
    TERMINATED = "terminated"
    TIMED_OUT = "timed_out"
    GONE = "gone"
    """Modal has no such call, or its output has expired."""


_PHASES = {
    "PENDING": Phase.PENDING,
    "SUCCESS": Phase.RETURNED,
    "FAILURE": Phase.FAILED,
    "INIT_FAILURE": Phase.NOT_STARTED,
    "TERMINATED": Phase.TERMINATED,
    "TIMEOUT": Phase.TIMED_OUT,
}


@dataclass(frozen=True)
class Look:
    """One call, as Modal describes it."""

    call_id: str
    phase: Phase
    envelope: Mapping[str, Any] | None = None
    """What the function returned, if it is an envelope of Atoll."""
    message: str = ""

    @property
    def is_over(self) -> bool:
        return self.phase is not Phase.PENDING

    @property
    def is_duplicate(self) -> bool:
        """Whether the call returned because another one has claimed its rank."""
        return self.envelope is not None and self.envelope.get("state") == "duplicate"


class Calls:
    """Requests about calls. It caches calls that are over, which cannot change any more."""

    def __init__(self, client: ModalClient, *, clock: Clock, pause_s: float, stop_s: float) -> None:
        self._client, self._clock, self._pause_s, self._stop_s = client, clock, pause_s, stop_s
        self._over: dict[str, Look] = {}
        self._gone = set[str]()
        """Calls that Modal did not know at two looks."""

    def look_all(self, call_ids: Iterable[str]) -> dict[str, Look]:
        """Look at each call, some at once. A call is gone only if two looks do not find it or its output."""
        ids = list(dict.fromkeys(call_ids))
        looks = dict(zip(ids, map_in_background(self._look_once, ids, most=_AT_ONCE), strict=True))
        gone = {call_id for call_id, look in looks.items() if look.phase is Phase.GONE}
        if again := sorted(gone - self._gone):
            self._clock.sleep(self._pause_s)
            looks |= zip(again, map_in_background(self._look_once, again, most=_AT_ONCE), strict=True)
        self._gone = (self._gone - looks.keys()) | {each for each in gone if looks[each].phase is Phase.GONE}
        return looks

    def look(self, call_id: str) -> Look:
        """The state of one call."""
        return self.look_all([call_id])[call_id]

    def _look_once(self, call_id: str) -> Look:
        """The state of one call, from the call graph and from `get`.

        Neither is enough. `get` cannot tell a call that runs from one that raised `TimeoutError`. The graph may be
        late, and its client shows every end that it has no word for as pending: a container that was out of memory or
        was evicted, and a failure inside Modal. Modal promises no graph, so `get` decides if there is none.
        """
        if call_id in self._over:
            return self._over[call_id]
        phase = self._phase_in_graph(call_id)
        is_certain = phase not in (None, Phase.RETURNED, Phase.PENDING)
        try:
            if phase and is_certain:
                found = Look(call_id, phase, message=self._failure(call_id) if phase in _WITH_FAILURE else "")
            else:
                found = self._output(call_id)
                if found.phase is Phase.FAILED and phase is Phase.PENDING:  # it may have ended in between
                    again = self._phase_in_graph(call_id)
                    found = replace(found, phase=again) if again in _WITHOUT_OUTPUT else found
        except RunNotFound as exc:
            return Look(call_id, Phase.GONE, message=exc.message)
        if found.is_over and found.phase is not Phase.GONE:
            self._over[call_id] = found
        return found

    def _phase_in_graph(self, call_id: str) -> Phase | None:
        """The phase of the call in its graph; None if the graph does not have it, or cannot be read."""

        def send() -> Sequence[Any]:
            try:
                return list(self._client.function_call(call_id).get_call_graph())
            except KeyError:  # a graph that was truncated: its client needs the function call of every input
                return []

        try:
            return _phase_in(self._client.call("status", f"call `{call_id}`", send, tries=1), call_id)
        except BackendError as exc:
            log.info("no call graph: %s", exc.message)
            return None

    def _failure(self, call_id: str) -> str:
        """What the function raised, such as that its image has no Atoll; empty if the output does not say."""
        try:
            return self._output(call_id, tries=1).message
        except BackendError:
            return ""

    def _output(self, call_id: str, *, tries: int | None = None) -> Look:
        """What `get(timeout=0)` says."""

        def send() -> Look:
            try:
                return _returned(call_id, self._client.function_call(call_id).get(timeout=0))
            except TimeoutError as exc:  # the built-in class: without a message, there is no output yet
                is_remote = bool(exc.args) and exc.errno is None
                return Look(call_id, Phase.FAILED if is_remote else Phase.PENDING, message=str(exc))
            except KeyboardInterrupt:  # of this process: a container never returns one
                raise
            except BaseException as exc:  # what the function raised may be no `Exception`
                phase = _ENDS.get(type(exc).__name__)
                if phase is None and _is_of_transport(exc):
                    raise
                if type(exc).__name__ == "RemoteError" and _TERMINATED.search(str(exc)):
                    phase = Phase.TERMINATED
                return Look(call_id, phase or Phase.FAILED, message=str(exc))

        return self._client.call("status", f"output of call `{call_id}`", send, tries=tries)

    def cancel(self, call_id: str) -> None:
        call = self._client.function_call

        def send() -> None:
            call(call_id).cancel(terminate_containers=True)

        log.info("cancel call %s", call_id)
        self._client.call("cancel", f"cancel call `{call_id}`", send)

    def stop_all(self, call_ids: Sequence[str]) -> dict[str, BackendError]:
        """Cancel every call that is not over, and wait for its end. Returns those that may still run, and why."""
        ended = map_in_background(self._stop, list(dict.fromkeys(call_ids)), most=_AT_ONCE)
        return {call_id: problem for call_id, problem in ended if problem is not None}

    def _stop(self, call_id: str) -> tuple[str, BackendError | None]:
        deadline, pauses = Deadline(self._stop_s, self._clock), backoff(0.05, cap_s=self._pause_s)
        try:
            if self.look(call_id).is_over:
                return call_id, None
        except BackendError:
            pass  # the cancel needs no look
        refusal: BackendError | None = None
        try:
            self.cancel(call_id)
        except BackendError as exc:
            refusal = exc
        while True:
            try:
                is_over = self.look(call_id).is_over
            except BackendError as exc:
                return call_id, refusal or exc
            if is_over:
                return call_id, None
            if refusal is not None:
                return call_id, refusal
            if deadline.is_past:
                message = f"it has not ended after {self._stop_s:g} s"
                return call_id, BackendError(message, executor=EXECUTOR, operation="cancel")
            deadline.sleep(next(pauses))


_WITHOUT_OUTPUT = (Phase.NOT_STARTED, Phase.TERMINATED, Phase.TIMED_OUT)
"""Ends that the graph tells apart, and the output does not surely."""
_WITH_FAILURE = (Phase.FAILED, Phase.NOT_STARTED)
_ENDS = {
    "OutputExpiredError": Phase.GONE,
    "FunctionTimeoutError": Phase.TIMED_OUT,
    "InternalFailure": Phase.FAILED,
    "RemoteError": Phase.FAILED,
    "ExecutionError": Phase.FAILED,
}
"""Exceptions of `get` that are about the call, not about the request."""
_TERMINATED = re.compile(r"\bcancel|\bpreempt|\bterminated\b(?!.*(exit code|memory))", re.I)
"""The client has one exception for a call that was terminated and for a container that died."""


def _is_of_transport(exc: BaseException) -> bool:
    """Whether the request failed, and not the function: errors of gRPC, of the connection and of credentials."""
    words = {each.__name__ for each in type(exc).__mro__} | {type(exc).__module__.partition(".")[0]}
    return bool(words & {"GRPCError", "StreamTerminatedError", "ConnectionError", "OSError", "modal", "grpclib"})


def _phase_in(graph: Sequence[Any], call_id: str) -> Phase | None:
    """The phase of the call in its graph; None if the graph does not have it, or has an unknown word."""
    return next((_PHASES.get(node.status.name) for node in _nodes(graph) if node.function_call_id == call_id), None)


def _nodes(graph: Iterable[Any]) -> Iterator[Any]:
    for node in graph:
        yield node
        yield from _nodes(node.children)


def _returned(call_id: str, value: Any) -> Look:
    if isinstance(value, Mapping) and "format" in value and "state" in value:
        return Look(call_id, Phase.RETURNED, value)
    return Look(call_id, Phase.FAILED, message="the function returned something else than an envelope of Atoll")
