"""The peer, and an executor in front of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.executors.hf_jobs.executor import HubJobsExecutor
from services.hf_jobs.bench import HASTE, SETTINGS, HFJobsBench
from services.hf_jobs.server import Peer


@pytest.fixture
def bench(tmp_path: Path, hub: Peer) -> HFJobsBench:
    return HFJobsBench.below(tmp_path, hub)


@pytest.fixture
def executor(hub: Peer) -> Callable[..., HubJobsExecutor]:
    """Builds executors with short pauses."""

    def build(**settings: Any) -> HubJobsExecutor:
        return HubJobsExecutor(**{**SETTINGS, **HASTE, **settings})

    return build
