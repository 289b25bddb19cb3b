"""Fixtures: one peer for a session, as new for each test, with the variables that lead to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from services.peer_bench import enter

if TYPE_CHECKING:
    from services.modal.server import Peer


@pytest.fixture(scope="session")
def shared_modal_peer() -> Iterator[Peer]:
    from services.modal.server import Peer  # imports modal, which takes a second

    peer = Peer()
    try:
        yield peer
    finally:
        close_client()
        peer.close()


def close_client() -> None:
    """Close the connection that the client keeps for this process."""
    from modal.client import Client, _Client

    if _Client._client_from_env is not None:
        Client.from_env()._close()


@pytest.fixture
def modal_peer(shared_modal_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    enter(monkeypatch, shared_modal_peer)
    yield shared_modal_peer
    shared_modal_peer.reset()
