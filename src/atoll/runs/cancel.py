"""How `Run.cancel` stops replicas, and records that. Stopping does not need the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from atoll import journal, registry
from atoll._threads import Unanswered, answer_within
from atoll.errors import AtollError, BackendError, ConfigError, RunNotFound, StoreError, StoreUnavailable
from atoll.executors.base import Executor, ranks_to_stop
from atoll.handle import RunHandle
from atoll.journal import Cancel, RankCancel
from atoll.result import ranks_text
from atoll.runs.restarts import could_grow
from atoll.runs.start import planned_handle
from atoll.status import ReplicaState, ReplicaStatus, RunStatus
from atoll.stores.fast import with_retry_timeout

if TYPE_CHECKING:
    from atoll.runs.run import Run

log = logging.getLogger("atoll.runs")
RECORD_TIMEOUT_S = 15.0
"""How long `attach` and `Run.cancel` wait for the store if they can do without it."""
STATUS_TIMEOUT_S = 10.0
"""`Run.wait` and `Run.cancel` retry a store request for at most this long, so that the caller sees an outage soon."""
_ABANDONED_S = 60.0
"""How long `Run.cancel` waits for another backend, on which an earlier launch was abandoned."""


@dataclass(frozen=True)
class Stopped:
    """What a cancellation did. The replicas do not run any more, except some of an abandoned run."""

    before: RunStatus | None
    """The backend's status right before; None if the backend did not say."""
    record_error: AtollError | None = None
    """Why the store could not record the cancellation; None if it is recorded, or had not to be."""
    left_running: AtollError | None = None
    """Why replicas of an abandoned run could not be stopped and may still run; None if none runs."""

    @property
    def warning(self) -> str:
        """What the missing stop or the missing record means; empty if nothing is missing."""
        if self.left_running is not None:
            why = self.left_running.message.rstrip(".")
            return (
                f"the run is abandoned: {why}. Replicas that still run go on, and may cost "
                "money, until their time limit; when the backend answers again, cancel the run again, or `sweep` it"
            )
        if self.record_error is None:
            return ""
        if isinstance(self.record_error, RunNotFound):
            return f"the replicas are stopped, but nothing records that: {self.record_error.message}"
        return (
            "the replicas are stopped, but the store could not record that: "
            f"{self.record_error.message}. `status` may show them as lost instead of cancelled, and a launcher that "
            "is starting this run at this moment does not see the stop; repeat the cancel when the store answers"
        )


