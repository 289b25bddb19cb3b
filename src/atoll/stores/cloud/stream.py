"""Reads large objects of S3 from the socket directly into the caller's memory.

obstore collects a body in pieces and joins them, which takes three times the CPU of receiving it once. So `open_body`
sends its own GET, with a URL that obstore has signed. This is the fast path for the usual case only: obstore handles
everything else (a redirect, a refusal, a proxy, a service that needs more than a signed URL) and reports its errors.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import struct
import weakref
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

from atoll._time import Clock
from atoll.errors import KeyNotFound, StoreUnavailable
from atoll.stores.cloud.address import CloudAddress
from atoll.stores.cloud.client import CloudSettings, ca_file_of
from atoll.stores.fast import Descriptor, DescriptorBody

log = logging.getLogger("atoll.stores")
_MAX_HEAD_BYTES = 1 << 16
_MAX_IDLE = 64
_MAX_FAILURES = 3
"""After this many failures in a row the reader leaves all requests to obstore,"""
_PAUSE_S = 60.0
"""for this long: the service may have been down."""
TIMED_OUT = (TimeoutError, BlockingIOError)
"""The errors of Python's timeouts and of the kernel's."""


class Head(NamedTuple):
    """The status and headers of a response, and the first bytes of its body."""

    version: bytes
    status: int
    headers: dict[bytes, bytes]
    more: bytes

    @property
    def size(self) -> int | None:
        """The size of the body; None if unknown."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() and b"transfer-encoding" not in self.headers else None

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after the body."""
        return self.version == b"HTTP/1.0" or b"close" in self.headers.get(b"connection", b"").lower()


class SocketBody(DescriptorBody):
    """The body of a response. Its connection is reused after all of the body has been read."""

    def __init__(
        self,
        connection: socket.socket,
        head: Head,
        size: int,
        on_end: Callable[[socket.socket], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._connection: socket.socket | None = connection
        self._more = memoryview(head.more)
        self._on_end, self._on_failure = on_end, on_failure
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        self.size = self._left = size
        self.uri = self.key = ""

    def readinto(self, buffer: memoryview) -> None:
        if self._connection is None:
            raise self._unavailable("is closed", "closed")
        if len(buffer) > self._left:
            raise self._unavailable("ended early", "cut")
        try:
            self._fill(self._connection, buffer)
        except OSError as exc:
            self.was_cut(exc)
        except BaseException:  # for instance Ctrl-C: the number of bytes read is unknown
            self.close()
            raise
        self._left -= len(buffer)

    def descriptor(self) -> Descriptor | None:
        if self._connection is None or isinstance(self._connection, ssl.SSLSocket):
            return None
        return Descriptor(self._connection.fileno(), ready=self._more, is_socket=True)

    def was_read(self, count: int) -> None:
        self._more = self._more[count:]
        self._left -= count

    def was_cut(self, error: OSError | None) -> NoReturn:
        error = error or ConnectionResetError("the connection was closed")
        self.close()
        self._on_failure()
        is_late = isinstance(error, TIMED_OUT)
        why = "timeout" if is_late else error
        raise self._unavailable(f"ended early: {why}", "timeout" if is_late else "cut") from error

    def _unavailable(self, what: str, reason: str) -> StoreUnavailable:
        return StoreUnavailable(f"`{self.key}` in {self.uri} {what}", uri=self.uri, key=self.key, reason=reason)

    def _fill(self, connection: socket.socket, buffer: memoryview) -> None:
        if self._more:
            count = min(len(self._more), len(buffer))
            buffer[:count], self._more = self._more[:count], self._more[count:]
            buffer = buffer[count:]
        while buffer:
            count = connection.recv_into(buffer, len(buffer), self._flags)
            if not count:
                raise ConnectionResetError("the connection was closed")
            buffer = buffer[count:]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._left:
            connection.close()
        else:
            self._on_end(connection)

    def __del__(self) -> None:
        if self._connection is not None:  # closed, not reused: this thread may hold the lock for that
            self._connection.close()


class DirectReader:
    """Opens bodies by signed URLs. Threads share it; connections are reused."""

    def __init__(self, sign: Callable[[str], str], settings: CloudSettings, clock: Clock) -> None:
        self._sign, self._settings, self._clock = sign, settings, clock
        self._lock = Lock()
        self._idle: list[tuple[tuple[str, str], socket.socket]] = []
        weakref.finalize(self, _close_all, self._idle)
        self._tls: ssl.SSLContext | None = None
        self._failures, self._paused_until = 0, 0.0

    @classmethod
    def supports(cls, address: CloudAddress, settings: CloudSettings) -> bool:
        """Whether a signed URL is enough to read an object: S3, no proxy, no special options."""
        return address.service == "s3" and not address.anonymous and not settings.config and not _proxies()

    def open(self, uri: str, key: str, path: str) -> SocketBody | None:
        """The body; None if obstore must read the object. Raises `KeyNotFound`."""
        if self._failures >= _MAX_FAILURES and self._clock.monotonic() < self._paused_until:
            return None
        found: SocketBody | bytes = b""
        try:
            found = self._get(self._sign(path))
        except Exception as exc:  # obstore reads the object instead, and reports the error
            if isinstance(exc, TIMED_OUT) and self._has_no_retries:
                message = f"cannot read `{key}` in {uri}: no response in time"
                raise StoreUnavailable(message, uri=uri, key=key, reason="timeout") from exc
        if isinstance(found, SocketBody):
            found.uri, found.key = uri, key
            return found
        if found == b"NoSuchKey":
            self._failures = 0
            raise KeyNotFound(key, uri=uri)
        log.debug("obstore reads `%s` in %s instead of a direct request", key, uri)
        self._record_failure()
        return None

    def _record_failure(self) -> None:
        self._failures += 1
        self._paused_until = self._clock.monotonic() + _PAUSE_S

    @property
    def _has_no_retries(self) -> bool:
        """Whether one read timeout uses up the whole time for retries."""
        return self._settings.retry_timeout_s <= self._settings.read_timeout_s

    def _get(self, url: str) -> SocketBody | bytes:
        """The body, or the error code of the service."""
        parts = urlsplit(url)
        origin = (parts.scheme, parts.netloc)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "User-Agent: atoll\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode("ascii")
        while (connection := self._take_idle(origin)) is not None:
            try:
                return self._answer(origin, connection, request)
            except TIMED_OUT:
                raise  # a new connection would time out too
            except OSError:
                continue  # the server closed it while it was idle
        return self._answer(origin, self._connect(parts.scheme, parts.hostname or "", parts.port), request)

    def _answer(self, origin: tuple[str, str], connection: socket.socket, request: bytes) -> SocketBody | bytes:
        try:
            connection.sendall(request)
            head = _read_head(connection)
            if head.size is None or head.size < len(head.more):
                raise ValueError("the size of the body is unknown")
        except BaseException:
            connection.close()
            raise

        def on_end(used: socket.socket) -> None:
            if head.status == 200:
                self._failures = 0
            if head.is_last:
                used.close()
            else:
                self._keep(origin, used)

        body = SocketBody(connection, head, head.size, on_end, self._record_failure)
        return body if head.status == 200 else _error_code(head.status, body)

    def _connect(self, scheme: str, host: str, port: int | None) -> socket.socket:
        is_tls = scheme == "https"
        connection = socket.create_connection(
            (host, port or (443 if is_tls else 80)), timeout=self._settings.connect_timeout_s
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return self._wrapped(connection, host) if is_tls else self._with_timeouts(connection)
        except BaseException:
            connection.close()
            raise

    def _wrapped(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        # Not the kernel's timeouts: OpenSSL would repeat the read forever.
        wrapped = self._context().wrap_socket(connection, server_hostname=host)
        wrapped.settimeout(self._settings.read_timeout_s)
        return wrapped

    def _with_timeouts(self, connection: socket.socket) -> socket.socket:
        # With Python's timeouts a read returns early with some bytes; with the kernel's it waits for all of them.
        connection.settimeout(None)
        whole, part = divmod(max(self._settings.read_timeout_s, 1e-3), 1)
        timeout = struct.pack("ll", int(whole), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                context = ssl.create_default_context()
                if (ca_file := ca_file_of(self._settings)) is not None:
                    context.load_verify_locations(os.fspath(ca_file))
                self._tls = context
            return self._tls

    def _take_idle(self, origin: tuple[str, str]) -> socket.socket | None:
        while (connection := self._pop_idle(origin)) is not None:
            if not _is_unusable(connection):
                return connection
            connection.close()
        return None

    def _pop_idle(self, origin: tuple[str, str]) -> socket.socket | None:
        with self._lock:
            for i in reversed(range(len(self._idle))):
                if self._idle[i][0] == origin:
                    return self._idle.pop(i)[1]
        return None

    def _keep(self, origin: tuple[str, str], connection: socket.socket) -> None:
        with self._lock:
            self._idle.append((origin, connection))
            surplus = self._idle.pop(0)[1] if len(self._idle) > _MAX_IDLE else None
        if surplus is not None:
            surplus.close()


def _proxies() -> dict[str, str]:
    return {scheme: where for scheme, where in getproxies().items() if scheme != "no"}


def _close_all(idle: list[tuple[tuple[str, str], socket.socket]]) -> None:
    for _, connection in idle:
        connection.close()


def _is_unusable(connection: socket.socket) -> bool:
    """Whether the server closed an idle connection or sent bytes without a request."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0)) or (isinstance(connection, ssl.SSLSocket) and connection.pending() > 0)


def _error_code(status: int, body: SocketBody) -> bytes:
    """The error code in the body of a 404; empty for any other status."""
    text = bytearray(min(body.size, _MAX_HEAD_BYTES))
    try:
        body.readinto(memoryview(text))
    finally:
        body.close()
    code = bytes(text).partition(b"<Code>")[2].partition(b"</Code>")[0]
    return code if status == 404 else b""


def _read_head(connection: socket.socket) -> Head:
    """The head of a response. Raises `OSError` without one, `ValueError` for an invalid one."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionResetError("the connection was closed")
        raw += piece
        if len(raw) > _MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
    head, _, more = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not an HTTP/1 response")
    headers = (line.partition(b":") for line in lines)
    return Head(version, int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in headers}, more)
