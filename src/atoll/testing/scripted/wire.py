"""The scripted cloud's wire: a server on a loopback socket, and the client library ("SDK") that talks to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from atoll.testing.scripted.service import Refusal, ScriptedService, Silence


class ServiceError(Exception):
    """The service answered, and it was no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class Denied(ServiceError):
    """401 or 403."""


class NoSuchJob(ServiceError):
    """404."""


class NameTaken(ServiceError):
    """409."""


class TryAgain(ServiceError):
    """429, and every 5xx."""


class NoAnswer(Exception):
    """The service could not be reached, or did not answer in time."""


class ScriptedClient:
    """One call, one connection. Raises the errors above, and knows nothing of ours."""

    def __init__(self, endpoint: str, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s

    def call(self, verb: str, **body: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._endpoint, timeout=self._timeout_s)
        try:
            connection.request("POST", f"/{verb}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise NoAnswer(f"{verb}: {type(exc).__name__}: {exc}") from exc
        finally:
            connection.close()
        if response.status != 200:
            raise _error(response.status, answer["message"])
        return answer  # type: ignore[no-any-return]


def _error(status: int, message: str) -> ServiceError:
    if status in (401, 403):
        return Denied(status, message)
    kinds = {404: NoSuchJob, 409: NameTaken, 429: TryAgain}
    return kinds.get(status, TryAgain if status >= 500 else ServiceError)(status, message)


class ScriptedServer:
    """Puts a service on a free port. `close` takes it off again."""

    def __init__(self, service: ScriptedService) -> None:
        self._closing = Event()
        self._server = _Server(("127.0.0.1", 0), _handler(service, self._closing))
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def _handler(service: ScriptedService, closing: Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._answer(200, service.answer(self.path.removeprefix("/"), body))
            except Refusal as exc:
                self._answer(exc.status, {"message": exc.message})
            except Silence:
                closing.wait(30.0)
                self.close_connection = True

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the caller is gone: it was killed, or lost patience

        def log_message(self, *_: object) -> None:
            pass

    return Handler