class Cancellation:
    """One cancellation of a run whose handle may not be known yet."""

    def __init__(self, run: Run, handle: RunHandle | None, why: str) -> None:
        self._run, self._known, self._why = run, handle, why
        self._executor = run.executor
        self._store = with_retry_timeout(run.store, STATUS_TIMEOUT_S)
        self._before: RunStatus | None = None

    def carry_out(self, ranks: Sequence[int] | None = None, *, abandon: bool = False) -> Stopped:
        """Stop every replica, or these ranks, and record that; see `Run.cancel`."""
        if abandon and ranks is not None:
            raise ConfigError("a run can only be abandoned as a whole, not single ranks", reason="abandon_ranks")
        try:
            return self._stop(ranks)
        except (BackendError, ConfigError) as exc:
            if not abandon:
                raise
            return self._abandon(exc)

    def _stop(self, ranks: Sequence[int] | None) -> Stopped:
        handle, is_started = self._handle_to_stop()
        chosen = ranks_to_stop(self._executor, handle, ranks)
        self._before = before = status_or_none(self._executor, handle)
        if len(chosen) < handle.replicas:
            return self._cancel_ranks(handle, chosen, before, is_started)
        log.info("run %s: stop %s", self._run.id, handle)
        self._executor.cancel(handle)
        self._stop_earlier_launches()
        may_grow = could_grow(self._run.spec, self._executor)
        if before is not None and before.is_terminal and is_started and not (may_grow and any(before.failures())):
            return Stopped(before)
        ended = () if before is None else tuple(r.rank for r in before.replicas if _has_ended(r))
        cancel = Cancel(self._why, ended if is_started else ())
        error = self._record_error(
            partial(journal.record_cancel, self._store, self._run.id, cancel, launch=self._run.launch)
        )
        if error is None and (not is_started or may_grow):
            # A launcher or a watcher that checked for a cancellation before the record was written has created all
            # its replicas by now; a later one sees the record and stops its replicas itself.
            self._executor.cancel(handle)
        return Stopped(before, error)

    def _abandon(self, problem: AtollError) -> Stopped:
        """Record the cancellation although replicas may still run. Raises `problem` if the store does not answer."""
        log.warning("run %s is abandoned: %s", self._run.id, problem.message)
        if self._record_error(partial(self._record_abandoned, problem)) is not None:
            raise problem
        return Stopped(self._before, left_running=problem)

    def _record_abandoned(self, problem: AtollError) -> None:
        """Record that the run was abandoned, unless an earlier record of its stop is enough for it to be over."""
        found = journal.read_cancel(self._store, self._run.id, launch=self._run.launch)
        if found is None or could_grow(self._run.spec, self._executor):
            cancel = Cancel(f"abandoned: {problem.message}", is_abandoned=True)
            journal.record_cancel(self._store, self._run.id, cancel, launch=self._run.launch)

    def _cancel_ranks(
        self, handle: RunHandle, ranks: Sequence[int], before: RunStatus | None, is_started: bool
    ) -> Stopped:
        """Stop these ranks, and record that for each rank that had not ended, or that a watcher could replace."""
        known = before.replicas if before is not None and is_started else ()
        may_grow = could_grow(self._run.spec, self._executor)
        over = {r.rank for r in known if r.state.is_terminal}
        final = over - {r.rank for r in known if may_grow and r.state is ReplicaState.FAILED}

        def record() -> None:
            for rank in (rank for rank in ranks if rank not in final):
                this = RankCancel(self._why, was_over=rank in over)
                journal.record_rank_cancel(self._store, self._run.id, rank, this, launch=self._run.launch)

        log.info("run %s: stop %s of %s", self._run.id, ranks_text(ranks), handle)
        if not is_started:
            # A launcher stops the whole run if it finds a stopped rank without this record.
            error = self._record_error(record)
            self._executor.cancel(handle, ranks)
            return Stopped(before, error)
        self._executor.cancel(handle, ranks)
        error = None if final.issuperset(ranks) else self._record_error(record)
        if error is None and may_grow:
            self._executor.cancel(handle, ranks)  # a watcher may have replaced a rank before the record was written
        return Stopped(before, error)

    def _record_error(self, record: Callable[[], None]) -> StoreError | None:
        """Write a record of the cancellation. Returns why that was not possible."""
        try:
            answer_within(RECORD_TIMEOUT_S, record)
        except (StoreError, Unanswered) as problem:
            error = StoreUnavailable("the store does not answer") if isinstance(problem, Unanswered) else problem
            log.info("run %s: the store could not record that it is cancelled: %s", self._run.id, error.message)
            return error
        return None

    def _handle_to_stop(self) -> tuple[RunHandle, bool]:
        """The handle, and whether the run was started, as far as the store says."""
        handle, is_started = self._known, self._known is not None
        if handle is None:
            try:
                launch = answer_within(RECORD_TIMEOUT_S, lambda: journal.newest_launch(self._store, self._run.id))
                handle, is_started = launch.handle, launch.handle is not None
                handle = handle or self._intended()
            except (StoreError, Unanswered) as exc:
                log.debug("run %s: the store does not say whether it was started: %s", self._run.id, exc)
        handle = handle or planned_handle(self._executor, self._run.plan())
        if handle is None:
            message = f"the launcher of run `{self._run.id}` died, and only it knew what it started"
            raise BackendError(message, executor=self._executor.name, hint="launch it again, then cancel it")
        return handle, is_started

    def _stop_earlier_launches(self) -> None:
        """Stop what undone launches may have left; a store that does not answer leaves that to `sweep`.

        A launch that was started was over when the run was resumed, perhaps because its machines were lost: it is
        stopped where its backend answers, and so is one that was abandoned, on any backend.
        """
        for number in range(1, self._run.launch):
            with suppress(StoreError, Unanswered):
                handle, has_to_be_stopped, is_abandoned = answer_within(
                    RECORD_TIMEOUT_S, partial(self._earlier, number)
                )
                if handle is None:
                    continue
                if handle.executor != self._executor.name:
                    if is_abandoned:
                        self._stop_abandoned(number, handle)
                    continue
                try:
                    self._executor.cancel(handle)
                except AtollError as exc:
                    if has_to_be_stopped:
                        raise
                    log.info("run %s: launch %d was over, and is not stopped: %s", self._run.id, number, exc.message)

    def _earlier(self, number: int) -> tuple[RunHandle | None, bool, bool]:
        """The handle of an earlier launch, whether it was undone, and not abandoned, and whether it was abandoned."""
        launch = journal.launch_at(self._store, self._run.id, number)
        cancel = journal.read_cancel(self._store, self._run.id, launch=number)
        is_abandoned = cancel is not None and cancel.is_abandoned
        handle = journal.handle_to_stop(self._store, self._run.id, number)
        return handle, launch.undone is not None and not is_abandoned, is_abandoned

    def _stop_abandoned(self, number: int, handle: RunHandle) -> None:
        """Stop what an abandoned launch on another backend may have left, if that backend answers again."""
        try:
            answer_within(_ABANDONED_S, lambda: registry.executor(handle.executor).cancel(handle))
        except (AtollError, Unanswered) as exc:
            why = exc.message if isinstance(exc, AtollError) else "no answer"
            log.warning(
                "run %s: launch %d was abandoned, and may still run: %s; `atoll cancel '%s'` stops it",
                self._run.id,
                number,
                why,
                handle,
            )

    def _intended(self) -> RunHandle | None:
        """The handle of a launch that is not finished. Intents of earlier versions have none: plan it again."""
        intent = journal.read_intent(self._store, self._run.id, self._run.launch)
        if intent is None or "handle" in intent:
            return journal.intended_handle(self._store, self._run.id, self._run.launch)
        plan = self._run.plan()
        journal.check_intent(self._store, self._run.id, plan.request, launch=self._run.launch)
        return planned_handle(self._executor, plan)


def status_or_none(executor: Executor, handle: RunHandle) -> RunStatus | None:
    try:
        return executor.status(handle)
    except (BackendError, ConfigError) as exc:
        log.debug("no status of %s before it is stopped: %s", handle, exc.message)
        return None


def _has_ended(replica: ReplicaStatus) -> bool:
    return replica.state.is_terminal and replica.state is not ReplicaState.LOST
