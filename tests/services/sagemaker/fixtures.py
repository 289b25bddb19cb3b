"""Fixtures: one peer for a session, as new for each test, with the variables that lead to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from services.peer_bench import enter

if TYPE_CHECKING:
    from services.sagemaker.server import Peer


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[Peer]:
    from services.sagemaker.server import Peer  # imports moto, which takes a second

    peer = Peer()
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture
def peer(shared_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    enter(monkeypatch, shared_peer)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield shared_peer
    shared_peer.reset()
