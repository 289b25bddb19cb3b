"""MCADExecutor: the replica protocol on AppWrappers, of their own controller or of MCAD, one for each launch."""

# ruff: noqa: ARG002  `keeps_arguments` makes attributes of the arguments

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.kube.gpus import NVIDIA
from atoll.serverless.eks import EKSExecutor
from atoll.serverless.facade import keeps_arguments


class MCADExecutor(EKSExecutor):
    """Replicas are the pods of one Indexed Job in an AppWrapper. If one fails, all of them end or start again.

    `dialect` is the form of AppWrapper, by default the one that the cluster has. `queue` is a LocalQueue of Kueue, and
    `priority` its WorkloadPriorityClass; on MCAD `priority` is a number. The other arguments are those of
    `EKSExecutor`; `backoff_limit` counts restarts of all replicas together.
    """

    backend_name = "mcad"

    @keeps_arguments
    def __init__(
        self,
        image: str,
        *,
        namespace: str = "default",
        dialect: str = "auto",
        queue: str | None = None,
        priority: str | int | None = None,
        service_account_name: str | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Any] | None = None,
        runtime_class_name: str | None = None,
        command: Sequence[str] | None = None,
        cpu_request: str = "4",
        memory_request: str = "16Gi",
        ttl_seconds_after_finished: int | None = 3600,
        backoff_limit: int = 0,
        gpu_resource_key: str = NVIDIA,
        run_id: str | None = None,
        batch_api: Any = None,
        core_api: Any = None,
        store: str | os.PathLike[str] | None = None,
        idempotency_key: str | None = None,
        queue_timeout: float | None = None,
        context: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
    ) -> None:
        self._build(AppWrapperExecutor, dialect=dialect, queue=queue, priority=priority)
