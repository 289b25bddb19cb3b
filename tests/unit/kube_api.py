"""A small HTTP server that answers like an API server, as a test tells it, and keeps every request."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from atoll._time import SYSTEM_CLOCK
from atoll.kube.client import KubeClient
from atoll.kube.connection import Connection


@dataclass
class Reply:
    """One answer. `pieces` are sent one by one, and then the connection is cut, kept open, or the answer ended."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] | None = None
    is_cut: bool = False
    held: Event | None = None
    """Keeps the answer open until it is set."""


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class ScriptedApi:
    """Answers with `replies` in their order, and with the last one from then on; or as `answer` says."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.answer: Callable[[Request], Reply] | None = None
        self.requests: list[Request] = []
        self.came = Condition()
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[ScriptedApi]:
        thread = Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for reply in self.replies:
                if reply.held is not None:
                    reply.held.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def reply(self, request: Request) -> Reply:
        with self.came:
            self.requests.append(request)
            self.came.notify_all()
            if self.answer is not None:
                return self.answer(request)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def until(self, count: int) -> Request:
        """Wait until so many requests came; the last of them."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.requests) >= count, 30), f"{len(self.requests)} of {count} came"
            return self.requests[count - 1]

    def kubeconfig(self, folder: Path, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
        path = folder / "kubeconfig"
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url, **cluster}}],
            "users": [{"name": "u", "user": user or {}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path

    def client(self, folder: Path, *, timeout_s: float = 5.0, patience_s: float = 5.0, **user: Any) -> KubeClient:
        connection = Connection(kubeconfig=str(self.kubeconfig(folder, user)))
        return client_of(connection, timeout_s=timeout_s, patience_s=patience_s)


def client_of(connection: Connection, *, timeout_s: float = 5.0, patience_s: float = 0.0) -> KubeClient:
    return KubeClient(connection, executor="kubernetes", timeout_s=timeout_s, patience_s=patience_s, clock=SYSTEM_CLOCK)


def failure(status: int, reason: str = "", message: str = "scripted", **headers: str) -> Reply:
    body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


class _Handler(BaseHTTPRequestHandler):
    api: ScriptedApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        request = Request(self.command, url.path, query, dict(self.headers), json.loads(data) if data else None)
        reply = self.api.reply(request)
        with suppress(OSError):
            self._send(reply)

    do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815

    def _send(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        body = b"" if reply.pieces is not None else json.dumps(reply.body or {}).encode()
        self.send_header(*(("Content-Length", str(len(body))) if reply.pieces is None else _CHUNKED))
        self.end_headers()
        self.wfile.write(body)
        for piece in reply.pieces or ():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        if reply.held is not None:
            reply.held.wait(60)
        if reply.is_cut:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif reply.pieces is not None:
            self.wfile.write(b"0\r\n\r\n")


_CHUNKED = ("Transfer-Encoding", "chunked")
