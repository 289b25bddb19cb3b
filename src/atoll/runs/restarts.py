"""Restarts a failed run where the service cannot, while a process waits for it. `Run.wait` calls this at each reading.

`cancel` stops, records, and stops again. A watcher looks for the record before it deletes the failed attempt, before it
creates the next one, and after that. So one of the two stops a restart that a cancellation races with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from atoll import journal
from atoll._threads import brought_to_its_end
from atoll.errors import StoreError
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
    is_cancelled = partial(journal.is_cancelled, run.store, run.id, launch=run.launch)
    if is_cancelled():
        return status

    def restart() -> bool:
        was_restarted = True  # also if it raises: the request may have arrived
        try:
            was_restarted = executor.restart(handle, is_cancelled=partial(_surely, is_cancelled))
        finally:
            if was_restarted and is_cancelled():
                log.info("run %s was cancelled while it was started again: stop it", run.id)
                executor.cancel(handle)
        return was_restarted

    # Ctrl-C only detaches: between the delete and the create it must not end the run.
    return run.status(progress=False) if brought_to_its_end(restart) else status


def _surely(is_cancelled: Callable[[], bool]) -> bool:
    """False if the store does not answer: the failed attempt is deleted already, so without the next one the run would
    be lost. The store is asked again after it was created."""
    try:
        return is_cancelled()
    except StoreError as exc:
        log.info("the store does not say whether the run is cancelled: %s", exc.message)
        return False
