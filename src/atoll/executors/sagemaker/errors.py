"""Pure: translates exceptions of botocore, or of a client like it, into Atoll's errors; the original exception stays
the cause. Exceptions are recognized by their `response` and the names of their classes, so botocore is not imported.

"Not found" and "cannot be stopped" are recognized by code *and* message: SageMaker answers both with the same
ValidationException as a malformed request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    RunNotFound,
)

EXECUTOR = "sagemaker"
STALE = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
"""Credentials that have expired; new ones may work."""
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired", "InvalidSignatureException"})
_AUTH = STALE | {
    "AccessDenied",
    "AccessDeniedException",
    "AuthFailure",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "NotAuthorized",
    "OptInRequired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "UnauthorizedException",
    "UnauthorizedOperation",
    "UnrecognizedClientException",
}
_TRANSIENT = frozenset(
    {
        "InternalFailure",
        "InternalServerError",
        "InternalServerException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "SlowDown",
    }
)
_THROTTLED = frozenset(
    {
        "LimitExceededException",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
_QUOTA = frozenset({"ResourceLimitExceeded", "ServiceQuotaExceededException"})
_MISSING = frozenset({"404", "ResourceNotFound", "ResourceNotFoundException", "NoSuchBucket"})
_NO_OPERATION = frozenset({"MalformedQueryString", "UnknownOperationException"})
"""Answers with status 404 that are about the call, not about what it names."""
_NOT_FOUND = re.compile(r"requested resource not found|could not find (requested )?(job|resource)", re.I)
_IN_STATUS = re.compile(r"in status \W?(Completed|Failed|Stopped|Stopping|Deleting)\b")
_NO_CREDENTIALS = ("Credential", "Token", "Auth", "SSO", "LoginError", "ProfileNotFound")
_SDK = frozenset({"boto3", "botocore"})
_NO_ANSWER = ("HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError", "ReadTimeoutError")


def code_of(exc: BaseException | None) -> str:
    """The error code of AWS; empty if AWS did not answer."""
    return str(_error(exc).get("Code", ""))


def is_of_service(exc: Exception) -> bool:
    """Whether the service, the SDK or the network raised it. Any other exception of the SDK's client is a bug."""
    modules = {each.__module__.partition(".")[0] for each in type(exc).__mro__}
    return _response(exc) is not None or isinstance(exc, OSError) or bool(modules & _SDK)


def translated(exc: Exception, what: str, operation: str) -> AtollError:
    """Atoll's error for an exception of a call. Raise it `from exc`."""
    kind, hint = _kind(exc), _hint(exc)
    text = f"{what}: {exc}" if is_of_service(exc) else f"{what}: {type(exc).__name__}: {exc}"
    if issubclass(kind, BackendError):
        reason = "no_credentials" if kind is AuthError and not code_of(exc) else ""
        return kind(text, executor=EXECUTOR, operation=operation, reason=reason, hint=hint)
    return kind(text, hint=hint)


def is_taken(error: AtollError) -> bool:
    """Whether the job name is in use."""
    return code_of(error.__cause__) == "ResourceInUse"


def is_over_already(error: BackendError) -> bool:
    """Whether AWS refused a stop because the job is already over."""
    found = _error(error.__cause__)
    return found.get("Code") == "ValidationException" and bool(_IN_STATUS.search(str(found.get("Message", ""))))


def is_throttled(error: AtollError) -> bool:
    """Whether AWS rejected the call because of its rate, so the call had no effect."""
    return code_of(error.__cause__) in _THROTTLED


def is_stale(exc: Exception) -> bool:
    """Whether new credentials may help."""
    return code_of(exc) in STALE


def _kind(exc: Exception) -> type[AtollError]:
    found, status = _error(exc), _http_status(exc)
    if not found and not status:
        return _kind_without_answer(exc)
    code = str(found.get("Code", ""))
    if code in _QUOTA:
        return CapacityError
    is_missing = code == "ValidationException" and _NOT_FOUND.search(str(found.get("Message", "")))
    if code in _MISSING or (status == 404 and code not in _NO_OPERATION) or is_missing:
        return RunNotFound
    if code in _THROTTLED or code in _TRANSIENT or status == 429 or status >= 500:
        return BackendUnavailable
    if code in _AUTH or status in (401, 403):
        return AuthError
    return BackendError


def _kind_without_answer(exc: Exception) -> type[AtollError]:
    names = [each.__name__ for each in type(exc).__mro__]
    if "NoRegionError" in names or "InvalidRegionError" in names:
        return ConfigError
    if any(name in _NO_ANSWER for name in names) or isinstance(exc, OSError):
        return BackendUnavailable
    if any(word in names[0] for word in _NO_CREDENTIALS):
        return AuthError
    return BackendError


def _hint(exc: Exception) -> str | None:
    code, text = code_of(exc), str(exc)
    if code in _SKEWED and ("expired" in text.lower() or "skew" in text.lower() or "current" in text):
        return "check the clock of this machine; AWS accepts a difference of five minutes"
    if code in STALE:
        return "your credentials have expired: log in again (`aws sso login`, or new keys), then repeat this"
    if code.startswith("AccessDenied"):
        return "docs/sagemaker.md has the policy that a launcher needs"
    if code in _QUOTA:
        return "ask for more in Service Quotas (`… for training job usage`), or choose another instance type"
    if code in _THROTTLED:
        return "AWS limits the rate of calls; try again later"
    if not code and _kind(exc) is AuthError:
        return "no usable AWS credentials here: set AWS_PROFILE, log in, or set keys"
    return None


def _response(exc: BaseException | None) -> Mapping[str, Any] | None:
    """The answer of the service; None if it did not answer."""
    found = getattr(exc, "response", None)
    return found if isinstance(found, Mapping) else None


def _error(exc: BaseException | None) -> Mapping[str, Any]:
    found = (_response(exc) or {}).get("Error")
    return found if isinstance(found, Mapping) else {}


def _http_status(exc: Exception) -> int:
    """The HTTP status of the answer; 0 if it has none."""
    metadata = (_response(exc) or {}).get("ResponseMetadata")
    status = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
    return status if isinstance(status, int) else 0
