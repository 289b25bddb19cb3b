"""The bench of the executor contract: the adapter over the official client, a real control plane behind a proxy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.context import RANK, RUN_ID, STORE
from atoll.handle import RunHandle
from atoll.kube import names
from atoll.registry import store_uri
from atoll.testing import bench as contract
from atoll.testing.bench import Bench
from services.kubernetes.fault_proxy import Fault, FaultProxy
from services.kubernetes.namespace import Namespace

ADAPTER = "atoll.executors.kubernetes.executor:KubernetesExecutor"
_JOBS = r"/apis/batch/v1/namespaces/[^/]+/jobs"
_PATHS = {
    contract.Call.CREATE: ("POST", _JOBS, "^(?!.*dryRun)"),
    contract.Call.DESCRIBE: ("GET", rf"{_JOBS}(/[^/]+)?|/api/v1/namespaces/[^/]+/pods", ""),
    contract.Call.STOP: ("DELETE", rf"{_JOBS}/[^/]+", ""),
    contract.Call.LOG: ("GET", r"/api/v1/namespaces/[^/]+/pods/[^/]+/log", ""),
}


@dataclass
class ProxyFaults:
    """The contract's faults as faults of the proxy."""

    proxy: FaultProxy
    calls: frozenset[contract.Call] = frozenset(contract.Call)
    paths: Mapping[contract.Call, tuple[str, str, str]] = field(default_factory=lambda: _PATHS)

    def fail(
        self,
        call: contract.Call,
        fault: contract.Fault,
        *,
        nth: int = 1,
        times: int | None = None,
        after_effect: bool = False,
    ) -> None:
        method, path, query = self.paths[call]
        how: dict[str, Any] = {"status": int(fault)} if fault.isdecimal() else {"hang_s": 3600.0}
        if fault is contract.Fault.THROTTLED:
            how["headers"] = {"Retry-After": "1"}
        self.proxy.faults.append(
            Fault(
                method,
                path,
                query,
                skip=nth - 1,
                times=float("inf") if times is None else times,
                is_after_effect=after_effect,
                **how,
            )
        )

    def heal(self) -> None:
        self.proxy.faults.clear()


@dataclass
class KubernetesBench(Bench):
    """Made for each test: a namespace of the shared cluster, and a proxy in front of the API server."""

    namespace: Namespace = None  # type: ignore[assignment]
    proxy: FaultProxy = None  # type: ignore[assignment]
    held: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def below(cls, folder: Path, namespace: Namespace) -> Iterator[KubernetesBench]:
        with FaultProxy(namespace.cluster.plane) as proxy:
            settings = {
                "kubeconfig": str(proxy.kubeconfig(folder)),
                "namespace": namespace.name,
                "image": "atoll-test",
                "store_is_mounted": True,
                "patience_s": 2.0,
                "stop_s": 60.0,
            }
            yield cls(
                ADAPTER,
                store_uri(str(folder / "store")),
                settings,
                impatient={"timeout_s": 0.8, "patience_s": 0.3},
                placement={"grace_s": 2.0},
                extra="kubernetes",
                sdk=["kubernetes"],
                faults=ProxyFaults(proxy),
                namespace=namespace,
                proxy=proxy,
            )

    def running(self, run_id: str) -> list[str]:
        """The Job of the run if it may create pods or has some that run, and else such pods and their processes."""
        jobs = [job for job in self.namespace.api.items(self.namespace.path("jobs")) if is_of(job, run_id)]
        pods = [pod for pod in self.namespace.api.items(self.namespace.path("pods")) if is_of(pod, run_id)]
        alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        going = [job for job in jobs if alive or (not is_decided(job) and len(pods) < job["spec"]["completions"])]
        if going:
            return [str(job["metadata"]["name"]) for job in going]
        return [*(str(pod["metadata"]["name"]) for pod in alive), *super().running(run_id)]

    @contextmanager
    def queue_held(self) -> Iterator[None]:
        number = self.namespace.fault("slow-start", seconds=3600)
        try:
            yield
        finally:
            self.namespace.cluster.kubelet("remove_fault", number=number)

    def creates(self, replicas: int) -> int:
        return 1

    def most_status_calls(self, replicas: int) -> int:
        return 3

    def kill_replica(self, run_id: str, rank: int) -> None:
        wanted = {RUN_ID: run_id, STORE: self.store_uri, RANK: str(rank)}
        for pid in contract.processes_with(wanted):
            os.kill(pid, signal.SIGKILL)

    def forget(self, handle: RunHandle) -> None:
        path = self.namespace.path("jobs", handle.native_id)
        self.namespace.api.delete(path, propagationPolicy="Background")
        self.namespace.until("jobs", handle.native_id, lambda found: found is None)

    def calls(self) -> int:
        return len(self.proxy.calls)

    def kill_points(self, replicas: int) -> Sequence[str]:
        return ["before create 1", "after create 1"]

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        method, path, query = _PATHS[contract.Call.CREATE]
        self.proxy.faults.append(Fault(method, path, query, action=action, is_after_effect=point.startswith("after")))


def is_of(thing: dict[str, Any], run_id: str) -> bool:
    return thing["metadata"].get("labels", {}).get(names.RUN) == names.run_label(run_id)


def is_over(job: dict[str, Any]) -> bool:
    return _has_condition(job, "Complete", "Failed")


def is_decided(job: dict[str, Any]) -> bool:
    """Whether the Job creates no pods any more. Its pods may end, and be deleted, before it is over."""
    is_deleted = "deletionTimestamp" in job["metadata"]
    return is_deleted or _has_condition(job, "Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")


def _has_condition(job: dict[str, Any], *kinds: str) -> bool:
    conditions = job.get("status", {}).get("conditions") or []
    return any(each["type"] in kinds and each["status"] == "True" for each in conditions)
