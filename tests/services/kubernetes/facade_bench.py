"""The bench of the replica protocol: `EKSExecutor` as its users build it, on a namespace of the real control plane."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.handle import RunHandle
from atoll.kube import request
from atoll.kube.names import BATCH
from atoll.serverless.protocol import ReplicaHandle
from atoll.testing.protocol_contract import FacadeBench
from repository import TESTS
from services.kubernetes.bench import is_over
from services.kubernetes.cluster import Cluster
from services.kubernetes.namespace import Namespace
from services.kubernetes.plain_clients import CALLS

_PRELUDE = """
from atoll.kube import request
request.store_problems = lambda *_, **__: []
"""


@dataclass
class EKSFacadeBench(FacadeBench):
    """Made over a namespace for all tests of a class. KUBECONFIG leads to the cluster."""

    namespace: Namespace = None  # type: ignore[assignment]

    @classmethod
    @contextmanager
    def below(cls, folder: Path, cluster: Cluster) -> Iterator[EKSFacadeBench]:
        namespace = Namespace.create(cluster, f"protocol-{uuid.uuid4().hex[:8]}", folder)
        image = add_image(namespace, {"PYTHONPATH": str(folder)})
        with pytest.MonkeyPatch.context() as patch:
            see_folders(patch)
            patch.setenv("KUBECONFIG", str(namespace.kubeconfig))
            yield cls(
                "atoll.serverless.eks:EKSExecutor",
                folder,
                {"image": image, "namespace": namespace.name, "cpu_request": "100m", "memory_request": "256Mi"},
                runs_commands=True,
                mounts_arguments=True,
                cancels_together=True,
                fails_together=True,
                run_ids=["job_name", "namespace", "uid", "context"],
                extra="kubernetes",
                sdk=["kubernetes"],
                clients="services.kubernetes.plain_clients:plain_clients",
                client_calls=CALLS,
                import_path=[str(TESTS)],
                prelude=_PRELUDE,
                patience_s=120.0,
                namespace=namespace,
            )
        namespace.remove()

    @contextmanager
    def queue_held(self) -> Iterator[None]:
        number = self.namespace.fault("slow-start", seconds=3600)
        try:
            yield
        finally:
            self.namespace.cluster.kubelet("remove_fault", number=number)

    def rank_broken(self, rank: int) -> Any:
        pytest.skip("this backend starts a whole run with one call")

    def forget(self, handle: ReplicaHandle) -> None:
        name = RunHandle.parse(handle.metadata["run"]).native_id
        self.namespace.api.delete(self.namespace.path("jobs", name), propagationPolicy="Background")
        self.namespace.until("jobs", name, lambda found: found is None)

    def running(self) -> list[str]:
        """Pods that have not ended, and Jobs that will make pods. A Job counts as over a moment after its last pod."""
        api, path = self.namespace.api, self.namespace.path
        jobs, pods = api.items(path("jobs")), api.items(path("pods"))
        alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        made = Counter(pod["metadata"]["labels"].get(f"{BATCH}job-name") for pod in pods)
        going = [job for job in jobs if not is_over(job) and made[job["metadata"]["name"]] < job["spec"]["completions"]]
        return [str(each["metadata"]["name"]) for each in (*going, *alive)]


def add_image(namespace: Namespace, environment: dict[str, str]) -> str:
    """The name of an image with Atoll and these variables, which only this namespace uses."""
    name = f"atoll-test/{namespace.name}"
    values = {"path": [str(Path(sys.executable).parent)], "env": environment}
    namespace.cluster.kubelet("add_image", name=name, values=values)
    return name


def see_folders(patch: pytest.MonkeyPatch) -> None:
    """Pods of the tests see the folders of this machine, for which the facade has no argument."""
    patch.setattr(request, "store_problems", lambda *_, **__: [])
