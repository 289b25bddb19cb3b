"""A store seen through one replica's link: every byte is counted, and takes its time if the link is narrow."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from atoll.context import ReplicaContext
from atoll.registry import open_store
from atoll.stores.base import Buffer, Data, Store, pieces


class Link:
    """One direction of a connection: what is sent through it waits for what was sent before."""

    def __init__(self, bytes_s: float | None) -> None:
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, size: int) -> None:
        if self._bytes_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_s
            arrives_at = self._free_at
        time.sleep(max(0.0, arrives_at - time.monotonic()))


class LinkedStore:
    """Another store, through a link of `bytes_s` bytes a second each way; None is as fast as the store is.

    The initial weights and the last snapshot, which are no part of the training loop, do not use the link.
    """

    def __init__(self, inner: Store, bytes_s: float | None = None) -> None:
        self.inner, self.uri = inner, inner.uri
        self.bytes_up: Counter[str] = Counter()
        """By what the objects are for; see `purpose`."""
        self.bytes_down: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._up, self._down = Link(bytes_s), Link(bytes_s)
        self._lock = threading.Lock()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        self._count("get", key)
        data = self.inner.get(key, start=start, length=length)
        size = memoryview(data).nbytes
        self._count("", key, down=size)
        self._carry(self._down, key, size)
        return data

    def put(self, key: str, data: Data) -> None:
        self._send("put", key, data)
        self.inner.put(key, data)

    def create(self, key: str, data: Data) -> None:
        self._send("create", key, data)
        self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[str]:
        self._count("list", prefix)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self._count("delete", key)
        self.inner.delete(key)

    def _send(self, verb: str, key: str, data: Data) -> None:
        size = sum(part.nbytes for part in pieces(data))
        self._count(verb, key, up=size)
        self._carry(self._up, key, size)

    def _carry(self, link: Link, key: str, size: int) -> None:
        if purpose(key) != "state":
            link.carry(size)

    def _count(self, verb: str, key: str, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            if verb:
                self.requests[verb] += 1
            self.bytes_up[purpose(key)] += up
            self.bytes_down[purpose(key)] += down


def purpose(key: str) -> str:
    """What an object is for: `state` (initial weights, snapshots), `metrics`, or `rounds` with all their records."""
    parts = key.split("/")
    if {"blobs", "snapshots", "checkpoints"} & set(parts):
        return "state"
    return "metrics" if "metrics" in parts else "rounds"


@dataclass(frozen=True)
class LinkedContext(ReplicaContext):
    """A replica behind a link of its own."""

    bytes_s: float | None = None

    @cached_property
    def store(self) -> LinkedStore:
        return LinkedStore(open_store(self.store_uri), self.bytes_s)
