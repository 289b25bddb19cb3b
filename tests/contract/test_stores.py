"""Every store adapter keeps the Store contract."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.stores.base import Store
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FaultyStore
from atoll.testing.store_contract import NewStore, StoreContract


class TestMemoryStore(StoreContract):
    why_one_process_only = "the objects are in this process's memory"
    why_no_faults = "a dictionary neither refuses nor fails nor loses answers"

    @pytest.fixture
    def new_store(self) -> NewStore:
        unique = uuid.uuid4().hex
        return lambda name: MemoryStore(f"{unique}/{name}")


class TestFileStore(StoreContract):
    why_no_faults = "a file system neither throttles nor answers `conflict`"

    @pytest.fixture
    def new_store(self, tmp_path: Path) -> NewStore:
        return lambda name: FileStore(tmp_path / "a folder, with ünusual name" / name)

    @pytest.fixture
    def refused_store(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> Store:
        _os_says(monkeypatch, errno.EACCES, store.root)
        return store

    @pytest.fixture
    def unreachable_store(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> Store:
        _os_says(monkeypatch, errno.ESTALE, store.root)
        return store

    @pytest.fixture
    def answer_losing_store(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
        link, is_first = os.link, [True]

        def link_twice(source: str, target: str) -> None:
            link(source, target)
            if is_first.pop() if is_first else False:
                link(source, target)

        monkeypatch.setattr(os, "link", link_twice)
        return store


class TestRecyclingFileStore(TestFileStore):
    @pytest.fixture
    def new_store(self, tmp_path: Path) -> NewStore:
        return lambda name: FileStore(tmp_path / name, recycle=True)


class TestFaultyStoreWithoutFaults(StoreContract):
    why_no_faults = "faults are scripted by the test that uses it"

    @pytest.fixture
    def new_store(self, tmp_path: Path) -> NewStore:
        return lambda name: FaultyStore(FileStore(tmp_path / name))


def _os_says(monkeypatch: pytest.MonkeyPatch, code: int, root: Path) -> None:
    """Every call into the file system about something below `root` fails with this errno."""
    for name in ("open", "unlink", "scandir", "mkdir", "replace", "link"):
        monkeypatch.setattr(os, name, _failing(getattr(os, name), code, root))


def _failing(call: Callable[..., Any], code: int, root: Path) -> Callable[..., Any]:
    def fail_below(path: Any, *rest: Any, **named: Any) -> Any:
        if str(path).startswith(str(root)):
            raise OSError(code, os.strerror(code), str(path))
        return call(path, *rest, **named)

    return fail_below
