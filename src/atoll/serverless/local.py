"""LocalProcessExecutor: the replica protocol on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from atoll.context import default_store
from atoll.executors.local.executor import LocalExecutor
from atoll.serverless.facade import Facade
from atoll.serverless.protocol import ReplicaHandle


class LocalProcessExecutor(Facade):
    """Replicas are processes on this machine. `store` has their results and logs."""

    backend_name = "local_process"
    earlier_names = ("local",)
    supports_inter_replica_network = True

    def __init__(
        self,
        *,
        store: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(
            LocalExecutor(root=root), store=default_store() if store is None or store == "" else store, run_id=run_id
        )

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        """As in the protocol. A `gpu` is pinned by CUDA_VISIBLE_DEVICES, or refused if this machine has none."""
        handles = super().launch_replicas(n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout)
        if gpu is not None:
            message = f"each of {n_replicas} replicas is pinned to its own `{gpu}` by CUDA_VISIBLE_DEVICES only"
            warnings.warn(message, stacklevel=2)
        return handles
