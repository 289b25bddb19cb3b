"""A TLS proxy between a client and the API server that loses, delays or falsifies answers on cue, and counts calls.

The proxy authenticates itself to the API server with the certificate it is given; an `Authorization` header goes
through. Answers are passed on piece by piece, so that watches and logs that are followed work through it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from services.kubernetes.authority import Certificate
from services.kubernetes.control_plane import ControlPlane, kubeconfig


@dataclass
class Fault:
    """Meets the requests whose method and whole path (without the query) match, after the first `skip` of them.

    It is used up `times` times. Exactly one of these happens:
    - `status`: this answer, with `headers`; with `is_after_effect` the API server does its work first;
    - `is_dropped`: no answer, the connection ends; `is_after_effect` as above;
    - `event`: a watch is answered with this one event, such as the one of status 410 (`GONE`);
    - `cut_after`: the answer ends after so many lines; with `is_half_line` in the middle of the next one;
    - `hang_s`: nothing is said for so long, or until the proxy closes; then the connection ends.
    """

    method: str = ".*"
    path: str = ".*"
    query: str = ""
    """A regular expression that the query must contain."""
    skip: int = 0
    times: float = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    is_after_effect: bool = False
    is_dropped: bool = False
    is_reset: bool = False
    event: dict[str, Any] | None = None
    cut_after: int | None = None
    is_half_line: bool = False
    hang_s: float = 0.0
    action: Callable[[], None] | None = None
    """Called when the request comes, or with `is_after_effect` before its answer is passed on; other faults hold."""
    used: int = 0

    def meets(self, method: str, path: str, query: str) -> bool:
        is_meant = re.fullmatch(self.method, method) and re.fullmatch(self.path, path) and re.search(self.query, query)
        if not is_meant or self.times <= 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        self.used += 1
        return True

    def act(self, *, is_after_effect: bool) -> None:
        if self.action is not None and self.is_after_effect == is_after_effect:
            self.action()


def failure(status: int, reason: str = "", message: str = "scripted") -> dict[str, Any]:
    """The object with which the API server says that something went wrong."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason or _REASONS.get(status, "InternalError"), "code": status}  # fmt: skip


_REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired",
            429: "TooManyRequests", 504: "Timeout"}  # fmt: skip
GONE = {"type": "ERROR", "object": failure(410, "Expired", "too old resource version")}
TOO_MANY = {"status": 429, "headers": {"Retry-After": "1"}}


@dataclass
class Call:
    """A request that came to the proxy. `status` is what the client was told; None means no answer."""

    method: str
    path: str
    query: dict[str, str]
    agent: str
    body: bytes = b""
    status: int | None = None
    answer: bytes = b""
    """What the client was sent, if the proxy keeps answers."""

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch", "").lower() in ("true", "1")


class FaultProxy:
    """Serves on a free port of this machine while it is open."""

    def __init__(
        self, plane: ControlPlane, certificate: Certificate | None = None, *, keeps_answers: bool = False
    ) -> None:
        self.keeps_answers = keeps_answers
        authority = plane.authority
        folder = authority.folder
        self._plane = plane
        self._certificate = certificate or Certificate(folder / "admin.crt", folder / "admin.key")
        self.target = urlsplit(plane.server)
        self.faults: list[Fault] = []
        self.calls: list[Call] = []
        self.lock = Lock()
        self.is_over = Event()
        self.context = ssl.create_default_context(cafile=str(authority.path))
        self.context.load_cert_chain(str(self._certificate.path), str(self._certificate.key_path))
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        name = f"proxy-{self._server.server_port}"
        serving = authority.server(name, "127.0.0.1", "localhost")
        server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server_context.load_cert_chain(str(serving.path), str(serving.key_path))
        self._server.socket = server_context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultProxy:
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig that leads through the proxy. The API server sees the proxy's user."""
        return kubeconfig(folder / "kubeconfig-proxy", self.url, self._plane.authority, self._certificate)

    def counted(self, method: str = ".*", path: str = ".*") -> list[Call]:
        """The calls whose method and whole path match."""
        with self.lock:
            return [call for call in self.calls if re.fullmatch(method, call.method) and re.fullmatch(path, call.path)]

    def seen(self, call: Call, query: str) -> tuple[list[Fault], Fault | None]:
        """The actions that this call sets off, and the fault that it meets."""
        with self.lock:
            self.calls.append(call)
            given = (call.method, call.path, query)
            actions = [fault for fault in self.faults if fault.action is not None and fault.meets(*given)]
            others = (fault for fault in self.faults if fault.action is None)
            return actions, next((fault for fault in others if fault.meets(*given)), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away, or was sent away, is no news."""


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        self._call = Call(self.command, url.path, query, self.headers.get("User-Agent", ""), body)
        actions, fault = self.proxy.seen(self._call, url.query)
        for each in actions:
            each.act(is_after_effect=False)
        if fault is None or fault.cut_after is not None:
            with self._forwarded(body) as response:
                for each in actions:
                    each.act(is_after_effect=True)
                return self._pass_on(response, fault)
        if fault.is_after_effect:
            with self._forwarded(body) as response:
                response.read()
        for each in actions:
            each.act(is_after_effect=True)
        return self._fail(fault)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_PATCH = _serve  # noqa: N815

    @contextlib.contextmanager
    def _forwarded(self, body: bytes) -> Iterator[http.client.HTTPResponse]:
        target = self.proxy.target
        connection = http.client.HTTPSConnection(
            target.hostname or "", target.port, timeout=600, context=self.proxy.context
        )
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(self.command, self.path, body or None, headers)
            yield connection.getresponse()

    def _pass_on(self, response: http.client.HTTPResponse, fault: Fault | None) -> None:
        self._call.status = response.status
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.command == "HEAD":
            return
        while piece := response.readline() if fault else response.read1(65536):
            if fault is not None and fault.cut_after == 0:
                self._send_piece(piece[: len(piece) // 2] if fault.is_half_line else b"")
                self._break_off(fault)
                return
            if fault is not None and fault.cut_after is not None:
                fault.cut_after -= 1
            self._send_piece(piece)
        self.wfile.write(b"0\r\n\r\n")

    def _send_piece(self, piece: bytes) -> None:
        if piece:
            if self.proxy.keeps_answers:
                self._call.answer += piece
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def _fail(self, fault: Fault) -> None:
        if fault.hang_s:
            self.proxy.is_over.wait(fault.hang_s)
        if fault.hang_s or fault.is_dropped or fault.is_reset:
            return self._break_off(fault)
        answer = fault.event if fault.event is not None else failure(fault.status or 500, fault.reason)
        self._call.status = 200 if fault.event is not None else fault.status or 500
        body = json.dumps(answer).encode() + b"\n"
        self._call.answer = body if self.proxy.keeps_answers else b""
        self.send_response_only(self._call.status)
        for name, value in {"Content-Type": "application/json", **fault.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def _break_off(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.is_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.close() if fault.is_reset else self.connection.shutdown(socket.SHUT_RDWR)


_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "host", "accept-encoding"}
