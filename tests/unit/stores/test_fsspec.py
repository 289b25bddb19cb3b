"""fsspec file systems that cannot keep the promise are refused, with the reason, before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from atoll.errors import ConfigError, MissingExtra, StoreError
from atoll.stores.fsspec import FsspecStore


def test_a_file_system_without_a_create_of_its_own_is_refused_when_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        FsspecStore(f"local://{tmp_path}")
    assert caught.value.reason == "not_atomic"
    assert list(tmp_path.iterdir()) == []


class IgnoresTheCondition(MemoryFileSystem):
    """Has a `create` of its own, which overwrites."""

    protocol = "ignores"
    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value)


def test_a_file_system_that_fails_the_probe_is_refused_at_the_first_create() -> None:
    fsspec.register_implementation("ignores", IgnoresTheCondition, clobber=True)
    store = FsspecStore("ignores://refused")
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            store.create("a", b"x")
        assert (caught.value.uri, caught.value.reason) == ("ignores://refused", "overwrites")
    assert list(store.list()) == []


def test_reads_and_writes_go_through() -> None:
    store = FsspecStore("memory://plain")
    store.put("a/b", [b"01", b"234"])
    assert store.get("a/b", start=1, length=3) == b"123"
    assert list(store.list("a/")) == ["a/b"]
    store.delete("a/b")
    store.delete("a/b")
    assert list(store.list()) == []


@pytest.mark.parametrize("uri", ["nosuchscheme://x", "simplecache::memory://x"])
def test_what_cannot_be_opened_says_so(uri: str) -> None:
    with pytest.raises(ConfigError):
        FsspecStore(uri)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra) as caught:
        FsspecStore("memory://x")
    assert caught.value.extra == "fsspec"
