"""A store that ends or stops its own process at one chosen request: what a child gets in place of the plain one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any, TypeVar

from atoll.stores.base import Buffer, Data, Store

T = TypeVar("T")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FatedStore:
    """`fate` is [what, when, verb, pattern, nth]: `kill` or `stop`, `before` or `after`, and which request."""

    def __init__(self, inner: Store, fate: Sequence[Any]) -> None:
        self.inner, self.uri, self._fate, self._seen = inner, inner.uri, fate, 0
        self._lock = Lock()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        return self._do("get", key, lambda: self.inner.get(key, start=start, length=length))

    def put(self, key: str, data: Data) -> None:
        self._do("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: Data) -> None:
        self._do("create", key, lambda: self.inner.create(key, data))

    def list(self, prefix: str = "") -> Iterator[str]:
        return self._do("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    def _do(self, verb: str, key: str, act: Callable[[], T]) -> T:
        what, when, fated_verb, pattern, nth = self._fate
        with self._lock:
            self._seen += verb == fated_verb and fnmatchcase(key, pattern)
            is_due = self._seen == nth
            self._seen += is_due
        if is_due and when == "before":
            os.kill(os.getpid(), _SIGNALS[what])
        try:
            return act()
        finally:
            if is_due and when == "after":
                os.kill(os.getpid(), _SIGNALS[what])
