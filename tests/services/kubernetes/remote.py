"""An object of another process: each of its public methods is a request, `POST /METHOD` with the arguments as JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any


class RemoteError(Exception):
    """The other process refuses what a test asks of it, or fails to do it."""


@dataclass(frozen=True)
class Remote:
    """Sends the requests."""

    url: str

    def __call__(self, method: str, **arguments: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/{method}", json.dumps(arguments).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as exc:
            with exc:
                raise RemoteError(json.load(exc)) from None


def handler(target: object) -> type[BaseHTTPRequestHandler]:
    """Answers the requests with what the methods of `target` return, or with their error."""
    return type("Handler", (_Handler,), {"target": target})


class _Handler(BaseHTTPRequestHandler):
    target: object

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        arguments = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        name = self.path.strip("/")
        try:
            if name.startswith("_"):
                raise AttributeError(name)
            status, answer = 200, getattr(self.target, name)(**arguments)
        except Exception as exc:
            status, answer = 400, f"{type(exc).__name__}: {exc}"
        body = json.dumps(answer).encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
