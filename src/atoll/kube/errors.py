"""Pure: Atoll's error for an answer of the Kubernetes API server, or for no answer.

An answer is recognized by its HTTP status and by the `reason` of its Status object. An exception is recognized by its
module and base classes, so that neither urllib3 nor the client of Kubernetes is imported here.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
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

QUOTA = re.compile(r"(exceeded|failed|insufficient|unknown for) quota", re.I)
"""The words of Kubernetes for a quota; the name of a run or of a namespace may have `quota` in it, too."""
_MOST_CAUSES = 20
_ANONYMOUS = 'User "system:anonymous"'
"""The API server got no credentials, and lets strangers ask for its version."""
_LOGIN = "log in to the cluster again, or choose another context with the setting `context`"
_ROLE = (
    "`atoll doctor {backend}` with the same settings lists what is missing, and with --permissions the Role to ask for"
)

_TLS = "check the certificate of the cluster in the kubeconfig, and whether a proxy replaces it"
_PROXY = "check the variables HTTPS_PROXY and NO_PROXY, and `proxy-url` in the kubeconfig"
_ADDRESS = "check that the cluster is up and that its address in the kubeconfig is right (`kubectl cluster-info`)"
_WEBHOOK = re.compile(r'failed calling webhook "(?P<name>[^"]+)"')
"""The API server asks a controller about each object of some kinds, and refuses them all while it has no answer."""
_DENIED = re.compile(r'admission webhook "[^"]+" denied the request|namespace \S+ because it is being terminated')
_CONTROLLERS = {".kb.io": "the controller of Kueue, or another one", ".codeflare.dev": "the controller of AppWrappers"}
"""By the end of the name of a webhook."""
_HANDSHAKE = re.compile("CERT|UNKNOWN_CA|WRONG_VERSION|UNSUPPORTED_PROTOCOL|HANDSHAKE|HTTP_REQUEST")
"""Reasons of OpenSSL for which no request was sent, or none was read: trying again does not help."""


class Refusal(Exception):
    """An answer of the API server with a status of 400 or more."""

    def __init__(self, status: int, body: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.retry_after_s = status, body, retry_after_s

    @classmethod
    def of(cls, status: int, data: bytes, headers: Mapping[str, str]) -> Refusal:
        """The refusal in an answer; a proxy may answer with something else than a Status object."""
        try:
            body = json.loads(data)
        except ValueError:
            body = {"message": " ".join(data[:500].decode("utf-8", "replace").split())}
        given = str(headers.get("Retry-After", ""))
        after_s = float(given) if given.isdecimal() else None
        return cls(status, body if isinstance(body, dict) else {}, after_s)

    @property
    def reason(self) -> str:
        """The word of Kubernetes, such as `AlreadyExists`."""
        return str(self.body.get("reason") or "")

    @property
    def message(self) -> str:
        """The message, with each cause of an invalid object in its own line."""
        text = str(self.body.get("message") or self.reason or f"HTTP status {self.status}")
        causes = (self.body.get("details") or {}).get("causes") or []
        lines = [f"  {cause.get('field', '')}: {cause.get('message', '')}".rstrip(": ") for cause in causes]
        return text if len(lines) < 2 else "\n".join([text.partition(":")[0], *lines[:_MOST_CAUSES]])

    def __str__(self) -> str:
        return f"{self.status} {self.message}"


def translated(exc: Exception, what: str, operation: str, executor: str) -> AtollError:
    """Atoll's error for an exception of a request. Raise it `from exc`."""
    if isinstance(exc, Refusal):
        return _of_refusal(exc, what, operation, executor)
    text, given = " ".join(str(exc).split()), {"executor": executor, "operation": operation}
    if not is_no_answer(exc):
        return BackendError(f"{what}: no answer from the cluster: {text}", **given)
    causes = list(_causes(exc))
    if any(isinstance(each, ssl.SSLError) and _HANDSHAKE.search(each.reason or "") for each in causes):
        return BackendError(f"{what}: no safe connection to the cluster: {text}", **given, reason="tls", hint=_TLS)
    if any(type(each).__name__ == "ProxyError" for each in causes):
        return BackendUnavailable(f"{what}: no answer from the proxy: {text}", **given, reason="proxy", hint=_PROXY)
    if any(isinstance(each, (ConnectionRefusedError, socket.gaierror)) for each in causes):
        return BackendUnavailable(f"{what}: cannot connect: {text}", **given, reason="unreachable", hint=_ADDRESS)
    return BackendUnavailable(f"{what}: no answer from the cluster: {text}", **given)


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """The exception and those that it was raised for; urllib3 keeps some of them in the arguments only."""
    seen: set[int] = set()
    left = [exc]
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            given = (found.__cause__, found.__context__, *found.args)
            left += [each for each in given if isinstance(each, BaseException)]


def retry_after_s(exc: BaseException | None) -> float:
    """How long the API server asked to wait before the next try; 0 if it did not."""
    return float(getattr(exc, "retry_after_s", None) or 0.0)


def is_no_answer(exc: Exception) -> bool:
    """Whether the network, TLS or a proxy failed, so that trying again may work."""
    modules = {each.__module__.partition(".")[0] for each in type(exc).__mro__}
    return isinstance(exc, OSError) or "urllib3" in modules or "http" in modules


def _of_refusal(found: Refusal, what: str, operation: str, executor: str) -> AtollError:
    text = f"{what}: {found.message}"
    given = {"executor": executor, "operation": operation}
    if found.status == 401 or (found.status == 403 and _ANONYMOUS in found.message):
        return AuthError(text, **given, reason="login", hint=_LOGIN)
    if found.status == 403:
        if QUOTA.search(found.message):
            return CapacityError(text, **given, reason="quota")
        if _DENIED.search(found.message) and "not authorized" not in found.message:
            return ConfigError(text, reason="denied")  # the object is refused, and not the user
        return AuthError(text, **given, reason="forbidden", hint=_ROLE.format(backend=_backend(executor)))
    if found.status in (404, 410):
        return RunNotFound(text, **given, reason="expired" if found.status == 410 else "")
    if found.status == 409:
        return BackendError(text, **given, reason="taken" if found.reason == "AlreadyExists" else "changed")
    if found.status >= 500 and (webhook := _WEBHOOK.search(found.message)):
        return BackendUnavailable(text, **given, reason="webhook", hint=_down(webhook["name"]))
    if found.status == 429 or found.status >= 500:
        return BackendUnavailable(text, **given, reason="throttled" if found.status == 429 else "")
    return ConfigError(text, reason="invalid")


def _backend(executor: str) -> str:
    """The backend whose Role an executor needs; a scheduler of TorchX needs that of AppWrappers."""
    return executor if executor == "kubernetes" else "appwrapper"


def _down(webhook: str) -> str:
    """What to do about a webhook that does not answer."""
    controller = next((name for end, name in _CONTROLLERS.items() if webhook.endswith(end)), "its controller")
    return f"webhook `{webhook}` does not answer: {controller} is down; ask the administrator, then launch it again"
