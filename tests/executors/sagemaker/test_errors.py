"""Every exception of botocore becomes one of ours; not found is told from malformed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from botocore import exceptions, parsers

from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    RunNotFound,
)
from atoll.executors.sagemaker.errors import is_over_already, is_taken, is_throttled, translated


def said(code: str, message: str = "", status: int = 400) -> Exception:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(answer, "DescribeTrainingJob")  # type: ignore[no-any-return]


def ours(exc: Exception) -> BackendError:
    error = translated(exc, "what", "status")
    assert isinstance(error, BackendError)
    error.__cause__ = exc
    return error


@pytest.mark.parametrize(
    ("code", "message", "status", "kind"),
    [
        ("ValidationException", "Requested resource not found.", 400, RunNotFound),
        ("ResourceNotFound", "", 400, RunNotFound),
        ("ResourceNotFoundException", "The specified log group does not exist.", 400, RunNotFound),
        ("SomethingNew", "", 404, RunNotFound),
        ("UnknownOperationException", "", 404, BackendError),
        ("ValidationException", "1 validation error detected: Value 'a.b'", 400, BackendError),
        ("ValidationException", "The training job is in status Stopped.", 400, BackendError),
        ("ResourceInUse", "", 400, BackendError),
        ("ResourceLimitExceeded", "The account-level service limit …", 400, CapacityError),
        ("ThrottlingException", "Rate exceeded", 400, BackendUnavailable),
        ("SomethingNew", "", 429, BackendUnavailable),
        ("SomethingNew", "", 503, BackendUnavailable),
        ("InternalFailure", "", 500, BackendUnavailable),
        ("AccessDeniedException", "", 400, AuthError),
        ("ExpiredTokenException", "The security token included in the request is expired", 400, AuthError),
        ("UnrecognizedClientException", "", 400, AuthError),
        ("InvalidSignatureException", "Signature expired: 1 is now earlier than 2", 403, AuthError),
        ("SomethingNew", "", 403, AuthError),
    ],
)  # fmt: skip
def test_codes_and_messages(code, message, status, kind):
    assert type(ours(said(code, message, status))) is kind


def test_a_wrong_clock_and_old_credentials_say_what_to_do():
    skewed = ours(said("InvalidSignatureException", "Signature expired: now")).hint or ""
    expired = ours(said("ExpiredTokenException", "expired")).hint or ""
    assert skewed
    assert "`aws sso login`" not in skewed
    assert "`aws sso login`" in expired


def test_over_already_is_told_by_code_and_message():
    for state in ("Completed", "Failed", "Stopped", "Stopping"):
        assert is_over_already(ours(said("ValidationException", f"the training job is in status {state}.")))
    assert not is_over_already(ours(said("ValidationException", "the training job is in status InProgress.")))
    assert not is_over_already(ours(said("ValidationException", "1 validation error detected")))
    assert not is_over_already(ours(said("AccessDeniedException", "the training job is in status Stopped.")))


def test_taken_and_throttled():
    assert is_taken(ours(said("ResourceInUse")))
    assert not is_taken(ours(said("ValidationException")))
    assert is_throttled(ours(said("ThrottlingException")))
    assert not is_throttled(ours(said("InternalFailure", status=500)))


def every_kind() -> Iterator[type[Exception]]:
    yield parsers.ResponseParserError
    for value in vars(exceptions).values():
        if isinstance(value, type) and issubclass(value, exceptions.BotoCoreError):
            yield value


@pytest.mark.parametrize("kind", sorted(every_kind(), key=lambda kind: kind.__name__))
def test_no_exception_of_botocore_is_unmapped(kind):
    error = translated(kind.__new__(kind), "what", "status")
    assert isinstance(error, AtollError)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NoCredentialsError", AuthError),
        ("PartialCredentialsError", AuthError),
        ("CredentialRetrievalError", AuthError),
        ("TokenRetrievalError", AuthError),
        ("SSOTokenLoadError", AuthError),
        ("UnauthorizedSSOTokenError", AuthError),
        ("ReadTimeoutError", BackendUnavailable),
        ("ConnectTimeoutError", BackendUnavailable),
        ("EndpointConnectionError", BackendUnavailable),
        ("ConnectionClosedError", BackendUnavailable),
        ("NoRegionError", ConfigError),
        ("ParamValidationError", BackendError),
    ],
)
def test_kinds_without_an_answer(name, kind):
    exc = getattr(exceptions, name)
    assert type(translated(exc.__new__(exc), "what", "status")) is kind
