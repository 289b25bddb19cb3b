"""A run on several backends keeps the Executor contract: two parts on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from several_locals import SeveralBench

from atoll.executors.several.executor import SeveralExecutor
from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract

pytestmark = [pytest.mark.process, pytest.mark.server]


class TestSeveral(ExecutorContract):
    adapter = "several_locals:DividingExecutor"
    derived_from = SeveralExecutor
    launchers = 8
    most_steps = 6
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("CONTRACT_VAULT", "hunter2 hunter3")
        return SeveralBench.below(tmp_path)
