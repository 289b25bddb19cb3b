"""Memory stores: a name is one store, no name is a private one."""

from __future__ import annotations

import gc

import pytest

from atoll.errors import ConfigError
from atoll.registry import open_store
from atoll.stores.base import Store
from atoll.stores.memory import MemoryStore


def test_a_named_store_outlives_its_references() -> None:
    MemoryStore("outlives").put("a.json", b"x")
    gc.collect()
    assert open_store("memory://outlives").get("a.json") == b"x"


def test_a_private_store_is_shared_by_uri_and_gone_with_its_last_reference() -> None:
    store = MemoryStore()
    uri = store.uri
    store.put("a.json", b"x")
    assert open_store(uri).get("a.json") == b"x"
    del store
    gc.collect()
    assert list(open_store(uri).list()) == []


def test_a_store_is_a_store() -> None:
    assert isinstance(MemoryStore(), Store)


@pytest.mark.parametrize("uri", ["memory://", "file:///x"])
def test_an_address_without_a_name_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        MemoryStore.from_uri(uri)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="region"):
        MemoryStore.from_uri("memory://x", region="y")
