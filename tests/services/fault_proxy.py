"""A proxy in front of a real server that loses, delays or falsifies answers on cue.

The `Host` header goes through unchanged, so signatures stay valid. A test appends to `faults`; each fault meets the
first request its `meets` accepts, and is used up `times` times.
"""

from __future__ import annotations

import http.client
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from urllib.parse import urlsplit

Meets = Callable[[str, str, dict[str, str]], bool]


def any_request(method: str, path: str, headers: dict[str, str]) -> bool:
    return True


def creates(method: str, path: str, headers: dict[str, str]) -> bool:
    """Conditional writes of any of the three services, but not the ones that probe the store."""
    is_condition = {"if-none-match", "x-goog-if-generation-match"} & set(headers)
    return method == "PUT" and bool(is_condition) and ".atoll-probe" not in path


@dataclass
class Fault:
    """`status=None` breaks the connection; `is_after_effect` lets the server do its work first.

    `silence_s` says nothing for that long, and then breaks the connection. `is_reset` breaks it with a reset.
    `spoil` changes the answer's body and `spoil_upload` the request's; the promised length stays as it was.
    """

    meets: Meets = any_request
    times: float = 1
    status: int | None = 503
    code: str = "SlowDown"
    is_after_effect: bool = False
    spoil: Callable[[bytes], bytes] | None = None
    spoil_upload: Callable[[bytes], bytes] | None = None
    silence_s: float = 0.0
    is_reset: bool = False
    used: int = 0


class FaultProxy:
    """Serves on a free port of this machine while it is open; `requests` is what came through, in `connections`."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.connections = 0
        self.lock = Lock()
        self.is_over = Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}{self.target.path}"

    def __enter__(self) -> FaultProxy:
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_fault(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times > 0 and fault.meets(method, path, headers):
                    fault.times -= 1
                    fault.used += 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away, or was sent away, is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.proxy.lock:
            self.proxy.connections += 1

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.next_fault(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        if fault is None:
            return self._answer(*self._forward(body))
        if fault.spoil_upload is not None:
            return self._answer_if_any(fault.spoil_upload(body))
        if fault.spoil is None and not fault.is_after_effect:
            return self._fail(fault)
        status, headers, answer = self._forward(body)
        return self._fail(fault) if fault.spoil is None else self._answer(status, headers, fault.spoil(answer))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        target = self.proxy.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            if len(body) < int(self.headers.get("Content-Length", 0)):
                connection.sock.shutdown(socket.SHUT_WR)
            response = connection.getresponse()
            dropped = {"connection", "transfer-encoding", "keep-alive"}
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in dropped]
            return response.status, headers, response.read()
        finally:
            connection.close()

    def _answer_if_any(self, body: bytes) -> None:
        """What the server says to an upload that breaks off, if it says anything."""
        try:
            answer = self._forward(body)
        except (http.client.HTTPException, OSError):
            self.close_connection = True
            return
        self._answer(*answer)

    def _fail(self, fault: Fault) -> None:
        if fault.silence_s:
            self.proxy.is_over.wait(fault.silence_s)
        if fault.is_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if fault.silence_s or fault.is_reset or fault.status is None:
            self.close_connection = True
            return
        body = f"<Error><Code>{fault.code}</Code><Message>scripted</Message></Error>".encode()
        self._answer(fault.status, [("Content-Length", str(len(body)))], body)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            promised = next((int(value) for name, value in headers if name.lower() == "content-length"), len(body))
            self.close_connection = self.close_connection or promised != len(body)
