"""Replace replicas whose machine was lost, while a process waits for the run. `Run.wait` calls this at each reading.

The supervisor in a container restarts its replica as long as the container lives. A machine that is lost takes the
supervisor with it; then only a process elsewhere can start the rank again. Both use the same number of restarts, which
the attempts in the store count. A rank is replaced only if

* the backend says that its replica failed after it had started, for a reason that another machine may not have,
* the store has no outcome of its newest attempt: otherwise its supervisor decided that this was the end,
* the run had not ended when this process began to wait, and another rank may still be there to train with,
* this process would send the request that was recorded at the launch, and neither the run nor the rank is cancelled.

`cancel` stops, records, and stops again. A watcher looks for the record after it has started a replacement. So one of
the two stops a replacement that a cancellation races with.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll import journal
from atoll._time import Clock
from atoll.errors import BackendError, ConfigError, KeyNotFound, StoreError
from atoll.executors.base import Executor, Replacer
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.runs.stored import StoredRun
from atoll.spec import RunSpec
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

if TYPE_CHECKING:
    from atoll.runs.run import Run

_PASSING = frozenset({Reason.BACKEND, Reason.CAPACITY, Reason.KILLED, Reason.OOM, Reason.PREEMPTED})
"""Reasons of a failure that may not happen again on another machine."""
_BEAT_EVERY_S = 20.0

log = logging.getLogger("atoll.runs")


def may_replace(spec: RunSpec, executor: Executor) -> bool:
    """Whether a process that waits for this run replaces lost machines."""
    return spec.placement.max_restarts > 0 and isinstance(executor, Replacer)


class Replacements:
    """What one waiting process has replaced, and what it could not replace."""

    def __init__(self, run: Run, handle: RunHandle | None, clock: Clock) -> None:
        self._run, self._handle, self._clock = run, handle, clock
        self._records = StoredRun(run.store, run.id, run.launch)
        self._final: dict[str, str] = {}
        """Native id of a replica that is not replaced -> why this process could not; empty if it should not."""
        self._replaced: dict[int, int] = {}
        """Rank -> the attempt that its replacement begins with."""
        self._beat_at: dict[int, float] = {}
        self._has_seen_it_run = False

    def applied(self, status: RunStatus) -> RunStatus:
        """Replace every lost replica that may be replaced; the returned status has them as pending."""
        self._has_seen_it_run = self._has_seen_it_run or not status.is_terminal
        is_possible = self._handle is not None and may_replace(self._run.spec, self._run.executor)
        if is_possible and self._has_seen_it_run:  # a run that has ended stays as it is
            for replica in status.replicas:
                if replica.state is ReplicaState.FAILED:
                    status = self._without(replica, status)
                elif replica.state is ReplicaState.PENDING and replica.rank in self._replaced:
                    self._keep_alive(replica)
        return status

    def _without(self, failed: ReplicaStatus, status: RunStatus) -> RunStatus:
        """The status after the failed replica was replaced, if it may be replaced."""
        if not _is_lost(failed) or failed.started_at is None or failed.native_id is None or _is_alone(failed, status):
            return status
        started = None
        if failed.native_id not in self._final and not self._is_cancelled(failed.rank):
            started = self._start(failed, failed.native_id)
        if started is not None:
            return self._replaced_by(started, failed, status)
        if why := self._final.get(failed.native_id):
            return _with(status, replace(failed, message=f"{failed.message}; not replaced: {why}"))
        return status

    def _start(self, failed: ReplicaStatus, native_id: str) -> str | None:
        """Start a replacement. Returns its native id; None if there is none, and then it is not tried again."""
        run, executor = self._run, self._run.executor
        assert isinstance(executor, Replacer)
        started, why = None, ""
        try:
            attempt = self._next_attempt(failed)
            if attempt is not None:
                plan = run.plan()
                journal.check_intent(run.store, run.id, plan.request, launch=run.launch)
                started = executor.replace(plan, failed.rank, native_id)
                self._replaced[failed.rank] = attempt
        except (BackendError, ConfigError, KeyNotFound) as exc:
            if isinstance(exc, BackendError) and exc.retryable:
                raise
            log.warning("run %s: rank %d cannot be replaced: %s", run.id, failed.rank, exc.message)
            why = exc.message
        if started is None:
            self._final[native_id] = why
        return started

    def _replaced_by(self, started: str, failed: ReplicaStatus, status: RunStatus) -> RunStatus:
        run = self._run
        if self._is_cancelled(failed.rank):
            log.info("run %s was cancelled while rank %d was replaced: stop it", run.id, failed.rank)
            if journal.is_cancelled(run.store, run.id, launch=run.launch):
                run.executor.cancel(run.handle)
            else:
                run.executor.cancel(run.handle, [failed.rank])
            return run.status()
        log.warning("run %s: rank %d: `%s` replaces `%s`", run.id, failed.rank, started, failed.native_id)
        self._keep_alive(failed)
        pending = replace(
            failed,
            state=ReplicaState.PENDING,
            reason=Reason.RESTARTING,
            message=f"`{started}` replaces `{failed.native_id}`: {failed.message}",
            attempt=self._replaced[failed.rank],
            native_id=started,
            exit_code=None,
            started_at=None,
            ended_at=None,
        )
        return _with(status, pending)

    def _next_attempt(self, failed: ReplicaStatus) -> int | None:
        """The attempt that a replacement begins with; None if the rank has no restart left, or its end is recorded."""
        # A container that was lost early has registered no attempt, but it was one.
        newest = max(self._records.newest_start(failed.rank) or 0, failed.attempt)
        if newest >= self._run.spec.placement.max_restarts:
            return None
        outcome = self._records.outcome(failed.rank, newest)
        is_end = outcome is not None and outcome.reason is not Reason.PREEMPTED
        return None if is_end else newest + 1

    def _is_cancelled(self, rank: int) -> bool:
        """Whether the run, or this rank alone, was cancelled."""
        store, run_id, launch = self._run.store, self._run.id, self._run.launch
        return journal.is_cancelled(store, run_id, launch=launch) or journal.is_rank_cancelled(
            store, run_id, rank, launch=launch
        )

    def _keep_alive(self, replica: ReplicaStatus) -> None:
        """Send the heartbeat of a replacement that waits for its machine, so that no other replica calls it dead."""
        now = self._clock.monotonic()
        if now - self._beat_at.get(replica.rank, -_BEAT_EVERY_S) < _BEAT_EVERY_S:
            return
        self._beat_at[replica.rank] = now
        run, progress = self._run, replica.progress
        beat = {
            "attempt": self._replaced[replica.rank],
            "round_no": progress.round_no,
            "metrics": progress.metrics,
            "last_line": progress.last_line,
            "beat_at": self._clock.time(),
        }
        try:
            run.store.put(RunKeys(run.id, run.launch).beat(replica.rank), json.dumps(beat).encode())
        except StoreError as exc:
            log.debug("run %s: no heartbeat for rank %d: %s", run.id, replica.rank, exc.message)


def _is_lost(replica: ReplicaStatus) -> bool:
    return replica.state is ReplicaState.FAILED and replica.reason in _PASSING


def _is_alone(failed: ReplicaStatus, status: RunStatus) -> bool:
    """Whether every other rank has failed or was cancelled for good, so that a replacement would wait for nothing."""
    others = [replica for replica in status.replicas if replica.rank != failed.rank]
    over = (ReplicaState.FAILED, ReplicaState.CANCELLED)
    return bool(others) and all(r.state in over and not _is_lost(r) for r in others)


def _with(status: RunStatus, replica: ReplicaStatus) -> RunStatus:
    return status.with_replicas(replica if r.rank == replica.rank else r for r in status.replicas)
