"""Client CPU for one stream of big bodies: our CloudStore against a bare socket, same server, same bytes."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from urllib.parse import urlsplit

from atoll.kernels.allocator import keep_freed_memory
from atoll.stores.cloud.store import CloudStore
from wire.report import Row
from wire.server import BUCKET, WireServer

_TURNS = 2
"""For each repetition asked for: whose turn it is to do the work of loopback differs, and it is quickly done."""


class RawSocket:
    """One kept-alive HTTP connection that neither parses nor copies more than it must."""

    def __init__(self, endpoint: str) -> None:
        self._host = urlsplit(endpoint).netloc
        host, _, port = self._host.partition(":")
        self._socket = socket.create_connection((host, int(port)))

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


def cpu_per_gb(endpoint: str, uri: str, body_bytes: int, count: int, repeat: int) -> dict[str, float]:
    """Median CPU seconds per GB of `put`, `raw put`, `get`, `raw get`, `aligned get` and `whole get`; measured in turn.

    `get` is what rounds do: the body is read into memory that is there; `whole get` makes memory of its own for it.

    For a process of its own: the bare socket's buffer is to be where a plain program would have it.
    """
    room = memoryview(bytearray(body_bytes))
    body, aligned, mine = (memoryview(mmap.mmap(-1, body_bytes)) for _ in range(3))
    body[:] = os.urandom(1 << 20) * (body_bytes >> 20)
    keep_freed_memory()  # as `Tuning(keep_freed_memory=True)` of the other sections
    os.environ.update(AWS_ACCESS_KEY_ID="wire", AWS_SECRET_ACCESS_KEY="wire")
    store, raw = CloudStore.from_uri(uri, unsigned_payload=True), RawSocket(endpoint)
    keys = [f"{body_bytes}-{i}" for i in range(count)]
    works: dict[str, Callable[[str], object]] = {
        "raw put": lambda key: raw.put(f"cpu/{key}", body),
        "put": lambda key: store.put(key, body),
        "raw get": lambda key: raw.get(f"cpu/{key}", room),
        "get": lambda key: _receive(store, key, mine),
        "whole get": lambda key: store.get(key),
        "aligned get": lambda key: raw.get(f"cpu/{key}", aligned),
    }
    seen: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeat + 1):
        for name, work in works.items():
            before = _cpu_s()
            for key in keys:
                work(key)
            if turn:  # the first one pays for connections and pages
                seen[name].append((_cpu_s() - before) / (body_bytes * count / 1e9))
    assert store.get(keys[0]) == room == aligned == mine == body
    for key in keys:
        store.delete(key)
    raw.close()
    return {name: statistics.median(values) for name, values in seen.items()}


def _receive(store: CloudStore, key: str, into: memoryview) -> None:
    body = store.open(key)
    body.readinto(into)
    body.close()


def cpu_rows(server: WireServer, body_mib: int, count: int, repeat: int) -> Iterator[Row]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        work = (cpu_per_gb, server.endpoint, server.uri("cpu"), body_mib << 20, count, _TURNS * repeat)
        seen = pool.submit(*work).result()
    for what, ours, raw, must in (
        ("CPU of PUT / raw socket", "put", "raw put", 1.25),
        ("CPU of GET / raw socket", "get", "raw get", 1.3),
        ("CPU of GET / raw, page-aligned", "get", "aligned get", None),
        ("CPU of GET in one piece / raw", "whole get", "raw get", None),
    ):
        note = f"{seen[ours]:.3f} / {seen[raw]:.3f} CPU s/GB, {count} × {body_mib} MiB"
        yield Row(what, 0, body_mib, seen[ours] / seen[raw], must, note=note)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
