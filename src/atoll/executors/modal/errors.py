"""Atoll's error for each exception of the `modal` client. The classes are recognized by name, without an import."""

from __future__ import annotations

from atoll._threads import Unanswered
from atoll.errors import AtollError, AuthError, BackendError, BackendUnavailable, ConfigError, RunNotFound

EXECUTOR, EXTRA = "modal", "modal"
_KINDS: dict[str, type[AtollError]] = {
    "AuthError": AuthError,
    "PermissionDeniedError": AuthError,
    "NotFoundError": RunNotFound,
    "OutputExpiredError": RunNotFound,
    "ResourceExhaustedError": BackendUnavailable,
    "ServiceError": BackendUnavailable,
    "InternalError": BackendUnavailable,
    "ConnectionError": BackendUnavailable,
    "ClientClosed": BackendUnavailable,
    "TimeoutError": BackendUnavailable,
    "StreamTerminatedError": BackendUnavailable,
    "Unanswered": BackendUnavailable,
    "VersionError": ConfigError,
}
"""Class name -> error; the first class of an exception, its own or a base, that is here decides."""
_HINTS = {
    "AuthError": "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or log in with `modal setup`",
    "PermissionDeniedError": "the token may not do this; docs/modal.md says what a token needs",
    "ResourceExhaustedError": "Modal limits the rate of calls, and what a workspace may run; try again later",
}
_SDK = frozenset({"modal", "grpclib", "h2"})
_QUEUE_IS_FULL = "input queue"
"""The client raises a plain `Exception` with these words if Modal takes no more calls of the function."""


def is_of_service(exc: BaseException) -> bool:
    """Whether the service, its client or the network raised it. Any other exception is a bug."""
    modules = {each.__module__.partition(".")[0] for each in type(exc).__mro__}
    return isinstance(exc, OSError | Unanswered) or bool(modules & _SDK) or _is_of_full_queue(exc)


def translated(exc: BaseException, what: str, operation: str) -> AtollError:
    """Atoll's error for an exception of a call. Raise it `from exc`."""
    names = [each.__name__ for each in type(exc).__mro__]
    kind = next((_KINDS[name] for name in names if name in _KINDS), BackendError)
    if isinstance(exc, OSError) or _is_of_full_queue(exc):
        kind = BackendUnavailable
    hint = next((_HINTS[name] for name in names if name in _HINTS), None)
    text = "Modal gave no answer" if isinstance(exc, Unanswered) else (str(exc) or names[0])
    if issubclass(kind, BackendError):
        return kind(f"{what}: {text}", executor=EXECUTOR, operation=operation, hint=hint)
    return kind(f"{what}: {text}", hint=hint)


def is_throttled(error: AtollError) -> bool:
    """Whether Modal rejected the call because of its rate or a full queue, so the call had no effect."""
    cause = error.__cause__
    return type(cause).__name__ == "ResourceExhaustedError" or _is_of_full_queue(cause)


def _is_of_full_queue(exc: BaseException | None) -> bool:
    return type(exc) is Exception and _QUEUE_IS_FULL in str(exc)
