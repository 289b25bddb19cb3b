"""Client CPU for one stream of big bodies: our CloudStore against a bare socket, same server, same bytes."""

from __future__ import annotations

import os
import resource
import socket
import statistics
from collections.abc import Callable
from urllib.parse import urlsplit

from atoll.stores.cloud import CloudStore
from wire.server import BUCKET, WireServer


class RawSocket:
    """One kept-alive HTTP connection that neither parses nor copies more than it must."""

    def __init__(self, server: WireServer) -> None:
        self._host = urlsplit(server.endpoint).netloc
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._head = bytearray(65536)

    def put(self, key: str, body: memoryview) -> None:
        head = f"PUT /{BUCKET}/{key} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {body.nbytes}\r\n\r\n"
        self._socket.sendall(head.encode())
        self._socket.sendall(body)
        self._answer(b"20")

    def get(self, key: str, into: memoryview) -> None:
        self._socket.sendall(f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())
        early = self._answer(b"200")
        into[: len(early)] = early
        filled = len(early)
        while filled < into.nbytes:
            filled += self._socket.recv_into(into[filled:])

    def close(self) -> None:
        self._socket.close()

    def _answer(self, status: bytes) -> bytes:
        """Read the head of an answer; what came of the body with it."""
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._socket.recv(4096)
        assert got[9:].startswith(status), got[:200]
        return got.partition(b"\r\n\r\n")[2]


def cpu_per_gb(server: WireServer, body_bytes: int, count: int, repeat: int) -> dict[str, float]:
    """Median CPU seconds per GB of `put`, `raw put`, `get`, `raw get`; measured in turn."""
    os.environ.update(AWS_ACCESS_KEY_ID="wire", AWS_SECRET_ACCESS_KEY="wire")
    store, raw = CloudStore.from_uri(server.uri("cpu"), unsigned_payload=True), RawSocket(server)
    body, room = memoryview(bytearray(os.urandom(1 << 20) * (body_bytes >> 20))), memoryview(bytearray(body_bytes))
    keys = [f"{body_bytes}-{i}" for i in range(count)]
    works: dict[str, Callable[[str], object]] = {
        "raw put": lambda key: raw.put(f"cpu/{key}", body),
        "put": lambda key: store.put(key, body),
        "raw get": lambda key: raw.get(f"cpu/{key}", room),
        "get": lambda key: store.get(key),
    }
    seen: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeat + 1):
        for name, work in works.items():
            before = _cpu_s()
            for key in keys:
                work(key)
            if turn:  # the first one pays for connections and pages
                seen[name].append((_cpu_s() - before) / (body_bytes * count / 1e9))
    assert bytes(store.get(keys[0])[:64]) == bytes(room[:64]) == bytes(body[:64])
    for key in keys:
        store.delete(key)
    raw.close()
    return {name: statistics.median(values) for name, values in seen.items()}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
