"""A node: registered, kept alive by its lease, and its pods in step with what the API server has bound to it."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from services.kubernetes.api import STRATEGIC_MERGE, Api, ApiError
from services.kubernetes.kubelet.faults import Faults
from services.kubernetes.kubelet.images import Image
from services.kubernetes.kubelet.logs import Watcher
from services.kubernetes.kubelet.names import Addresses, Names
from services.kubernetes.kubelet.pods import GPU, Pod
from services.kubernetes.kubelet.process import can_mount
from services.kubernetes.kubelet.status import now

Object = dict[str, Any]
HEARTBEAT_S = 3.0
_LOOK_EVERY = 3
"""After so many heartbeats a node looks whether the control plane still takes it for ready."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass(frozen=True)
class NodeSpec:
    """What a test can choose of a node."""

    name: str
    cpu: str = "1000"
    memory: str = "4000Gi"
    pods: int = 1000
    gpus: int = 0
    instance_type: str = "m5.4xlarge"
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[Object] = field(default_factory=list)
    resources: dict[str, str] = field(default_factory=dict)

    def capacity(self) -> dict[str, str]:
        gpus = {GPU: str(self.gpus)} if self.gpus else {}
        storage = {"ephemeral-storage": "1000Gi"}
        return {"cpu": self.cpu, "memory": self.memory, "pods": str(self.pods), **storage, **gpus, **self.resources}


@dataclass
class Shared:
    """What all nodes of this kubelet share."""

    kubelet: str
    folder: Path
    address: str
    port: int
    client: Callable[[str], Api]
    """A client that speaks for the node of this name."""
    images: dict[str, Image]
    addresses: Addresses
    names: Names
    faults: Faults = field(default_factory=Faults)
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        self.watcher.start()
        self.can_mount = can_mount(self.folder)


