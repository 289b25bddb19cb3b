"""Which nodes take replicas, and what they have free."""

from __future__ import annotations

from typing import Any

from atoll.kube.nodes import Room, room_text, rooms

GPU = "nvidia.com/gpu"


def node(name: str, *, ready: str = "True", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "4", "memory": "16Gi", "pods": "110", **({GPU: "8"} if name.startswith("gpu") else {})}
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec, "status": status}


def pod(where: str | None, phase: str = "Running", **requests: str) -> dict[str, Any]:
    container = {"name": "x", "resources": {"requests": requests}}
    return {"spec": {"nodeName": where, "containers": [container, {"name": "y"}]}, "status": {"phase": phase}}


def found(nodes, pods=(), selector=None, tolerations=()) -> list[Room]:
    return rooms(nodes, pods, selector=selector or {}, tolerations=tolerations, gpu_keys=[GPU])


def test_pods_take_room_until_they_have_ended():
    pods = [pod("gpu", cpu="1500m", memory="4Gi", **{GPU: "3"}), pod("gpu", "Succeeded", cpu="2"), pod(None, cpu="1")]
    assert found([node("gpu")], pods) == [Room("gpu", 2.5, 12.0, {GPU: 5})]
    assert found([node("a")], [pod("a", cpu="9")]) == [Room("a", 0.0, 16.0)]


def test_only_nodes_that_take_the_replica_count():
    team, lost = {"key": "team", "value": "a", "effect": "NoSchedule"}, {"key": "node.kubernetes.io/not-ready"}
    nodes = [
        node("plain"),
        node("tainted", taints=[team]),
        node("soft", taints=[{**team, "effect": "PreferNoSchedule"}]),
        node("cordoned", unschedulable=True),
        node("silent", ready="Unknown", taints=[{**lost, "effect": "NoExecute"}]),
        node("pool", labels={"pool": "a"}),
    ]
    assert [room.node for room in found(nodes)] == ["plain", "soft", "pool"]
    assert [room.node for room in found(nodes, selector={"pool": "a"})] == ["pool"]
    for toleration in ({"key": "team", "operator": "Exists"}, {"operator": "Exists"}, {"key": "team", "value": "a"}):
        assert "tainted" in [room.node for room in found(nodes, tolerations=[toleration])]
    for toleration in ({"key": "team", "value": "b"}, {"operator": "Exists", "effect": "NoExecute"}):
        assert "tainted" not in [room.node for room in found(nodes, tolerations=[toleration])]


def test_a_replica_fits_on_one_node_or_waits():
    room = Room("a", 4, 16, {GPU: 1})
    assert room.holds(4, 16, GPU)
    assert not room.holds(4.5, 1)
    assert not room.holds(1, 17)
    assert not room.holds(1, 1, "amd.com/gpu")
    text = room_text([room, Room("b", 2, 4)], cpus=3, memory_gib=1, is_complete=True)
    assert "1 nvidia.com/gpu free on 1" in text
    assert "would wait" not in text
    assert "would wait" in room_text([room], cpus=5, memory_gib=1, is_complete=False)


def test_large_amounts_have_no_exponent():
    text = room_text([Room("a", 1000, 4000.2)], cpus=0, memory_gib=0, is_complete=True)
    assert "1000 cores and 4000 GiB free" in text
    assert "3.92 cores and 14.6 GiB free" in room_text([Room("a", 3.92, 14.64)], cpus=0, memory_gib=0, is_complete=True)
    assert "autoscaler" in room_text([], cpus=0, memory_gib=0, is_complete=True)
