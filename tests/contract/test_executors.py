"""Every executor keeps the Executor contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.bench import Bench, LocalBench
from atoll.testing.executor_contract import ExecutorContract
from atoll.testing.scripted.bench import ScriptedBench

pytestmark = [pytest.mark.process, pytest.mark.server]


class TestLocal(ExecutorContract):
    adapter = "atoll.executors.local.executor:LocalExecutor"

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("CONTRACT_VAULT", "hunter2 hunter3")
        return LocalBench.below(tmp_path)


class TestScripted(ExecutorContract):
    adapter = "atoll.testing.scripted.executor:ScriptedExecutor"

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        with ScriptedBench.below(tmp_path) as bench:
            yield bench


class TestScriptedGroup(ExecutorContract):
    adapter = "atoll.testing.scripted.executor:ScriptedGroupExecutor"
    most_steps = 6
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        with ScriptedBench.below(tmp_path, group=True) as bench:
            yield bench
