"""Objects in a dictionary, for tests and for runs in one process. One name is one store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from atoll.errors import ConfigError, KeyExists, KeyNotFound
from atoll.stores.base import Buffer, Data, check_key, check_prefix, check_range, pieces

_SCHEME, _PRIVATE = "memory://", "private-"


class _Objects:
    """The objects of one name, and the lock that makes each operation atomic."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.by_key: dict[str, bytes] = {}


_stores: WeakValueDictionary[str, _Objects] = WeakValueDictionary()
_named: dict[str, _Objects] = {}  # keeps named stores alive until the process ends
_registry = Lock()


class MemoryStore:
    """`memory://name`. Without a name the store is private and ends with its last reference."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name or f"{_PRIVATE}{uuid.uuid4().hex[:12]}"
        self.uri = _SCHEME + self._name
        with _registry:
            self._objects = _stores.setdefault(self._name, _Objects())
            if not self._name.startswith(_PRIVATE):
                _named.setdefault(self._name, self._objects)

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> MemoryStore:
        if options:
            raise ConfigError(f"a memory store has no options; got {', '.join(sorted(options))}")
        name = uri.removeprefix(_SCHEME)
        if not name or name == uri:
            raise ConfigError(f"not the address of a memory store: {uri!r}", hint="write memory://some-name")
        return cls(name)

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        check_range(start, length)
        with self._objects.lock:
            found = self._objects.by_key.get(check_key(key))
        if found is None:
            raise KeyNotFound(key, uri=self.uri)
        return found[start:] if length is None else found[start : start + length]

    def put(self, key: str, data: Data) -> None:
        whole = b"".join(pieces(data))
        with self._objects.lock:
            self._objects.by_key[check_key(key)] = whole

    def create(self, key: str, data: Data) -> None:
        whole = b"".join(pieces(data))
        with self._objects.lock:
            if check_key(key) in self._objects.by_key:
                raise KeyExists(key, uri=self.uri)
            self._objects.by_key[key] = whole

    def list(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        with self._objects.lock:
            found = sorted(key for key in self._objects.by_key if key.startswith(prefix))
        return iter(found)

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        check_prefix(prefix)
        with self._objects.lock:
            found = sorted((key, len(data)) for key, data in self._objects.by_key.items() if key.startswith(prefix))
        return iter(found)

    def delete(self, key: str) -> None:
        with self._objects.lock:
            self._objects.by_key.pop(check_key(key), None)
