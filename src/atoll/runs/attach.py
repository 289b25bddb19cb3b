"""`attach` finds a run again, from any process, by its id or handle."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from atoll import journal, registry
from atoll._threads import Unanswered, answer_within
from atoll.errors import AtollError, ConfigError, RunNotFound, StoreError, StoreRefused, StoreUnavailable
from atoll.executors.base import Executor, HandleResolver, ranks_to_stop
from atoll.handle import RunHandle
from atoll.runs import index
from atoll.runs.cancel import RECORD_TIMEOUT_S, Stopped, status_or_none
from atoll.runs.cost import Cost
from atoll.runs.run import Run
from atoll.status import ReplicaState, RunStatus

log = logging.getLogger("atoll.runs")


def attach(
    run: str,
    *,
    store: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    launch: int | None = None,
) -> Run:
    """The run with this id or handle, from any process: its newest launch, or the one with this number.

    An id is looked up in `store`, or in the local index; a handle also at the backend it names. If the store does not
    answer, or has lost the run, but the handle is known, the result is an `UnrecordedRun`, which can still be stopped.
    """
    handle = RunHandle.parse(run) if "://" in run else None
    known = None if store and handle is None else index.find(run)
    run_id, where = (known.run_id, store or known.store) if known else (None if handle else run, store)
    if handle is not None and (run_id is None or where is None):
        run_id, where = _origin(handle, where, settings or {})
    known_handle = handle or (RunHandle.parse(known.handle) if known else None)
    try:
        if run_id is None or where is None:
            raise RunNotFound(
                f"no run `{run}` in the local index",
                hint="give its store: `attach(run, store=…)`, or `--store URI` on the command line",
            )
        if launch is not None:
            handle = None  # a handle names the run here
        read = partial(_read_run, where, run_id, handle, settings, launch)
        if known_handle is None or launch is not None:
            return Run.stored(registry.open_store(where), run_id, handle, settings, launch=launch)
        return answer_within(RECORD_TIMEOUT_S, read)
    except (StoreError, RunNotFound, Unanswered) as problem:
        exc = StoreUnavailable("the store does not answer") if isinstance(problem, Unanswered) else problem
        if known_handle is None or launch is not None:
            raise
        found = UnrecordedRun(run_id or known_handle.native_id, known_handle, exc, settings)
        status = status_or_none(found.executor, known_handle)
        if isinstance(exc, RunNotFound) and (status is None or status.counts().keys() == {ReplicaState.LOST}):
            raise
        log.info("%s; only the handle of run `%s` is known", exc.message, found.id)
        exc.hint = "`atoll ps` lists the runs that this machine knows"
        if status is None or not status.is_terminal:
            exc.hint = f"its replicas may still run: `atoll cancel {shlex.quote(run)}` stops them without the store"
        return found


def _read_run(
    store: str | os.PathLike[str],
    run_id: str,
    handle: RunHandle | None,
    settings: Mapping[str, Any] | None,
    launch: int | None = None,
) -> Run:
    try:
        opened = registry.open_store(store)
    except ConfigError as exc:
        raise StoreRefused(exc.message, reason="cannot_open", hint=exc.hint) from exc
    return Run.stored(opened, run_id, handle, settings, launch=launch)


def _origin(
    handle: RunHandle, store: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> tuple[str | None, str | os.PathLike[str] | None]:
    """Run id and store of a handle: from the backend if it knows them, else by a search in the given store."""
    executor = registry.executor(handle.executor, **settings)
    context = executor.origin(handle) if isinstance(executor, HandleResolver) else None
    if context is not None:
        return context.run_id, store or context.store_uri
    if store is None:
        return None, None
    opened = registry.open_store(store)
    match = (run_id for run_id in journal.run_ids(opened) if journal.read_handle(opened, run_id) == handle)
    return next(match, None), store


class UnrecordedRun(Run):
    """A run whose record cannot be read: only its handle is known. The backend gives its status and stops it.

    Whatever needs the record raises the error of the store.
    """

    def __init__(
        self, run_id: str, handle: RunHandle, problem: AtollError, settings: Mapping[str, Any] | Executor | None
    ) -> None:
        given = settings if isinstance(settings, Executor) else None
        self.executor = given or registry.executor(handle.executor, **(settings or {}))  # type: ignore[arg-type]
        self.id, self.launch, self.rounds_of, self._handle, self._problem = run_id, 1, 1, handle, problem

    def __getattr__(self, name: str) -> Any:
        if name in ("spec", "store", "_stored", "_clock"):
            raise self._problem
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<UnrecordedRun {self.id} on {self.executor.name}, {self.handle}>"

    def status(self, *, progress: bool = True) -> RunStatus:  # noqa: ARG002  heartbeats are in the store
        """The status of every rank, from the backend alone."""
        return self.executor.status(self.handle)

    def cost(self, status: RunStatus | None = None) -> Cost | None:  # noqa: ARG002  the price is in the store
        """None: the price is in the record."""
        return None

    def logs(
        self,
        rank: int = 0,
        *,
        tail: int | None = None,
        follow: bool = False,
        since: float | None = None,
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Lines of one rank's output, from the backend alone, which knows no times and no earlier attempts."""
        if since is not None or attempt is not None:
            raise self._problem
        return self.executor.logs(self.handle, rank, tail=tail, follow=follow)

    def cancel(self, ranks: Sequence[int] | None = None, *, abandon: bool = False) -> Stopped:
        """Stop every replica, or only these ranks. The stop is not recorded, so the run cannot be abandoned."""
        if abandon:
            raise self._problem
        chosen = ranks_to_stop(self.executor, self.handle, ranks)
        before = status_or_none(self.executor, self.handle)
        if ranks is None:
            self.executor.cancel(self.handle)
        else:
            self.executor.cancel(self.handle, chosen)
        was_over = before is not None and all(before.replicas[rank].state.is_terminal for rank in chosen)
        return Stopped(before, None if was_over else self._problem)
