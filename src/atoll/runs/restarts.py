"""Restarts a failed run where the service cannot, while a process waits for it. `Run.wait` calls this at each reading.

`cancel` stops, records, and stops again. A watcher looks for the record before and after it has started the run again.
So one of the two stops a restart that a cancellation races with.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from atoll import journal
from atoll.executors.base import Composite, Executor, Replacer, Restarter
from atoll.handle import RunHandle
from atoll.spec import RunSpec
from atoll.status import Reason, RunStatus

if TYPE_CHECKING:
    from atoll.runs.run import Run

log = logging.getLogger("atoll.runs")


def could_grow(spec: RunSpec, executor: Executor) -> bool:
    """Whether a process that waits for this run may start replicas."""
    return spec.placement.max_restarts > 0 and isinstance(executor, Replacer | Restarter)


def restarted(run: Run, handle: RunHandle | None, status: RunStatus) -> RunStatus:
    """The status, after the run was started again if its replicas wait for that."""
    executor = run.executor
    if handle is None or not run.spec.placement.max_restarts or not isinstance(executor, Restarter):
        return status
    parts = [range(handle.replicas)]
    if isinstance(executor, Composite):
        parts = [part.ranks for part in executor.parts_of(handle)]
    if not any(all(status.replicas[rank].reason is Reason.RESTARTING for rank in ranks) for ranks in parts):
        return status
    if journal.is_cancelled(run.store, run.id, launch=run.launch) or not executor.restart(handle):
        return status
    if journal.is_cancelled(run.store, run.id, launch=run.launch):
        log.info("run %s was cancelled while it was started again: stop it", run.id)
        run.executor.cancel(handle)
    return run.status(progress=False)
