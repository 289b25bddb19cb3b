"""Modal keeps the Executor contract: the real client over a socket, real processes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.modal.bench import ModalBench
from services.modal.server import Peer


class TestModal(ExecutorContract):
    adapter = "atoll.executors.modal.executor:ModalExecutor"
    launchers = 8
    most_steps = 5
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, modal_peer: Peer) -> Bench:
        return ModalBench.below(tmp_path, modal_peer)
