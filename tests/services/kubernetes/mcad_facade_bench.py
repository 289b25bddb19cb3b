"""The bench of the replica protocol over AppWrappers: `MCADExecutor` as its users build it, on the real controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.handle import RunHandle
from atoll.serverless.protocol import ReplicaHandle
from services.kubernetes.cluster import Cluster
from services.kubernetes.facade_bench import EKSFacadeBench
from services.kubernetes.wrapper_bench import is_over


@dataclass
class MCADFacadeBench(EKSFacadeBench):
    @classmethod
    @contextmanager
    def below(cls, folder: Path, cluster: Cluster) -> Iterator[MCADFacadeBench]:
        with super().below(folder, cluster) as found:
            assert isinstance(found, cls)
            yield replace(found, path="atoll.serverless.mcad:MCADExecutor")

    def forget(self, handle: ReplicaHandle) -> None:
        name = RunHandle.parse(handle.metadata["run"]).native_id
        self.namespace.api.delete(self.namespace.path("appwrappers", name), propagationPolicy="Background")
        self.namespace.until("appwrappers", name, lambda found: found is None)
        self.namespace.until("jobs", name, lambda found: found is None)

    def running(self) -> list[str]:
        """Pods that have not ended, and AppWrappers that will make pods."""
        api, path = self.namespace.api, self.namespace.path
        alive = [pod for pod in api.items(path("pods")) if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        # In this order: a Job that is gone between the two reads was deleted by an AppWrapper that is over.
        jobs = {job["metadata"]["name"] for job in api.items(path("jobs"))}
        wrappers = api.items(path("appwrappers"))
        going = [each for each in wrappers if not is_over(each) and each["metadata"]["name"] not in jobs]
        return [str(each["metadata"]["name"]) for each in (*going, *alive)]
