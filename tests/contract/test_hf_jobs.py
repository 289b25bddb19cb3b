"""Hugging Face Jobs keeps the Executor contract: the real client over a socket, real processes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.hf_jobs.bench import VAULT, HFJobsBench
from services.hf_jobs.server import Peer


class TestHFJobs(ExecutorContract):
    adapter = "atoll.executors.hf_jobs.executor:HubJobsExecutor"
    launchers = 8
    most_steps = 6
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, hub: Peer, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv(*VAULT)
        return HFJobsBench.below(tmp_path, hub)
