"""The probe accepts stores that keep their promise and refuses those that do not, with the reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from atoll.errors import KeyExists, StoreError, StoreUnavailable
from atoll.stores.base import Data
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore
from atoll.stores.probe import probe, probe_create
from atoll.testing.fakes import FaultyStore
from services.stores import Service


def test_a_good_store_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    for store in (MemoryStore(), FileStore(tmp_path)):
        report = probe(store)
        assert len(report.checks) == 4
        assert list(store.list()) == []


class Overwrites(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        self.put(key, data)


class LooksFirst(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        if key in self.list(key):
            raise KeyExists(key)
        time.sleep(0.005)
        self.put(key, data)


class RefusesButWrites(MemoryStore):
    def create(self, key: str, data: Data) -> None:
        is_taken = key in self.list(key)
        self.put(key, data)
        if is_taken:
            raise KeyExists(key)


class WritesInPlace(MemoryStore):
    def put(self, key: str, data: Data) -> None:
        super().put(key, b"part")
        time.sleep(0.005)
        super().put(key, data)


class KeepsTheDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Overwrites, "overwrites"),
        (LooksFirst, "race"),
        (RefusesButWrites, "overwrites_when_refused"),
        (WritesInPlace, "torn"),
        (KeepsTheDeleted, "still_read"),
    ],
)
def test_a_broken_store_is_refused_with_the_reason(broken: type[MemoryStore], reason: str) -> None:
    store = broken()
    with pytest.raises(StoreError) as caught:
        probe(store)
    assert (caught.value.uri, caught.value.reason) == (store.uri, reason)
    assert caught.value.hint


def test_a_store_that_does_not_answer_is_not_called_broken() -> None:
    store = FaultyStore(MemoryStore())
    store.fail("create", times=None)
    with pytest.raises(StoreUnavailable):
        probe(store)


def test_an_s3_server_that_ignores_the_condition_is_refused(
    rclone: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _open(rclone, monkeypatch)
    store.put("a", b"plain writes work")
    with pytest.raises(StoreError) as caught:
        store.create("b", b"x")
    assert caught.value.reason == "overwrites"
    assert list(store.list()) == ["a"]


def test_a_real_s3_server_passes(seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _open(seaweed, monkeypatch)
    probe_create(store)
    assert len(probe(store, writers=8).checks) == 4
    assert list(store.list()) == []


def _open(service: Service, monkeypatch: pytest.MonkeyPatch) -> object:
    from atoll.stores.cloud.store import CloudStore

    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    return CloudStore.from_uri(service.uri(service.new_place()))
