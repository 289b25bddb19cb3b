"""The kubelet's nodes together, and the HTTP endpoint through which tests reach them."""

from __future__ import annotations

import signal
import uuid
from dataclasses import asdict
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from services.kubernetes.api import Api
from services.kubernetes.control_plane import ControlPlane
from services.kubernetes.kubelet.faults import Fault
from services.kubernetes.kubelet.images import full_name, image_from, known_images
from services.kubernetes.kubelet.log_server import LogServer
from services.kubernetes.kubelet.names import Addresses, Names
from services.kubernetes.kubelet.node import Node, NodeSpec, Shared
from services.kubernetes.kubelet.pods import Pod
from services.kubernetes.kubelet.process import start_reaper
from services.kubernetes.remote import handler

Object = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"


class Kubelet:
    """Each public method is a request that a test can send (`actions`)."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        name = uuid.uuid4().hex
        authority = plane.authority
        addresses = Addresses()
        self._reaper = start_reaper(name, addresses.block if addresses.lead_here else "")
        self._nodes: dict[str, Node] = {}
        self._log_server = LogServer(self._find, authority.server("kubelet", "127.0.0.1"), authority.path)

        def client(node: str) -> Api:
            certificate = authority.client(f"system:node:{node}", "system:nodes")
            return Api(plane.server, authority.path, certificate, agent="kubelet")

        port = self._log_server.server_port
        self._shared = Shared(
            name, folder, "127.0.0.1", port, client, known_images(), addresses, Names(plane.admin_api)
        )
        Thread(target=self._log_server.serve_forever, name="logs", daemon=True).start()

    def add_node(self, spec: Object) -> None:
        node = Node(NodeSpec(**spec), self._shared)
        self._nodes[node.name] = node
        node.start()

    def remove_node(self, name: str) -> None:
        """Kill its pods and forget it. The test deletes the node's object."""
        self._nodes.pop(name).stop()

    def go_offline(self, node: str) -> None:
        self._nodes[node].go_offline()

    def go_online(self, node: str) -> None:
        self._nodes[node].go_online()

    def fill(self, node: str, is_full: bool = True) -> None:
        self._nodes[node].fill(is_full)

    def add_image(self, name: str, values: Object) -> None:
        self._shared.images[full_name(name)] = image_from(values)

    def add_fault(self, fault: Object) -> int:
        return self._shared.faults.add(Fault(**fault))

    def remove_fault(self, number: int) -> None:
        self._shared.faults.remove(number)

    def send_signal(
        self, namespace: str, number: int, pod: str = "", job: str = "", index: int = 0, out_of_memory: bool = False
    ) -> int:
        """To the running pods of this name, or of this rank of a Job; returns how many there are."""
        found = [one for one in self._pods() if _is_meant(one, namespace, pod, job, index)]
        for one in found:
            one.send_signal(number, is_out_of_memory=out_of_memory)
        return len(found)

    def clear(self, namespace: str) -> None:
        """End what a test left in its namespace: its faults, and its processes without any grace."""
        self._shared.faults.clear(namespace)
        for pod in self._pods():
            if pod.metadata["namespace"] == namespace:
                pod.send_signal(signal.SIGKILL)

    def state(self) -> Object:
        running = [pod for pod in self._pods() if not pod.is_over]
        nodes = {node.name: asdict(node.spec) for node in self._nodes.values()}
        return {
            "nodes": nodes,
            "running": len(running),
            "can_mount": self._shared.can_mount,
            "addresses_lead_here": self._shared.addresses.lead_here,
        }

    def _pods(self) -> list[Pod]:
        return [pod for node in list(self._nodes.values()) for pod in list(node.pods.values())]

    def _find(self, namespace: str, name: str) -> Pod | None:
        wanted = (namespace, name)
        return next((pod for pod in self._pods() if wanted == (pod.metadata["namespace"], pod.metadata["name"])), None)


def _is_meant(pod: Pod, namespace: str, name: str, job: str, index: int) -> bool:
    metadata, labels = pod.metadata, pod.metadata.get("labels", {})
    is_rank = bool(job) and labels.get(JOB) == job and labels.get(INDEX) == str(index)
    return not pod.is_over and metadata["namespace"] == namespace and (metadata["name"] == name or is_rank)


class ControlServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, kubelet: Kubelet) -> None:
        super().__init__(("127.0.0.1", 0), handler(kubelet))
        self.url = f"http://127.0.0.1:{self.server_port}"
