"""The AppWrapper executor keeps the Executor contract: real controllers, real processes behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.namespace import Namespace
from services.kubernetes.wrapper_bench import WrapperBench

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.controllers]


class TestAppWrapper(ExecutorContract):
    """All clauses, in a queue of Kueue."""

    adapter = "atoll.executors.appwrapper.executor:AppWrapperExecutor"
    most_steps = 6
    most_interrupts = 3

    @pytest.fixture
    def bench(self, tmp_path: Path, queue_namespace: QueueNamespace) -> Iterator[Bench]:
        queue = queue_namespace.queue(cpu="100")
        with WrapperBench.over(tmp_path, queue_namespace, queue=queue.name) as bench:
            yield bench


_PARTLY = (5, 6, 7, 8, 10, 12, 18, 19, 20, 21, 22, 23, 24)
_LEFT_OUT = [name for name in dir(ExecutorContract) if name.startswith("test_e") and int(name[6:8]) not in _PARTLY]


class PartlyKept(ExecutorContract):
    """The clauses about ends, cancels and launches: the others do not depend on the controller."""

    adapter = TestAppWrapper.adapter
    most_steps = 3
    most_interrupts = 2
    locals().update(dict.fromkeys(_LEFT_OUT))


class TestAppWrapperAlone(PartlyKept):
    """Without a queue."""

    @pytest.fixture
    def bench(self, tmp_path: Path, queue_namespace: QueueNamespace) -> Iterator[Bench]:
        with WrapperBench.over(tmp_path, queue_namespace) as bench:
            yield bench


class TestMCAD(PartlyKept):
    @pytest.fixture
    def bench(self, tmp_path: Path, mcad_namespace: Namespace) -> Iterator[Bench]:
        with WrapperBench.over(tmp_path, mcad_namespace) as bench:
            yield bench
