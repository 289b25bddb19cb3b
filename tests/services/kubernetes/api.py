"""A small client of the API server: JSON over kept connections. The kubelet and the tests of the cluster use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from services.kubernetes.authority import Certificate

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        try:
            parsed = json.loads(body)
        except ValueError:
            parsed = {}
        self.reason = str(parsed.get("reason", ""))
        self.message = str(parsed.get("message", "")) or body.decode(errors="replace")
        super().__init__(f"{status} {self.reason}: {self.message}")


class Api:
    """Speaks for one user. Threads may share it; each call takes a connection of the pool."""

    def __init__(self, server: str, authority: Path, certificate: Certificate | None, *, agent: str = "tests") -> None:
        self.server = server
        self._url = urlsplit(server)
        self._context = ssl.create_default_context(cafile=str(authority))
        if certificate is not None:
            self._context.load_cert_chain(str(certificate.path), str(certificate.key_path))
        self._idle: queue.LifoQueue[http.client.HTTPSConnection] = queue.LifoQueue()
        self._headers = {"User-Agent": agent, "Accept": "application/json"}

    def close(self) -> None:
        """Close the connections that no call uses now."""
        while not self._idle.empty():
            self._idle.get().close()

    def get(self, path: str, **query: object) -> Any:
        return self.request("GET", path, query=query)

    def items(self, path: str, **query: object) -> list[Object]:
        found: list[Object] = self.get(path, **query)["items"]
        return found

    def create(self, path: str, body: Object, **query: object) -> Any:
        return self.request("POST", path, body, query=query)

    def patch(self, path: str, body: Object, *, kind: str = MERGE, **query: object) -> Any:
        return self.request("PATCH", path, body, query=query, content_type=kind)

    def delete(self, path: str, body: Object | None = None, **query: object) -> Any:
        return self.request("DELETE", path, body, query=query)

    def text(self, path: str, **query: object) -> str:
        """The body of an answer that is not JSON, such as a log."""
        return self._call("GET", path, None, query, "").decode(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: dict[str, object] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        return json.loads(self._call(method, path, body, query or {}, content_type))

    def lines(self, path: str, *, timeout: float = 300.0, **query: object) -> Iterator[bytes]:
        """The lines of an answer that has no end yet: a watch or a log that is followed."""
        connection = self._connect(timeout)
        with contextlib.closing(connection):
            connection.request("GET", _target(path, query), headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(response.status, response.read())
            while line := response.readline():
                yield line

    def watch(self, path: str, *, timeout: float = 300.0, **query: object) -> Iterator[tuple[str, Object]]:
        """Events as (type, object), until the server ends the watch."""
        for line in self.lines(path, timeout=timeout, watch="true", **query):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise ApiError(int(event["object"].get("code", 500)), json.dumps(event["object"]).encode())
            yield event["type"], event["object"]

    def _call(self, method: str, path: str, body: Object | None, query: dict[str, object], content_type: str) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({"Content-Type": content_type} if data is not None else {})}
        connection, is_fresh = self._take()
        try:
            try:
                connection.request(method, _target(path, query), data, headers)
                response = connection.getresponse()
            except (ConnectionError, ssl.SSLError):
                if is_fresh:
                    raise
                connection.close()  # the server closed a connection that nobody used
                connection = self._connect(60)
                connection.request(method, _target(path, query), data, headers)
                response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            raise
        self._idle.put(connection)
        if response.status >= 300:
            raise ApiError(response.status, answer)
        return answer

    def _take(self) -> tuple[http.client.HTTPSConnection, bool]:
        try:
            return self._idle.get_nowait(), False
        except queue.Empty:
            return self._connect(60), True

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        host, port = self._url.hostname or "", self._url.port
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)


def _target(path: str, query: dict[str, object]) -> str:
    chosen = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(chosen)}" if chosen else path
