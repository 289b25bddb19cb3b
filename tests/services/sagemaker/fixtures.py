"""Fixtures: one peer for a session, as new for each test, with the variables that lead to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.sagemaker.server import Peer

_open: list[Peer] = []
"""pytest takes a fixture that several modules import for several fixtures; they share one peer."""


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[Peer]:
    is_first = not _open
    if is_first:
        _open.append(Peer())
    try:
        yield _open[0]
    finally:
        if is_first:
            _open.pop().close()


@pytest.fixture
def peer(shared_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    for name, value in shared_peer.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield shared_peer
    shared_peer.reset()
