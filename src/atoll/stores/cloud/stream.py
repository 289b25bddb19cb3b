"""Reading large objects of S3 straight from the socket into the reader's memory.

obstore collects a body in pieces and copies them together, which takes three times the CPU of receiving it once. So
bodies that are read piece by piece come by a GET of our own, with an address that obstore has signed. This is the
short way for the usual case and nothing else: whatever is out of the ordinary (a redirect, a refusal, a proxy, a
service that wants more than a signed address) is left to obstore, which knows what to do and what to say.
"""

from __future__ import annotations

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

_MOST_HEAD_BYTES = 1 << 16
_MOST_IDLE = 64
_ENOUGH = 3
"""After so many answers in a row that were not for us, or did not come to their end, we stop asking,"""
_REST_S = 60.0
"""for so long: the service may only have been down."""
TIMED_OUT = (TimeoutError, BlockingIOError)
"""What Python's own time-outs raise, and what the kernel's do."""


class Head(NamedTuple):
    """The beginning of an answer, and what came with it of the body."""

    version: bytes
    status: int
    headers: dict[bytes, bytes]
    more: bytes

    @property
    def size(self) -> int | None:
        """Bytes of the body; None if there is no telling."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() and b"transfer-encoding" not in self.headers else None

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after the body."""
        return self.version == b"HTTP/1.0" or b"close" in self.headers.get(b"connection", b"").lower()


class SocketBody(DescriptorBody):
    """A body on its way. The connection goes back to those that can be used again once all of it has been read."""

    def __init__(
        self,
        connection: socket.socket,
        head: Head,
        size: int,
        let_go: Callable[[socket.socket], None],
        break_off: Callable[[], None],
    ) -> None:
        self._connection: socket.socket | None = connection
        self._more = memoryview(head.more)
        self._let_go, self._break_off = let_go, break_off
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
        except BaseException:  # Ctrl-C, say: some bytes were taken and nobody knows how many
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
        self._break_off()
        is_late = isinstance(error, TIMED_OUT)
        why = "no bytes came for too long" if is_late else error
        raise self._unavailable(f"did not come to its end: {why}", "timeout" if is_late else "cut") from error

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
            self._let_go(connection)

    def __del__(self) -> None:
        if self._connection is not None:  # not kept: the lock that takes may be held by the very thread this runs in
            self._connection.close()


