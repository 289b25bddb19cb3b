"""The peer, and an executor in front of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.executors.modal.executor import ModalExecutor
from services.modal.bench import HASTE, SETTINGS, ModalBench
from services.modal.server import Peer


@pytest.fixture
def bench(tmp_path: Path, modal_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> ModalBench:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    return ModalBench.below(tmp_path, modal_peer)


@pytest.fixture
def executor(modal_peer: Peer) -> Callable[..., ModalExecutor]:
    """Builds executors with short pauses."""

    def build(**settings: Any) -> ModalExecutor:
        return ModalExecutor(**{**SETTINGS, **HASTE, **settings})

    return build
