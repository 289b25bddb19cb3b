"""Two hundred replicas on the real control plane: every rank is reported, with two calls for each status."""

from __future__ import annotations

import pytest

from atoll.kube.names import CONTROLLER_UID
from atoll.status import Reason, ReplicaState
from services.kubernetes.fault_proxy import FaultProxy
from services.kubernetes.scenario import Scenario, rows

RUNNING, SUCCEEDED, FAILED = ReplicaState.RUNNING, ReplicaState.SUCCEEDED, ReplicaState.FAILED
COUNT = 200


def paths(proxy: FaultProxy, first: int) -> list[str]:
    return [call.path.rpartition("/")[2] for call in proxy.calls[first:]]


@pytest.mark.slow
def test_two_hundred_replicas(scenario: Scenario, tmp_path):
    flag = tmp_path / "go"
    script = f"until [ -e {flag}-$((REPLICA_RANK % 2)) ]; do sleep 2; done; exit $((REPLICA_RANK == 199 ? 3 : 0))"
    run = scenario.program(script, COUNT, grace_s=1)
    executor, handle = run.executor, run.handle
    status = scenario.until(run, lambda found: found.counts() == {RUNNING: COUNT}, timeout_s=240)
    assert rows(status) == [(RUNNING, Reason.OK, None, 0)] * COUNT
    first = len(scenario.proxy.calls)
    executor.status(handle)
    assert paths(scenario.proxy, first) == [handle.native_id, "pods"]
    (tmp_path / "go-1").touch()
    odd = {(SUCCEEDED, Reason.OK, 0, 0)}
    status = scenario.until(run, lambda found: found.counts().get(RUNNING) == COUNT // 2, timeout_s=240)
    assert set(rows(status)[1:-1:2]) == odd
    assert rows(status)[-1] == (FAILED, Reason.USER_ERROR, 3, 0)
    assert set(rows(status)[::2]) == {(RUNNING, Reason.OK, None, 0)}
    uid = scenario.job(run)["metadata"]["uid"]
    run.cancel()
    left = scenario.namespace.api.items(scenario.namespace.path("pods"), labelSelector=f"{CONTROLLER_UID}={uid}")
    assert left == []
    assert scenario.namespace.api.items(scenario.namespace.path("jobs")) == []
    scenario.transcripts.clear()  # it would be too large
