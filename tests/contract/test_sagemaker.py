"""SageMaker keeps the Executor contract: real boto3 over a socket, real processes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.sagemaker.bench import SageMakerBench
from services.sagemaker.server import Peer


class TestSageMaker(ExecutorContract):
    adapter = "atoll.executors.sagemaker.executor:SageMakerTrainingExecutor"
    most_steps = 8
    most_interrupts = 4

    @pytest.fixture
    def bench(self, tmp_path: Path, peer: Peer) -> Bench:
        return SageMakerBench.below(tmp_path, peer)
