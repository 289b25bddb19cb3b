"""The bench of the executor contract over AppWrappers: the bench of Kubernetes, with other objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.testing import bench as contract
from services.kubernetes.bench import KubernetesBench, ProxyFaults, is_decided, is_of
from services.kubernetes.fault_proxy import Fault, FaultProxy
from services.kubernetes.namespace import Namespace
from services.kubernetes.wrapper_scenario import QUICK

ADAPTER = "atoll.executors.appwrapper.executor:AppWrapperExecutor"
_WRAPPERS = r"/apis/workload\.codeflare\.dev/v1beta\d/namespaces/[^/]+/appwrappers"
_READ = rf"{_WRAPPERS}(/[^/]+)?|/apis/batch/v1/namespaces/[^/]+/jobs/[^/]+|/api/v1/namespaces/[^/]+/pods"
PATHS = {
    contract.Call.CREATE: ("POST", _WRAPPERS, "^(?!.*dryRun)"),
    contract.Call.DESCRIBE: ("GET", _READ, ""),
    contract.Call.STOP: ("DELETE", rf"{_WRAPPERS}/[^/]+", ""),
    contract.Call.LOG: ("GET", r"/api/v1/namespaces/[^/]+/pods/[^/]+/log", ""),
}


@dataclass
class WrapperBench(KubernetesBench):
    @classmethod
    @contextmanager
    def over(cls, folder: Path, namespace: Namespace, **settings: Any) -> Iterator[WrapperBench]:
        with FaultProxy(namespace.cluster.plane) as proxy:
            given = {
                "kubeconfig": str(proxy.kubeconfig(folder)),
                "namespace": namespace.name,
                "image": "atoll-test",
                "store_is_mounted": True,
                "patience_s": 2.0,
                "stop_s": 60.0,
                **QUICK,
                **settings,
            }
            yield cls(
                ADAPTER,
                store_uri(str(folder / "store")),
                given,
                impatient={"timeout_s": 0.8, "patience_s": 0.3},
                placement={"grace_s": 2.0, **({"cpus": 0.01} if "queue" in settings else {})},
                extra="kubernetes",
                sdk=["kubernetes"],
                faults=ProxyFaults(proxy, paths=PATHS),
                namespace=namespace,
                proxy=proxy,
            )

    def running(self, run_id: str) -> list[str]:
        """The AppWrapper of the run if it is not over or has pods that are not, and else such pods."""
        namespace = self.namespace
        pods = [pod for pod in namespace.api.items(namespace.path("pods")) if is_of(pod, run_id)]
        alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        # In this order: a Job that is gone between the two reads was deleted by an AppWrapper that is over.
        jobs = [job for job in namespace.api.items(namespace.path("jobs")) if is_of(job, run_id)]
        wrappers = [each for each in namespace.api.items(namespace.path("appwrappers")) if is_of(each, run_id)]
        # The controllers notice later that all pods have ended.
        has_ended = any(is_decided(job) or len(pods) >= job["spec"]["completions"] for job in jobs)
        going = [each for each in wrappers if alive or not (is_over(each) or has_ended)]
        if going:
            return [str(each["metadata"]["name"]) for each in going]
        return [*(str(pod["metadata"]["name"]) for pod in alive), *super().running(run_id)]

    def most_status_calls(self, replicas: int) -> int:
        return 8  # of a new adapter: discovery, AppWrapper, Job, pods, Workload, position, events

    def forget(self, handle: RunHandle) -> None:
        path = self.namespace.path("appwrappers", handle.native_id)
        self.namespace.api.delete(path, propagationPolicy="Background")
        self.namespace.until("appwrappers", handle.native_id, lambda found: found is None)
        self.namespace.until("jobs", handle.native_id, lambda found: found is None)

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        method, path, query = PATHS[contract.Call.CREATE]
        self.proxy.faults.append(Fault(method, path, query, action=action, is_after_effect=point.startswith("after")))


def is_over(wrapper: dict[str, Any]) -> bool:
    status = wrapper.get("status", {})
    return status.get("phase") in ("Succeeded", "Failed") or status.get("state") == "Completed"
