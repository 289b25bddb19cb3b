"""Stop a run by its id or handle, also when its store does not answer.

`Run.cancel` stops first and records afterwards, but a run is found through its store. If the store cannot say which
run is meant, the handle is enough: it was given, or the local index has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from atoll.errors import RunNotFound, StoreError
from atoll.executors.base import Executor
from atoll.handle import RunHandle
from atoll.runs import index
from atoll.runs.run import Run, Stopped, status_or_none
from atoll.status import RunStatus

log = logging.getLogger("atoll.runs")


class StopReport(NamedTuple):
    """What `stop` did."""

    run_id: str
    stopped: Stopped
    after: RunStatus | None
    """The status after the stop; None if neither the backend nor the store says it."""


def stop(
    name: str, find: Callable[[], Run], executor: Callable[[str], Executor], *, in_index: bool = True
) -> StopReport:
    """Stop the run with this id or handle. `find` returns the run, `executor` an executor by its name.

    `in_index` is False if the caller named a store, so that the local index must not choose another one.
    """
    known = index.find(name) if in_index else None
    handle = RunHandle.parse(name) if "://" in name else RunHandle.parse(known.handle) if known else None
    try:
        run = find()
    except (StoreError, RunNotFound) as exc:
        if handle is None:
            raise
        log.info("run %s: no record of it (%s); stop %s", name, exc.code, handle)
        backend = executor(handle.executor)
        before = status_or_none(backend, handle)
        backend.cancel(handle)
        stopped = Stopped(before, None if before is not None and before.is_terminal else exc)
        return StopReport(known.run_id if known else name, stopped, status_or_none(backend, handle))
    stopped = run.cancel()
    try:
        after: RunStatus | None = run.status(progress=False)
    except StoreError:
        after = status_or_none(run.executor, run.handle)
    return StopReport(run.id, stopped, after)
