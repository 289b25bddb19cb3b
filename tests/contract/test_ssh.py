"""The ssh executor keeps the Executor contract: OpenSSH's own client, a real sshd, real processes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.ssh.bench import SshBench
from services.ssh.peer import Peer


class TestSsh(ExecutorContract):
    adapter = "atoll.executors.ssh.executor:SshExecutor"
    launchers = 4
    most_steps = 4
    most_interrupts = 2

    @pytest.fixture
    def bench(self, tmp_path: Path, hosts: Peer) -> Bench:
        return SshBench.below(tmp_path, hosts)
