"""Sizes of objects: from stores that can list them, and None from those that cannot."""

from __future__ import annotations

import pytest

from atoll.registry import open_store
from atoll.stores.fast import list_sizes


class Plain:
    """A store with the five methods only."""

    def __init__(self, inner) -> None:
        self._inner, self.uri = inner, inner.uri

    def list(self, prefix=""):
        return self._inner.list(prefix)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_objects_are_listed_with_their_sizes(kind, tmp_path):
    store = open_store(f"memory://{tmp_path.name}" if kind == "memory" else str(tmp_path / "store"))
    for key, size in {"a/1": 3, "a/2": 0, "b": 5}.items():
        store.put(key, b"x" * size)
    assert list(list_sizes(store)) == [("a/1", 3), ("a/2", 0), ("b", 5)]
    assert list(list_sizes(store, "a/")) == [("a/1", 3), ("a/2", 0)]
    assert list(list_sizes(store, "c/")) == []
    assert list(list_sizes(Plain(store), "a/")) == [("a/1", None), ("a/2", None)]
