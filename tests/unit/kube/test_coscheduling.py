"""Why no replica of a PodGroup starts, from pods and events alone."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.kube.gang import COSCHEDULING_GROUP
from atoll.kube.names import INDEX
from atoll.kube.reading import run_status
from atoll.status import Reason, ReplicaState

Object = dict[str, Any]
NODES = "0/3 nodes are available: 1 untolerated taint(s), 2 Insufficient cpu. preemption: 0/3 nodes are available."
CULPRIT = f"{NODES}, PodGroup space/run gets rejected due to Pod run-2-x is unschedulable even after PostFilter"
REJECTED = "0/1 nodes are available: 1 optimistic rejection in PostFilter."
LATER = "0/1 nodes are available: 1 rejection in Unreserve."


def pod(rank: int, message: str, *, group: str = "run", node: str | None = None) -> Object:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {
        "metadata": {"name": f"run-{rank}-x", "uid": f"uid-{rank}", "creationTimestamp": "2026-01-01T00:00:00Z",
                     "labels": {INDEX: str(rank), **({COSCHEDULING_GROUP: group} if group else {})},
                     "annotations": {INDEX: str(rank)}},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Pending", "conditions": [scheduled]},
    }  # fmt: skip


def event(rank: int, message: str, second: int) -> Object:
    return {"reason": "FailedScheduling", "message": message, "lastTimestamp": f"2026-01-01T00:00:{second:02d}Z",
            "involvedObject": {"name": f"run-{rank}-x", "uid": f"uid-{rank}"}}  # fmt: skip


def messages(pods: list[Object], events: list[Object] | None = None) -> list[str]:
    status = run_status({"metadata": {"name": "run"}, "spec": {}}, pods, replicas=len(pods), events=events or [])
    assert {(row.state, row.reason) for row in status.replicas} == {(ReplicaState.PENDING, Reason.UNSCHEDULABLE)}
    return [row.message for row in status.replicas]


def test_every_rank_says_what_the_one_that_fits_nowhere_says():
    found = messages([pod(0, REJECTED), pod(1, LATER), pod(2, CULPRIT)])
    assert len(set(found)) == 1
    assert "`run` or none, and none starts" in found[0]
    assert found[0].endswith(NODES)


def test_an_earlier_try_says_it_if_no_pod_says_it_now():
    old = "0/3 nodes are available: 3 Insufficient memory."
    events = [event(2, CULPRIT, 20), event(2, old, 10), event(0, REJECTED, 30)]
    assert all(found.endswith(NODES) for found in messages([pod(0, LATER), pod(1, LATER), pod(2, LATER)], events))


def test_without_a_word_about_nodes_each_rank_keeps_its_own():
    found = messages([pod(0, REJECTED), pod(1, LATER)])
    assert [REJECTED in found[0], LATER in found[1]] == [True, True]


@pytest.mark.parametrize("others", [{"group": ""}, {"node": "node-1"}])
def test_nothing_is_said_of_a_group_that_is_none_or_has_started(others: Object):
    """A pod that starts again waits alone; those that run do not wait for it."""
    first = pod(0, CULPRIT, group="") if "group" in others else pod(0, CULPRIT)
    status = run_status({"metadata": {"name": "run"}, "spec": {}}, [first, pod(1, REJECTED, **others)], replicas=2)
    assert status.replicas[0].message == f"Unschedulable: {CULPRIT}"
