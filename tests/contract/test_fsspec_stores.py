"""An fsspec file system that can `create` keeps the Store contract; here one that keeps objects in memory."""

from __future__ import annotations

import uuid
from threading import Lock
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from atoll.stores.fsspec import FsspecStore
from atoll.testing.store_contract import NewStore, StoreContract


class Objects(MemoryFileSystem):
    """fsspec's files in memory, as an object store keeps them: `create` is one step, and `a` may stand beside `a/b`."""

    protocol = "objects"
    _lock: ClassVar[Lock] = Lock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self._lock:
            super().pipe_file(path, value, mode=mode, **kwargs)

    def find(self, path: str, **_: Any) -> list[str]:
        return sorted(key for key in list(self.store) if key.startswith(f"{path}/"))


class TestFsspecStore(StoreContract):
    why_one_process_only = "the objects are in this process's memory"
    why_no_faults = "fsspec has no place for an owner's mark, and its errors are each file system's own"

    @pytest.fixture
    def new_store(self) -> NewStore:
        fsspec.register_implementation("objects", f"{__name__}.Objects", clobber=True)
        place = uuid.uuid4().hex
        return lambda name: FsspecStore(f"objects://{place}/{name}")
