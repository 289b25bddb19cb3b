"""Pure: translates exceptions of `huggingface_hub`, or of a client like it, into Atoll's errors.

An exception is recognized by the status of its `response` and by the names of its classes, so the SDK is not imported.
The original exception stays the cause.
"""

from __future__ import annotations

from typing import Any

from atoll._threads import Unanswered
from atoll.errors import AtollError, AuthError, BackendError, BackendUnavailable, CapacityError, RunNotFound

EXECUTOR = "hf_jobs"
_SDK = frozenset({"huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2"})
_HINTS = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    402: "Jobs need a positive credit balance: add credit to this namespace at huggingface.co/settings/billing",
    403: "the token needs the right to run Jobs in this namespace; docs/hf-jobs.md has the scopes",
    429: "the Hub limits the rate of calls; try again later",
}


def is_of_service(exc: Exception) -> bool:
    """Whether the service, the SDK or the network raised it. Any other exception of the SDK's client is a bug."""
    modules = {each.__module__.partition(".")[0] for each in type(exc).__mro__}
    is_unreadable = type(exc).__name__ in ("JSONDecodeError", "KeyError")  # an answer that is no JSON, or no job
    is_unreadable |= type(exc) is ValueError and "as a datetime" in str(exc)  # or a job with times of another form
    return status_of(exc) != 0 or isinstance(exc, OSError | Unanswered) or is_unreadable or bool(modules & _SDK)


def translated(exc: Exception, what: str, operation: str) -> AtollError:
    """Atoll's error for an exception of a call. Raise it `from exc`."""
    status = status_of(exc)
    if not status and _is_about_token(exc):
        text = f"{what}: no token of Hugging Face here"
        return AuthError(text, executor=EXECUTOR, operation=operation, reason="no_credentials", hint=_HINTS[401])
    kind = _kind(status)
    text = f"{what}: {_words(exc, status)}"
    reason = "credit" if status == 402 else ""
    return kind(text, executor=EXECUTOR, operation=operation, reason=reason, hint=_HINTS.get(status))


def is_throttled(error: AtollError) -> bool:
    """Whether the service rejected the call because of its rate, so the call had no effect."""
    cause = error.__cause__
    return isinstance(cause, Exception) and status_of(cause) == 429


def is_conflict(error: AtollError) -> bool:
    """Whether the service rejected the call because of the state of the job, such as a second stop."""
    cause = error.__cause__
    return isinstance(cause, Exception) and status_of(cause) == 409


def status_of(exc: BaseException) -> int:
    """The HTTP status of the answer; 0 if there was none."""
    status = getattr(getattr(exc, "response", None), "status_code", None)
    return status if isinstance(status, int) else 0


def retry_after_s(exc: BaseException | None) -> float:
    """How long the service asks to wait: `Retry-After: 3`, or `RateLimit: "api";r=0;t=3`. 0 if it does not say."""
    headers: Any = getattr(getattr(exc, "response", None), "headers", None) or {}
    texts = [str(headers.get("retry-after", ""))]
    texts += [
        part.strip().removeprefix("t=") for part in str(headers.get("ratelimit", "")).split(";")[1:] if "t=" in part
    ]
    return next((float(text) for text in texts if text.isdecimal()), 0.0)


def _kind(status: int) -> type[BackendError]:
    if status == 402:
        return CapacityError
    if status in (401, 403):
        return AuthError
    if status in (404, 410):
        return RunNotFound
    is_transient = status in (0, 408, 425, 429) or (status >= 500 and status != 501)
    return BackendUnavailable if is_transient else BackendError


def _is_about_token(exc: Exception) -> bool:
    return any(each.__name__ == "LocalTokenNotFoundError" for each in type(exc).__mro__)


def _words(exc: Exception, status: int) -> str:
    """The service's own words in one line."""
    if isinstance(exc, Unanswered):
        return "no answer in time"
    told = str(getattr(exc, "server_message", "") or "")
    text = " ".join((told or str(exc)).split()) or type(exc).__name__
    return f"{status} {text}" if status and not text.startswith(str(status)) else text
