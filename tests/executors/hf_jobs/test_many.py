"""A hundred replicas: how many requests a launch, a status and a cancel take."""

from __future__ import annotations

from atoll.context import RunContext
from atoll.spec import Placement
from atoll.status import ReplicaState

REPLICAS = 100


def test_requests_of_a_hundred_replicas(hub, executor, capsys):
    hub.admits.clear()
    hub.page_size = 40
    made = executor()
    plan = made.plan(RunContext("many", "file:///x"), Placement(replicas=REPLICAS))
    made.preflight(plan)
    handle = made.submit(plan)
    launch = dict(hub.calls)
    hub.calls.clear()
    assert [replica.state for replica in executor().status(handle).replicas] == [ReplicaState.PENDING] * REPLICAS
    status = dict(hub.calls)
    hub.calls.clear()
    executor().cancel(handle)
    cancel = dict(hub.calls)
    with capsys.disabled():
        print(f"\n  100 replicas, 40 jobs a page: launch {launch}, status {status}, cancel {cancel}")
    assert launch == {"hardware": 1, "list": 1 + 3, "run": REPLICAS}
    assert status == {"list": 3}
    assert cancel["cancel"] == REPLICAS
    assert cancel.keys() == {"cancel", "list"}
