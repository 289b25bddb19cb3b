"""A cancel waits for a machine that only looks silent, because its clock is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.executors.join.executor import JoinExecutor
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing.fakes import FakeClock

KEYS = RunKeys("exp")


class Machine(FakeClock):
    """A machine with a wrong clock that acts while the cancel sleeps. It ends its replica if it `obeys`."""

    def __init__(self, folder: Path, *, obeys: bool) -> None:
        super().__init__()
        self.store, self._obeys = open_store(folder), obeys
        self.slept_s = 0.0

    def put(self, key: str, **record: Any) -> None:
        self.store.put(key, json.dumps(record).encode())

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept_s += seconds
        if self._obeys and self.slept_s > 1.0:
            self.put(KEYS.outcome(0, 0), state=ReplicaState.CANCELLED, reason=Reason.CANCELLED, message="")


@pytest.mark.parametrize("obeys", [True, False])
def test_a_machine_with_a_wrong_clock_is_waited_for(tmp_path: Path, obeys: bool) -> None:
    machine = Machine(tmp_path, obeys=obeys)
    executor = JoinExecutor(clock=machine)
    plan = executor.plan(RunContext("exp", machine.store.uri), Placement(replicas=1))
    handle = executor.start(plan)
    machine.put(KEYS.start(0, 0), host="far", pid=7, at=machine.time() - 3600)
    executor.cancel(handle)
    assert machine.slept_s > (1.0 if obeys else 25.0)
    assert [*machine.store.list(KEYS.starts_prefix(0))] == [KEYS.start(0, 0), *([] if obeys else [KEYS.start(0, 1)])]
