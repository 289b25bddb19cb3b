"""A whole cluster: the control plane, the kubelet with its nodes, and what tests do with them.

`started` runs one as children of this process. `start_shared` gives all workers of a test run the same one: the first
worker starts a keeper (`python -m services.kubernetes`), which ends when the process of the test run ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.kubernetes import control_plane
from services.kubernetes.api import Api, ApiError
from services.kubernetes.control_plane import ControlPlane
from services.kubernetes.kubelet.node import NodeSpec
from services.kubernetes.remote import Remote
from services.programs import running, wait_until

Object = dict[str, Any]
TESTS = Path(__file__).parents[2]
NODES = (
    NodeSpec("node-1"),
    NodeSpec("node-2"),
    NodeSpec(
        "gpu-1",
        gpus=64,
        instance_type="p4d.24xlarge",
        labels={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"},
        taints=[{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
    ),
)
PRIVATE = "atoll.test/private"
"""Label and taint of a node that only one test uses."""


@dataclass(frozen=True)
class Cluster:
    plane: ControlPlane
    kubelet: Remote
    """The methods of `kubelet.control.Kubelet`."""
    api: Api = field(compare=False)
    controllers: Remote | None = None
    """The methods of `controllers.processes.Controllers`, where some run."""

    @classmethod
    def load(cls, folder: Path) -> Cluster:
        plane = ControlPlane.load(folder)
        controllers = folder / "controllers.json"
        return cls(
            plane,
            _remote(folder / "kubelet.json"),
            plane.admin_api(),
            _remote(controllers) if controllers.exists() else None,
        )

    @property
    def kubeconfig(self) -> Path:
        """Of a user who may do everything."""
        return self.plane.admin

    def until(
        self, path: str, is_so: Callable[[Object | None], bool], *, timeout_s: float = 60, start: Object | None = None
    ) -> Object | None:
        """Watch one object until it is so; returns it, or None if that is what was waited for."""
        collection, _, name = path.rpartition("/")
        deadline = time.monotonic() + timeout_s
        last = start
        while (left := deadline - time.monotonic()) > 0:
            listed = self.api.get(collection, fieldSelector=f"metadata.name={name}")
            last = listed["items"][0] if listed["items"] else None
            if is_so(last):
                return last
            query = {"resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": int(left) + 1}
            with contextlib.suppress(TimeoutError):
                for kind, found in self.api.watch(
                    collection, timeout=left + 1, fieldSelector=f"metadata.name={name}", **query
                ):
                    last = None if kind == "DELETED" else found
                    if is_so(last):
                        return last
        raise TimeoutError(f"{path} is not so after {timeout_s} s: {json.dumps(last, indent=1)}")

    @contextmanager
    def node(self, spec: NodeSpec) -> Iterator[NodeSpec]:
        """A node for one test: only pods that select and tolerate it (`on_node`) come to it."""
        taint = {"key": PRIVATE, "value": spec.name, "effect": "NoSchedule"}
        labels = {**spec.labels, PRIVATE: spec.name}
        self.kubelet("add_node", spec={**asdict(spec), "labels": labels, "taints": [*spec.taints, taint]})
        path = f"/api/v1/nodes/{spec.name}"
        try:
            self.until(path, lambda node: node is not None and not _is_tainted(node))
            yield spec
        finally:
            self.kubelet("remove_node", name=spec.name)
            with contextlib.suppress(ApiError):
                self.api.delete(path)


def _remote(path: Path) -> Remote:
    return Remote(json.loads(path.read_text())["control"])


def on_node(pod_spec: Object, name: str) -> Object:
    """The pod, bound to a node of one test."""
    toleration = {"key": PRIVATE, "operator": "Equal", "value": name, "effect": "NoSchedule"}
    return {
        **pod_spec,
        "nodeSelector": {**pod_spec.get("nodeSelector", {}), PRIVATE: name},
        "tolerations": [*pod_spec.get("tolerations", []), toleration],
    }


@contextmanager
def started(
    binary: Path, folder: Path, *, nodes: Iterable[NodeSpec] = NODES, **flags: Iterable[str]
) -> Iterator[Cluster]:
    """Run a cluster until the block ends. `flags` are those of `control_plane.started`."""
    with control_plane.started(binary, folder, **flags):
        specs = [asdict(node) for node in nodes]
        (folder / "nodes.json").write_text(json.dumps(specs))
        command = [sys.executable, "-m", "services.kubernetes.kubelet", str(folder)]
        log = folder / "kubelet.log"
        with running(command, log=log, env={**os.environ, "PYTHONPATH": str(TESTS)}) as process:
            try:
                wait_until((folder / "kubelet.json").exists, process, log)
                cluster = Cluster.load(folder)
                for spec in specs:
                    cluster.until(
                        f"/api/v1/nodes/{spec['name']}", lambda node: node is not None and not _is_tainted(node)
                    )
                yield cluster
            finally:
                process.kill()
                process.wait()
                shutil.rmtree(folder / "nodes", ignore_errors=True)


def _is_tainted(node: Object) -> bool:
    return any(taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints", []))


def start_shared(folder: Path, owner: int, binary: Path, options: Iterable[str] = ()) -> None:
    """Start the cluster of this test run if no other worker has done so. It ends when the process `owner` ends.

    `options` are those of the keeper, `python -m services.kubernetes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "problem").exists():
            raise RuntimeError((folder / "problem").read_text())
        if not (folder / "ready").exists():
            try:
                _start_keeper(folder, owner, binary, options)
            except RuntimeError as exc:
                (folder / "problem").write_text(str(exc))
                raise


def _start_keeper(folder: Path, owner: int, binary: Path, options: Iterable[str]) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG", "USER") if name in os.environ}
    command = [sys.executable, "-m", "services.kubernetes", "--binary", str(binary), "--folder", str(folder),
               "--owner", str(owner), *options]  # fmt: skip
    log = folder / "keeper.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**kept, "PYTHONPATH": str(TESTS)}, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=output, cwd=folder, start_new_session=True)  # fmt: skip
    wait_until((folder / "ready").exists, process, log, timeout_s=180)
    process.returncode = 0  # it outlives this process, and nobody waits for it here
