"""Fixtures: one peer for a session, as new for each test, with the variables that lead to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from services.peer_bench import enter

if TYPE_CHECKING:
    from services.hf_jobs.server import Peer


@pytest.fixture(scope="session")
def shared_hub() -> Iterator[Peer]:
    from services.hf_jobs.server import Peer

    peer = Peer()
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture
def hub(shared_hub: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    enter(monkeypatch, shared_hub)
    yield shared_hub
    shared_hub.reset()
