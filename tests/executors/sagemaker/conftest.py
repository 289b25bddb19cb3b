"""The peer, and an executor in front of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from services.sagemaker.bench import HASTE, SETTINGS, SageMakerBench
from services.sagemaker.server import Peer


@pytest.fixture
def bench(tmp_path: Path, peer: Peer) -> SageMakerBench:
    return SageMakerBench.below(tmp_path, peer)


@pytest.fixture
def executor(peer: Peer) -> Callable[..., SageMakerTrainingExecutor]:
    """Builds executors that do not dawdle."""

    def build(**settings: Any) -> SageMakerTrainingExecutor:
        return SageMakerTrainingExecutor(**{**SETTINGS, **HASTE, **settings})

    return build
