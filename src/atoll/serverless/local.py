"""LocalProcessExecutor: the replica protocol on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from atoll._time import Deadline, backoff
from atoll.context import default_store
from atoll.executors.local.executor import LocalExecutor
from atoll.runs.prepare import Draft
from atoll.runs.run import Run
from atoll.serverless.facade import Facade, arguments_named, keeps_arguments

_READY_S = 10.0


class LocalProcessExecutor(Facade):
    """Replicas are processes on this machine. `store` has their results and logs."""

    backend_name = "local_process"
    earlier_names = ("local",)
    supports_inter_replica_network = True
    runs_callables = True
    _default_store = staticmethod(default_store)

    @keeps_arguments
    def __init__(
        self,
        *,
        store: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> None:
        with arguments_named(type(self).__name__, self.argument_names, LocalExecutor.name):
            self._processes = LocalExecutor(root=root)
        self._use(self._processes, store=store, run_id=run_id, idempotency_key=idempotency_key)

    def _warnings(self, draft: Draft) -> list[str]:
        placement = draft.spec.placement
        if placement.gpu is None:
            return []
        pinned = f"each of {placement.replicas} replicas is pinned to its own `{placement.gpu}`"
        return [f"{pinned} by CUDA_VISIBLE_DEVICES only"]

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
        deadline, pauses = Deadline(_READY_S), backoff(0.01, cap_s=0.2)
        while not (found := self._processes.first_processes(run.handle)) and not deadline.is_past:
            if self._processes.status(run.handle).is_terminal:
                break
            deadline.sleep(next(pauses))  # another launcher is starting this run
        nothing = (None, None)
        return [dict(zip(("pid", "start_ts"), found.get(rank, nothing), strict=True)) for rank in ranks]
