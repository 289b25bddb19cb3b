"""Every request to a cluster: plain JSON in and out, retried while that may help, with its errors translated.

`KubeClient.call` and `KubeClient.stream` are the only ways from this package to the network.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, BackendError, ConfigError
from atoll.kube.connection import Connection
from atoll.kube.errors import Refusal, retry_after_s, translated

JSON = "application/json"
METADATA_ONLY = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Of an object only its metadata: no value of a Secret is read."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_PAGE = 500
_CHUNK_BYTES = 65536

log = logging.getLogger("atoll.executors")


@dataclass(frozen=True)
class Answer:
    """An answer of the API server."""

    body: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """What the API server warns of, such as pods that Pod Security will not admit."""


class KubeClient:
    """Requests to one cluster, on behalf of one executor."""

    def __init__(
        self, connection: Connection, *, executor: str, timeout_s: float, patience_s: float, clock: Clock
    ) -> None:
        self.connection, self.executor = connection, executor
        self._timeout_s, self._patience_s, self._clock = timeout_s, patience_s, clock

    def call(
        self,
        method: str,
        path: str,
        what: str,
        operation: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = JSON,
        tries: int | None = None,
    ) -> Answer:
        """Send one request and return its answer.

        A transient error is retried for `patience_s`, or at most `tries` times for callers with a loop of their own.
        Credentials that are refused are read again once. `content_type` is that of the body, or of the answer to a
        request without a body.
        """
        deadline, pauses = self.deadline(), self.pauses()
        while True:
            try:
                return self._answer(method, path, what, query or {}, body, content_type)
            except ConfigError:
                raise
            except Exception as exc:
                error = self.error(exc, what, operation)
                tries = None if tries is None else tries - 1
                if not getattr(error, "retryable", False) or tries == 0 or deadline.is_past:
                    raise error from exc
                log.info("retry %s %s after: %s", method, path, error.message)
                after_s = retry_after_s(exc)
            deadline.sleep(max(next(pauses), after_s))

    def get(self, path: str, what: str, operation: str, **options: Any) -> dict[str, Any]:
        return self.call("GET", path, what, operation, **options).body

    def list(self, path: str, what: str, operation: str, *, query: Mapping[str, Any] | None = None) -> list[Any]:
        """All items of a list, in pages. A list that expires between two pages is read again without pages."""
        items: list[Any] = []
        token = ""
        while True:
            paged = {**(query or {}), "limit": _PAGE, **({"continue": token} if token else {})}
            try:
                found = self.get(path, what, operation, query=paged)
            except BackendError as exc:
                if exc.reason != "expired":
                    raise
                found = self.get(path, what, operation, query=query)
                return list(found.get("items") or [])
            items += found.get("items") or []
            token = str((found.get("metadata") or {}).get("continue") or "")
            if not token:
                return items

    def stream(self, path: str, what: str, operation: str, *, query: Mapping[str, Any], idle_s: float) -> Stream:
        """Begin to read an answer that may go on for long; it is cut after `idle_s` without a byte."""
        timeout = (min(10.0, self._timeout_s), self._timeout_s)
        translate = partial(self.error, what=what, operation=operation)
        try:
            response = self._opened("GET", path, what, query, None, JSON, timeout)
            found = _socket(response)
            if found is not None:
                found.settimeout(idle_s)
            return Stream(response, translate)
        except ConfigError:
            raise
        except Exception as exc:
            raise translate(exc) from exc

    def error(self, exc: Exception, what: str, operation: str) -> AtollError:
        """Atoll's error for an exception of a request. Raise it `from exc`."""
        return translated(exc, what, operation, self.executor)

    def deadline(self) -> Deadline:
        """The end of the time for which a request is retried."""
        return Deadline(self._patience_s, self._clock)

    def pauses(self) -> Iterator[float]:
        """Growing pauses between tries, with jitter so that many launchers do not retry at once."""
        return backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def _answer(
        self, method: str, path: str, what: str, query: Mapping[str, Any], body: Any, content_type: str
    ) -> Answer:
        response = self._opened(method, path, what, query, body, content_type, (self._timeout_s, self._timeout_s))
        try:
            found = json.loads(response.read() or b"{}")
        except ValueError as exc:  # a proxy cut the answer
            raise ConnectionError(f"the answer is not JSON: {exc}") from exc
        finally:
            response.release_conn()
        warnings = response.headers.getlist("Warning") if hasattr(response.headers, "getlist") else []
        return Answer(found, tuple(map(_warning, warnings)))

    def _opened(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, Any],
        body: Any,
        content_type: str,
        timeout: tuple[float, float],
    ) -> Any:
        """The response with its body unread. Credentials that are refused are read again once."""
        log.debug("%s %s (%s)", method, path, what)
        try:
            return self._response(method, path, query, body, content_type, timeout)
        except Refusal as exc:
            if exc.status != 401 or self.connection.is_given:
                raise
            log.info("the credentials were refused; reading them again")
            self.connection.renew()
        return self._response(method, path, query, body, content_type, timeout)

    def _response(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        content_type: str,
        timeout: tuple[float, float],
    ) -> Any:
        """The response with its body unread; raises `Refusal` for a status of 400 or more."""
        connection = self.connection
        url = f"{connection.host}{path}{f'?{urlencode(query)}' if query else ''}"
        kinds = {"Accept": JSON, "Content-Type": content_type} if body else {"Accept": content_type}
        headers = {**connection.headers(), **kinds}
        data = None if body is None else json.dumps(body).encode()
        response = connection.pool.request(
            method,
            url,
            body=data,
            headers=headers,
            timeout=_timeout(*timeout),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        if response.status >= 400:
            try:
                raise Refusal.of(response.status, response.read(), response.headers)
            finally:
                response.release_conn()
        return response


class Stream:
    """The chunks of an answer as they come. A cut connection is a `BackendUnavailable`; a clean end is the end.

    `close` may be called in another thread, and ends a read that waits there.
    """

    def __init__(self, response: Any, translate: Callable[[Exception], AtollError]) -> None:
        self._response, self._translate = response, translate

    def __iter__(self) -> Iterator[bytes]:
        read = getattr(self._response, "read1", None) or self._response._fp.read1  # urllib3 before 2 has none
        try:
            while chunk := read(_CHUNK_BYTES):
                yield chunk
        except Exception as exc:
            raise self._translate(exc) from exc
        finally:
            self._response.close()

    def close(self) -> None:
        found = _socket(self._response)
        if found is not None:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def path_to(kind: str, namespace: str | None = None, name: str | None = None, *, api: str = "/api/v1") -> str:
    """The path of a resource: `path_to("jobs", "ns", "x", api="/apis/batch/v1")`."""
    place = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    thing = "" if name is None else f"/{quote(name, safe='')}"
    return f"{api}{place}/{kind}{thing}"


def _socket(response: Any) -> Any:
    """The socket that a response of urllib3 is read from; None if the response was read to its end."""
    body = getattr(getattr(response, "_fp", None), "fp", None)  # that of `http.client`, and its buffered file
    return getattr(getattr(body, "raw", None), "_sock", None)


def _timeout(connect_s: float, read_s: float) -> Any:
    from urllib3 import Timeout

    return Timeout(connect=connect_s, read=read_s)


def _warning(header: str) -> str:
    """The text of `299 - "text"`."""
    text = header.partition('"')[2].rpartition('"')[0]
    return (text or header).replace('\\"', '"')
