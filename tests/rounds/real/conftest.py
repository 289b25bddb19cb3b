"""Rounds between real processes, over a folder and over a real S3 server: the same test bodies for both."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from offspring import Nursery, Place, nursery_in

from atoll.registry import open_store
from services.stores import Service


@pytest.fixture(scope="session")
def warm_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(
        tmp_path_factory.mktemp("nursery"), "real_replica", "racer", "named_replica", "obstore.store"
    ) as made:
        yield made


@pytest.fixture(scope="session")
def torch_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery"), "torch_replica", "obstore.store") as made:
        yield made


@pytest.fixture
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """Starts real processes; those that a test leaves behind are ended. Modules named `test_torch…` get torch."""
    has_torch = request.path.name.startswith("test_torch")
    warm: Nursery = request.getfixturevalue("torch_nursery" if has_torch else "warm_nursery")
    warm.environment = {}
    try:
        yield warm
    finally:
        warm.end_children()


@pytest.fixture
def s3(seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    open_store(seaweed.uri(seaweed.new_place())).put("bucket", b"is made by the first write")
    return seaweed


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, nursery: Nursery) -> Place:
    """Where the replicas of a test meet."""
    uri = (tmp_path / "store").as_uri()
    if request.param == "s3":
        service = request.getfixturevalue("s3")
        nursery.environment = service.environment
        uri = service.uri(service.new_place())
    return Place(request.param, uri, open_store(uri))


@pytest.fixture
def run_id() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"
