"""The Kubernetes executor keeps the Executor contract: a real control plane, real processes behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.kubernetes.bench import KubernetesBench
from services.kubernetes.namespace import Namespace

pytestmark = [pytest.mark.process, pytest.mark.server]


class TestKubernetes(ExecutorContract):
    adapter = "atoll.executors.kubernetes.executor:KubernetesExecutor"
    most_steps = 6
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, namespace: Namespace) -> Iterator[Bench]:
        with KubernetesBench.below(tmp_path, namespace) as bench:
            yield bench
