"""A server with one object under every key. To signed addresses it answers whatever the test has written down.

Requests that carry their signature in a header, obstore's own, and signed addresses for which nothing is written down
get the object as S3 would give it. `requests` says what came on which connection.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

Script = Callable[[socket.socket], bool]
"""Answers one request; whether the connection stays open for the next."""


class ScriptedS3:
    """Serves on a free port of this machine while it is open."""

    def __init__(self, body: bytes, *, certificate: Path | None = None) -> None:
        self.body = body
        self.scripts: deque[Script] = deque()
        self.requests: list[tuple[int, str]] = []
        self.is_over = Event()
        self._lock = Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls: ssl.SSLContext | None = None
        self._open: list[socket.socket] = []
        self._threads: list[Thread] = []
        port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}" if certificate is None else f"https://localhost:{port}"
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)

    def __enter__(self) -> ScriptedS3:
        self._threads.append(Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.pop(0).join()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    @property
    def straight(self) -> list[int]:
        """The connections that signed addresses came on."""
        return [number for number, path in self.requests if "X-Amz-Signature=" in path]

    @property
    def others(self) -> int:
        """How many requests were obstore's own."""
        return len(self.requests) - len(self.straight)

    def whole(self, version: str = "1.1", *headers: str) -> bytes:
        """The object as an answer."""
        lines = [f"HTTP/{version} 200 OK", 'ETag: "x"', "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT",
                 f"Content-Length: {len(self.body)}", *headers]  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + self.body

    def says(self, answer: bytes, *, then_close: bool = False) -> Script:
        def script(connection: socket.socket) -> bool:
            connection.sendall(answer)
            return not then_close

        return script

    def says_and_waits(self, answer: bytes) -> Script:
        """And then nothing more, until the test is over."""

        def script(connection: socket.socket) -> bool:
            connection.sendall(answer)
            self.is_over.wait()
            return False

        return script

    def _accept(self) -> None:
        while not self.is_over.is_set():
            try:
                connection, _ = self._listener.accept()
                self._open.append(connection)
            except OSError:
                return
            thread = Thread(target=self._serve, args=(len(self._threads), connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int, connection: socket.socket) -> None:
        with suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._open.append(connection)
            with connection:
                while (path := _path_asked_for(connection)) and self._script(number, path)(connection):
                    pass

    def _script(self, number: int, path: str) -> Script:
        with self._lock:
            self.requests.append((number, path))
            is_scripted = self.scripts and "X-Amz-Signature=" in path
            return self.scripts.popleft() if is_scripted else self.says(self.whole())


def reset(connection: socket.socket) -> bool:
    """Not a word, and the connection is broken off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def _path_asked_for(connection: socket.socket) -> str | None:
    raw = b""
    while not raw.endswith(b"\r\n\r\n"):
        piece = connection.recv(4096)
        if not piece:
            return None
        raw += piece
    return raw.split(b" ", 2)[1].decode()