class StraightReader:
    """Opens bodies by signed addresses. Shared by threads; connections are kept and used again."""

    def __init__(self, sign: Callable[[str], str], settings: CloudSettings, clock: Clock) -> None:
        self._sign, self._settings, self._clock = sign, settings, clock
        self._lock = Lock()
        self._idle: list[tuple[tuple[str, str], socket.socket]] = []
        weakref.finalize(self, _close_all, self._idle)
        self._tls: ssl.SSLContext | None = None
        self._failures, self._rest_until = 0, 0.0

    @classmethod
    def fits(cls, address: CloudAddress, settings: CloudSettings) -> bool:
        """Whether a signed address is all it takes to read an object: S3, no proxy, nothing special asked for."""
        return address.service == "s3" and not address.anonymous and not settings.config and not _proxies()

    def open(self, uri: str, key: str, path: str) -> SocketBody | None:
        """The body; None when the object must be asked for in the other way. `KeyNotFound` when there is none."""
        if self._failures >= _ENOUGH and self._clock.monotonic() < self._rest_until:
            return None
        found: SocketBody | bytes = b""
        try:
            found = self._ask(self._sign(path))
        except Exception as exc:  # whatever it is, the other way is tried, and tells
            if isinstance(exc, TIMED_OUT) and self._has_no_more_patience:
                message = f"cannot read `{key}` in {uri}: no answer in time"
                raise StoreUnavailable(message, uri=uri, key=key, reason="timeout") from exc
        if isinstance(found, SocketBody):
            found.uri, found.key = uri, key
            return found
        if found == b"NoSuchKey":
            self._failures = 0
            raise KeyNotFound(key, uri=uri)
        self._fail()
        return None

    def _fail(self) -> None:
        self._failures += 1
        self._rest_until = self._clock.monotonic() + _REST_S

    @property
    def _has_no_more_patience(self) -> bool:
        """Whether waiting for one answer that did not come was all the waiting that is wanted."""
        return self._settings.retry_timeout_s <= self._settings.read_timeout_s

    def _ask(self, url: str) -> SocketBody | bytes:
        """A body, or the service's word for why there is none."""
        parts = urlsplit(url)
        place = (parts.scheme, parts.netloc)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "User-Agent: atoll\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode("ascii")
        while (connection := self._take_idle(place)) is not None:
            try:
                return self._answer(place, connection, request)
            except TIMED_OUT:
                raise  # a new connection would be as silent
            except OSError:
                continue  # it had been closed while nobody used it
        return self._answer(place, self._connect(parts.scheme, parts.hostname or "", parts.port), request)

    def _answer(self, place: tuple[str, str], connection: socket.socket, request: bytes) -> SocketBody | bytes:
        try:
            connection.sendall(request)
            head = _read_head(connection)
            if head.size is None or head.size < len(head.more):
                raise ValueError("no telling where the body ends")
        except BaseException:
            connection.close()
            raise

        def let_go(used: socket.socket) -> None:
            if head.status == 200:
                self._failures = 0  # it has come to its end
            if head.is_last:
                used.close()
            else:
                self._keep(place, used)

        body = SocketBody(connection, head, head.size, let_go, self._fail)
        return body if head.status == 200 else _refusal(head.status, body)

    def _connect(self, scheme: str, host: str, port: int | None) -> socket.socket:
        is_tls = scheme == "https"
        connection = socket.create_connection(
            (host, port or (443 if is_tls else 80)), timeout=self._settings.connect_timeout_s
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return self._wrapped(connection, host) if is_tls else self._waiting(connection)
        except BaseException:
            connection.close()
            raise

    def _wrapped(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        # With the kernel's time-outs instead, OpenSSL would be asked again and again, for ever.
        wrapped = self._context().wrap_socket(connection, server_hostname=host)
        wrapped.settimeout(self._settings.read_timeout_s)
        return wrapped

    def _waiting(self, connection: socket.socket) -> socket.socket:
        # Python's own time-outs make a socket return with whatever is there; the kernel's let it wait for all we asked.
        connection.settimeout(None)
        whole, part = divmod(max(self._settings.read_timeout_s, 1e-3), 1)
        patience = struct.pack("ll", int(whole), int(part * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                context = ssl.create_default_context()
                if (ca_file := ca_file_of(self._settings)) is not None:
                    context.load_verify_locations(os.fspath(ca_file))
                self._tls = context
            return self._tls

    def _take_idle(self, place: tuple[str, str]) -> socket.socket | None:
        while (connection := self._pop_idle(place)) is not None:
            if not _has_news(connection):
                return connection
            connection.close()
        return None

    def _pop_idle(self, place: tuple[str, str]) -> socket.socket | None:
        with self._lock:
            for i in reversed(range(len(self._idle))):
                if self._idle[i][0] == place:
                    return self._idle.pop(i)[1]
        return None

    def _keep(self, place: tuple[str, str], connection: socket.socket) -> None:
        with self._lock:
            self._idle.append((place, connection))
            surplus = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        if surplus is not None:
            surplus.close()


def _proxies() -> dict[str, str]:
    return {scheme: where for scheme, where in getproxies().items() if scheme != "no"}


def _close_all(idle: list[tuple[tuple[str, str], socket.socket]]) -> None:
    for _, connection in idle:
        connection.close()


def _has_news(connection: socket.socket) -> bool:
    """Whether an idle connection has been closed, or holds bytes nobody asked for: the next answer is not ours then."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0)) or (isinstance(connection, ssl.SSLSocket) and connection.pending() > 0)


def _refusal(status: int, body: SocketBody) -> bytes:
    """The service's word for why there is no object, if that is what it says."""
    text = bytearray(min(body.size, _MOST_HEAD_BYTES))
    try:
        body.readinto(memoryview(text))
    finally:
        body.close()
    code = bytes(text).partition(b"<Code>")[2].partition(b"</Code>")[0]
    return code if status == 404 else b""


def _read_head(connection: socket.socket) -> Head:
    """The status and headers of an answer. `OSError` when there is none, `ValueError` when it is not one."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionResetError("the connection was closed")
        raw += piece
        if len(raw) > _MOST_HEAD_BYTES:
            raise ValueError("too long a head")
    head, _, more = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not an answer of HTTP/1")
    headers = (line.partition(b":") for line in lines)
    return Head(version, int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in headers}, more)
