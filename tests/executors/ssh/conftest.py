"""Hosts, and an executor in front of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.executors.ssh.executor import SshExecutor
from services.ssh.bench import SshBench, settings_of
from services.ssh.peer import Peer


@pytest.fixture
def bench(tmp_path: Path, hosts: Peer) -> SshBench:
    return SshBench.below(tmp_path, hosts)


@pytest.fixture
def executor(hosts: Peer) -> Callable[..., SshExecutor]:
    """Builds executors for the hosts."""

    def build(**settings: Any) -> SshExecutor:
        return SshExecutor(**{**settings_of(hosts), **settings})

    return build
