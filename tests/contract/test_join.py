"""Machines that join keep the Executor contract: each is a process that runs `atoll join`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.join.bench import JoinBench, Park

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def park() -> Iterator[Park]:
    made = Park()
    yield made
    made.close()


class TestJoin(ExecutorContract):
    adapter = "atoll.executors.join.executor:JoinExecutor"
    launchers = 8
    most_steps = 4
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, park: Park) -> Iterator[Bench]:
        monkeypatch.setenv("CONTRACT_VAULT", "hunter2 hunter3")
        monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
        yield JoinBench.below(tmp_path, park)
        park.clear()
