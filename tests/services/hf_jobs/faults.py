"""Which operations the contract's calls are here, and what the service answers instead."""

from __future__ import annotations

from atoll.testing.bench import Call, Fault
from services.peer_faults import PeerFaults

CALLS = {
    "run": Call.CREATE,
    "list": Call.DESCRIBE,
    "inspect": Call.DESCRIBE,
    "cancel": Call.STOP,
    "logs": Call.LOG,
}
_ANSWERS = {
    Fault.UNAUTHORIZED: (401, "Invalid username or password."),
    Fault.FORBIDDEN: (403, "You don't have the required permissions to perform this action."),
    Fault.NOT_FOUND: (404, "Sorry, we can't find the page you are looking for."),
    Fault.CONFLICT: (409, "Conflict"),
    Fault.THROTTLED: (429, "We had to rate limit your IP."),
    Fault.BROKEN: (500, "Internal Error - We're working hard to fix this as soon as possible!"),
}
NO_CREDIT = (402, "Pre-paid credit balance is insufficient - add more credits to your account to use Jobs.")
UNAVAILABLE = (503, "Service Unavailable")


class Refusal(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Empty(Exception):
    """A list without anything in it: the answer of a service that has forgotten its jobs."""


class Faults(PeerFaults):
    """Faults of this service, by its operations."""

    kinds = CALLS

    def answer(self, operation: str, fault: Fault) -> Exception:
        return Empty() if fault is Fault.NOT_FOUND and operation == "list" else Refusal(*_ANSWERS[fault])

    def refuse(
        self,
        call: Call | str,
        status: int,
        message: str,
        *,
        nth: int = 1,
        times: int | None = None,
        after_effect: bool = False,
    ) -> None:
        """Answer with this status and message, before the effect or in place of the answer."""
        self.raise_at(call, Refusal(status, message), nth=nth, times=times, after_effect=after_effect)