class Node:
    def __init__(self, spec: NodeSpec, shared: Shared) -> None:
        self.spec, self.name, self._shared = spec, spec.name, shared
        self.kubelet, self.address = shared.kubelet, shared.address
        self.images, self.faults, self.watcher, self.can_mount = (
            shared.images, shared.faults, shared.watcher, shared.can_mount,
        )  # fmt: skip
        self.names = shared.names
        self.folder = shared.folder / spec.name
        self.api = shared.client(spec.name)
        self.pods: dict[str, Pod] = {}
        self._free_gpus = list(range(spec.gpus))
        self._lock = Lock()
        self._online, self._is_over = Event(), Event()
        self._online.set()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._register()
        for work in (self._beat, self._follow):
            Thread(target=work, name=f"{work.__name__} {self.name}", daemon=True).start()

    def stop(self) -> None:
        """Kill the pods and say nothing more. The node's object stays."""
        self._is_over.set()
        self._online.clear()
        for pod in list(self.pods.values()):
            pod.send_signal(signal.SIGKILL)

    def go_offline(self) -> None:
        """Neither heartbeats nor statuses nor logs any more, as if the network were gone. Processes go on."""
        self._online.clear()

    def go_online(self) -> None:
        self._online.set()
        self._tell_status()

    @property
    def is_online(self) -> bool:
        return self._online.is_set()

    def fill(self, is_full: bool) -> None:
        """Leave no processor time to schedule on, or all of it again."""
        capacity = self.spec.capacity()
        allocatable = {**capacity, "cpu": "0", "pods": "0"} if is_full else capacity
        self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": {"allocatable": allocatable}})

    # What pods need.

    def wait_until_online(self) -> None:
        self._online.wait()

    def new_pod_ip(self) -> str:
        return self._shared.addresses.new()

    def take_gpus(self, count: int) -> list[int]:
        with self._lock:
            taken, self._free_gpus = self._free_gpus[:count], self._free_gpus[count:]
        return taken

    def free_gpus(self, devices: list[int]) -> None:
        with self._lock:
            self._free_gpus = sorted([*self._free_gpus, *devices])

    def delete(self, pod: Object) -> None:
        """Take a pod that has ended out of the API server. Its finalizers may keep it there a little longer."""
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        self.wait_until_online()
        with contextlib.suppress(ApiError, OSError):
            self.api.delete(path, body)

    def event(self, pod: Object, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        involved = {"apiVersion": "v1", "kind": "Pod", **{k: metadata[k] for k in ("name", "namespace", "uid")}}
        body = {
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": involved,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self.name},
            "reportingComponent": "kubelet",
            "reportingInstance": self.name,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        with contextlib.suppress(ApiError, OSError):
            self.api.create(f"/api/v1/namespaces/{metadata['namespace']}/events", body)

    # The node itself.

    def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "node.kubernetes.io/instance-type": self.spec.instance_type,
            **self.spec.labels,
        }
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"taints": self.spec.taints} if self.spec.taints else {},
            "status": self._status(),
        }
        try:
            self.api.create("/api/v1/nodes", body)
        except ApiError as exc:
            if exc.status != 409:
                raise
            self._tell_status()

    def _status(self) -> Object:
        good = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
        conditions = [
            {"type": kind, "status": status, "reason": "ProcessKubelet", "message": "processes, not containers",
             "lastHeartbeatTime": now(), "lastTransitionTime": now()}
            for kind, status in good.items()
        ]  # fmt: skip
        return {
            "capacity": self.spec.capacity(),
            "allocatable": self.spec.capacity(),
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._shared.port}},
            "nodeInfo": {
                "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "processes",
                "containerRuntimeVersion": "test://1", "kubeletVersion": "v1.36.3", "kubeProxyVersion": "",
                "operatingSystem": "linux", "architecture": "amd64",
            },
        }  # fmt: skip

    def _tell_status(self) -> None:
        with contextlib.suppress(ApiError, OSError):
            self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": self._status()}, kind=STRATEGIC_MERGE)

    def _beat(self) -> None:
        """Renew the lease while the node is online. It has a time from the start: a lease without one never counts."""
        body: Object = {
            "metadata": {"name": self.name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": _now_in_microseconds()},
        }
        with contextlib.suppress(ApiError, OSError):
            self.api.create(_LEASES, body)
        beats = 0
        while not self._is_over.wait(HEARTBEAT_S):
            beats += 1
            if self.is_online:
                with contextlib.suppress(ApiError, OSError, http.client.HTTPException, ValueError):
                    self.api.patch(f"{_LEASES}/{self.name}", {"spec": {"renewTime": _now_in_microseconds()}})
                    if beats % _LOOK_EVERY == 0:
                        self._stay_ready()

    def _stay_ready(self) -> None:
        """Say again that the node is ready if the control plane gave it up while the API server did not answer."""
        path = f"/api/v1/nodes/{self.name}"
        found = {each["type"]: each["status"] for each in self.api.get(path)["status"].get("conditions", [])}
        if found.get("Ready") != "True" and self.is_online:
            conditions = {"status": {"conditions": self._status()["conditions"]}}
            self.api.patch(f"{path}/status", conditions, kind=STRATEGIC_MERGE)

    # Its pods.

    def _follow(self) -> None:
        """List, then watch; list again whenever the watch ends or breaks."""
        selector = f"spec.nodeName={self.name}"
        while not self._is_over.is_set():
            self._online.wait(1)
            if not self.is_online:
                continue
            try:
                listed = self.api.get("/api/v1/pods", fieldSelector=selector)
                for uid in set(self.pods) - {pod["metadata"]["uid"] for pod in listed["items"]}:
                    self._gone(uid)
                for pod in listed["items"]:
                    self._seen(pod)
                version = listed["metadata"]["resourceVersion"]
                events = self.api.watch("/api/v1/pods", fieldSelector=selector, resourceVersion=version,
                                        timeoutSeconds=240)  # fmt: skip
                for kind, pod in events:
                    if not self.is_online or self._is_over.is_set():
                        break
                    if kind == "DELETED":
                        self._gone(pod["metadata"]["uid"])
                    else:
                        self._seen(pod)
            except (ApiError, OSError, http.client.HTTPException, ValueError):  # ValueError: half a line
                time.sleep(0.2)

    def _seen(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        known = self.pods.get(uid)
        is_terminal = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if known is None and not is_terminal:
            self.pods[uid] = Pod(self, pod)
            self.pods[uid].start()
        elif known is not None and not known.is_over:
            known.change(pod)
        elif is_terminal and pod["metadata"].get("deletionTimestamp"):
            self.delete(pod)

    def _gone(self, uid: str) -> None:
        pod = self.pods.pop(uid, None)
        if pod is not None:
            pod.vanish()
            Thread(target=self._clean, args=(pod,), daemon=True).start()

    def _clean(self, pod: Pod) -> None:
        pod.join()
        pod.forget()


def _now_in_microseconds() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
