"""obstore's errors as store errors: one table by HTTP status, one by the service's own error code.

obstore has the status and the body of a response only in the text of its exceptions; only this file parses that text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import BadKey, KeyExists, KeyNotFound, StoreError, StoreRefused, StoreUnavailable
from atoll.registry import install_command

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_BODY = re.compile(r"(?:<\?xml[^>]*>\s*)?<Error\b.*</Error>", re.S)
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_PREFIX = re.compile(r"^Generic \w+ error: (?:Error performing list request: )?")
_RETRIES = re.compile(
    r"Error performing \w+ \S+ in (\S+?)(?:, after (\d+) retries, max_retries: \d+, retry_timeout: \S+)? +- "
)

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AllAccessDisabled"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
_CORRUPTED = {
    "BadDigest", "ClientDisconnected", "IncompleteBody", "Md5Mismatch", "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}  # fmt: skip
"""The service received a corrupted body."""
_TRY_AGAIN = {"RequestTimeout", "RequestTimeTooSkewed", "OperationAborted", "ConditionalRequestConflict"} | _CORRUPTED
_REFUSED = {
    "AccessDenied", "AccountProblem", "AuthenticationFailed", "AuthorizationFailure", "InvalidAccessKeyId",
    "InvalidSecurity", "NoSuchAccount", "SignatureDoesNotMatch",
}  # fmt: skip
_CREDENTIAL_SOURCES = ("/latest/api/token", "/latest/meta-data/iam/", "AssumeRoleWithWebIdentity", "/computeMetadata/")


@dataclass(frozen=True)
class Answer:
    """The known facts about a failed request."""

    kind: str
    text: str
    status: int | None
    code: str | None
    is_untrusted: bool = False

    @property
    def is_about_credentials(self) -> bool:
        """Whether the request for credentials failed; a 404 of that request says nothing about the key."""
        return any(source in self.text for source in _CREDENTIAL_SOURCES)

    @property
    def words(self) -> str:
        """The text without the parts that the message repeats, and without the settings of the client."""
        text, retries = _BODY.sub(_xml_words, self.text), _RETRIES.search(self.text)
        if retries is None or self.is_about_credentials:  # the URL is nowhere else in the message
            return text
        why = _PREFIX.sub("", text.replace(retries[0], ""))
        return why if retries[2] in (None, "0") else f"{why} (after {retries[2]} retries in {_short(retries[1])})"

    @property
    def is_missing(self) -> bool:
        if self.code in _NO_BUCKET or self.is_about_credentials:
            return False
        return self.kind == "FileNotFoundError" or self.status == 404

    @property
    def is_existing(self) -> bool:
        """The key exists, another request for it is in progress (409), or our earlier attempt succeeded (412)."""
        return self.kind in ("AlreadyExistsError", "PreconditionError")

    @property
    def is_past_the_end(self) -> bool:
        return self.status == 416 or "Wanted range starting at" in self.text

    @property
    def is_expired(self) -> bool:
        """Whether new credentials may help."""
        return self.code in _EXPIRED or self.kind == "UnauthenticatedError" or self.status == 401

    @property
    def is_transient(self) -> bool:
        """Whether a retry may help that obstore does not make."""
        return self.code in _TRY_AGAIN or self.status == 409


def answer_of(exc: Exception) -> Answer:
    """The facts in an exception of obstore."""
    text = str(exc).partition("\n\nDebug source")[0].strip()
    status, code = _STATUS.search(text), _CODE.search(text)
    is_untrusted = "InvalidCertificate" in str(exc)
    return Answer(type(exc).__name__, text, int(status[1]) if status else None, code[1] if code else None, is_untrusted)


def translated(answer: Answer, verb: str, uri: str, key: str) -> StoreError:
    """The store error with the request, the reason and a hint. (S11)"""
    message = f"cannot {verb} `{key}` in {uri}: {answer.words}"
    if answer.code in _NO_BUCKET:
        hint = "create the bucket first, or check its name and region"
        return StoreError(message, uri=uri, key=key, reason="bucket", hint=hint)
    if answer.is_missing:
        return KeyNotFound(key, uri=uri)
    if answer.is_existing and verb == "create":
        return KeyExists(key, uri=uri)
    if answer.is_untrusted:
        return StoreRefused(message, uri=uri, key=key, hint="its TLS certificate is not trusted; set ca_file")
    if answer.is_about_credentials:
        return StoreRefused(message, uri=uri, key=key, hint=_no_credentials())
    if answer.code in _TRY_AGAIN or answer.is_existing:
        return StoreUnavailable(message, uri=uri, key=key)
    if answer.code in _REFUSED | _EXPIRED or answer.kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreRefused(message, uri=uri, key=key, hint=_refusal_hint(answer, verb))
    return _by_status(answer, message, uri, key)


def unusable(answer: Answer, uri: str) -> StoreError:
    """The error for settings with which no client can be made, such as an access key without its secret."""
    hint = "check the credentials in the environment; `docs/stores.md` says where they are searched for"
    return StoreRefused(f"cannot open {uri}: {answer.words}", uri=uri, reason="credentials", hint=hint)


def _xml_words(body: re.Match[str]) -> str:
    """The code and the message of an XML body."""
    return ": ".join(found[1] for found in (_CODE.search(body[0]), _MESSAGE.search(body[0])) if found) or body[0]


def _by_status(answer: Answer, message: str, uri: str, key: str) -> StoreError:
    if answer.status in (401, 403):
        return StoreRefused(message, uri=uri, key=key)
    if "LOCATION" in answer.text or answer.status in (301, 307):
        return StoreError(message, uri=uri, key=key, hint="the bucket is in another region: add ?region=… to the URI")
    if answer.status in (408, 429, 500, 502, 503, 504):
        return StoreUnavailable(message, uri=uri, key=key)
    if answer.kind == "InvalidPathError" or (answer.kind == "ValueError" and "parse path" in answer.text):
        return BadKey(key, answer.text)
    if answer.status is None and answer.kind in ("GenericError", "JoinError"):
        return StoreUnavailable(message, uri=uri, key=key)
    return StoreError(message, uri=uri, key=key)


def _short(length: str) -> str:
    """`1.778378907s` as `1.8s`, `235.137201ms` as `235ms`."""
    found = re.fullmatch(r"([\d.]+)(m?s)", length)
    return length if found is None else f"{float(found[1]):.{1 if found[2] == 's' else 0}f}{found[2]}"


def _no_credentials() -> str:
    needs = f"(?profile=…, needs {install_command('aws')})"
    return (
        f"no credentials were found: set them in the environment, choose a profile {needs}, "
        "or add ?anonymous=true for a public bucket"
    )


def _refusal_hint(answer: Answer, verb: str) -> str:
    if verb == "get" and answer.code in (None, "AccessDenied"):
        return "without permission to list the bucket, S3 answers 403 for a missing key too: allow s3:ListBucket"
    return "check the credentials and their permissions for this bucket"
