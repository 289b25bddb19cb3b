"""Rows of `collect`: how the given replicas ended, or what is known about them at the deadline.

All replicas of one run are read together, in a thread for each run, so that a service or a store that does not answer
delays no other run and not the end of `collect`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from atoll._threads import Unanswered, answer_within
from atoll._time import Deadline, backoff
from atoll.errors import AtollError, BackendError, RunNotFound, StoreError, WaitTimeout
from atoll.executors.base import Executor
from atoll.result import ReplicaOutcome, join, outcome_of
from atoll.runs.run import Run
from atoll.runs.stored import StoredRun
from atoll.runs.wait import wait, watching
from atoll.serverless.handles import Replica
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

T = TypeVar("T")
Row = dict[str, Any]
LEAST_S = 3.0
"""The time that each question has even if the deadline of `collect` is nearer: a service may limit our calls."""
_OVERDUE_S = 600.0
"""How long beyond the time limit of its replicas `collect` waits if it has no deadline of its own."""


def rows_of(
    replica: Replica, ranks: Collection[int], executor: Executor, open_run: Callable[[], Run], deadline: Deadline
) -> dict[int, Row]:
    """A row for each of these ranks of the replica's run: its end, or its last known state at the deadline."""
    try:
        run = _answer(open_run, deadline)
    except (Unanswered, StoreError, RunNotFound) as exc:  # the backend may still know the states
        status = _backend_status_at(replica, ranks, executor, deadline)
        return _rows_so_far(status, None, ranks, False, deadline, _cause(exc))
    status, problem = None, None
    try:
        status = _answer(partial(run.status, progress=False), deadline)
        if len(_ended(status, ranks)) < len(ranks) and not deadline.is_past:
            status = _status_at(run, ranks, deadline) or status
        if ended := _ended(status, ranks):
            result = _answer(partial(run.result, ended, status), deadline)
            ends = {outcome.rank: end_row(outcome) for outcome in result.outcomes}
            return {rank: ends.get(rank) or open_row(status.replicas[rank], deadline) for rank in ranks}
    except WaitTimeout as exc:  # a rank was started again meanwhile
        status = exc.status or status
    except (Unanswered, StoreError, RunNotFound) as exc:
        problem = _cause(exc)
    outcomes: Mapping[int, ReplicaOutcome] | None = None
    with suppress(Unanswered, StoreError):
        stored = StoredRun(run.store, run.id, run.launch)
        outcomes = _answer(partial(stored.outcomes, ranks, with_results=True), deadline)
    ends_once = run.spec.placement.max_restarts == 0
    return _rows_so_far(status, outcomes, ranks, ends_once, deadline, problem)


def _cause(exc: Exception) -> AtollError | None:
    """The error of the store or the service behind an exception; None if there was no answer at all."""
    found = exc.__cause__ if isinstance(exc, Unanswered) else exc
    return found if isinstance(found, AtollError) else None


def _backend_status_at(
    replica: Replica, ranks: Collection[int], executor: Executor, deadline: Deadline
) -> RunStatus | None:
    """As `_status_at`, for a run whose record cannot be read."""
    ask = partial(executor.status, replica.run)
    with suppress(Unanswered, BackendError):
        status = _answer(ask, deadline)
        if len(_ended(status, ranks)) == len(ranks) or deadline.is_past:
            return status
        left_s = None if deadline.timeout_s is None else deadline.remaining_s
        try:
            with watching(executor, replica.run) as watch:
                return wait(watch.status, timeout_s=left_s, ranks=ranks, pause=watch.wait)
        except WaitTimeout as exc:
            return exc.status or status
    return None


def end_row(outcome: ReplicaOutcome) -> Row:
    """The row of a replica that has ended."""
    error = None
    if outcome.state is not ReplicaState.SUCCEEDED:
        was_stopped = outcome.reason in (Reason.CANCELLED, Reason.TIMEOUT, Reason.PREEMPTED)
        raised = None if was_stopped and outcome.error and outcome.error.type == "SystemExit" else outcome.error
        error = raised.traceback if raised is not None and raised.traceback else outcome.message
        error = error or f"the replica is {outcome.state} ({outcome.reason})"
    return _row(outcome, error, outcome.result, list(getattr(outcome, "warnings", ())))


def open_row(replica: ReplicaStatus, deadline: Deadline, *, is_known: bool = True, why: str = "") -> Row:
    """The row of a replica that has not ended, or whose end could not be read."""
    within = "within its time limit" if deadline.timeout_s is None else f"within {deadline.timeout_s:g} s"
    if replica.state is ReplicaState.LOST:
        error = f"{replica.message or 'the backend does not know this replica'}{f'; {why}' if why else ''}"
    elif replica.state.is_terminal:
        error = f"the replica has ended ({replica.state}), and its result could not be read from the store {within}"
        error += "".join(f": {text}" for text in (replica.message, why) if text)
    elif is_known:
        because = f" ({replica.message})" if replica.message else ""
        error = f"the replica has not ended {within}: it is {replica.state}{because}, and it continues"
    else:
        error = f"the status of the replica could not be read {within}{f': {why}' if why else ''}"
    return _row(replica, error, None, [])


def _row(of: ReplicaOutcome | ReplicaStatus, error: str | None, result: Any, warnings: list[str]) -> Row:
    return {
        "rank": of.rank,
        "status": str(of.state),
        "exit_code": of.exit_code,
        "error": error,
        "result": result,
        "reason": str(of.reason) if of.state.is_terminal or of.reason is not Reason.OK else None,
        "attempt": of.attempt,
        "warnings": warnings,
    }


def _ended(status: RunStatus | None, ranks: Collection[int]) -> list[int]:
    return [] if status is None else [r for r in ranks if status.replicas[r].state.is_terminal]


def _answer(call: Callable[[], T], deadline: Deadline) -> T:
    """What the call returns. Retries it while that may help; `Unanswered` if there is no answer by the deadline."""
    pauses = backoff(0.1, cap_s=2.0)
    while True:
        try:
            return answer_within(_time_left(deadline), call)
        except (BackendError, StoreError) as exc:
            if not exc.retryable:
                raise
            if deadline.is_past:
                raise Unanswered from exc
        deadline.sleep(next(pauses))


def _time_left(deadline: Deadline) -> float | None:
    return None if deadline.timeout_s is None else max(deadline.remaining_s, LEAST_S)


def _status_at(run: Run, ranks: Collection[int], deadline: Deadline) -> RunStatus | None:
    """The status when the ranks have ended, or the last one that was read before the deadline.

    Without a deadline, wait until the time limit of the replicas: a rank that still runs at the end of a second wait
    of that length has run for longer than its limit, and nobody stops it.
    """
    placement = run.spec.placement
    limit_s = placement.timeout_s + placement.grace_s + _OVERDUE_S
    was_running: set[int] = set()
    while True:
        try:
            return run.wait(limit_s if deadline.timeout_s is None else deadline.remaining_s, ranks=ranks)
        except WaitTimeout as exc:
            if deadline.timeout_s is not None or exc.status is None:
                return exc.status
            states = {rank: exc.status.replicas[rank].state for rank in ranks}
            open_ranks = {rank for rank, state in states.items() if not state.is_terminal}
            if open_ranks <= was_running:
                return exc.status
            was_running = {rank for rank, state in states.items() if state is ReplicaState.RUNNING}
        except (BackendError, StoreError) as exc:  # `wait` has retried for minutes
            if not exc.retryable:
                raise
            if deadline.is_past:
                return None


def _rows_so_far(
    status: RunStatus | None,
    outcomes: Mapping[int, ReplicaOutcome] | None,
    ranks: Collection[int],
    ends_once: bool,
    deadline: Deadline,
    problem: AtollError | None,
) -> dict[int, Row]:
    """Rows at the deadline. `outcomes` is None if the store could not be read.

    Without a status, an outcome in the store is the end of its rank if the rank succeeded or is not restarted.
    """
    known, why = outcomes or {}, "" if problem is None else problem.message
    rows: dict[int, Row] = {}
    if status is None:
        for rank in ranks:
            found = known.get(rank)
            # A replica in a container does not know whether it was cancelled or its machine was taken away.
            is_end = ends_once and found is not None and found.reason is not Reason.PREEMPTED
            if found is not None and (is_end or found.state is ReplicaState.SUCCEEDED):
                rows[rank] = end_row(found)
            else:
                unread = ReplicaStatus(rank, ReplicaState.PENDING, Reason.WAITING)
                rows[rank] = open_row(unread, deadline, is_known=False, why=why)
        return rows
    joined = status if outcomes is None else join(status, outcomes)
    for rank in ranks:
        replica = joined.replicas[rank]
        is_over = replica.state.is_terminal and outcomes is not None
        rows[rank] = end_row(outcome_of(replica, known.get(rank))) if is_over else open_row(replica, deadline, why=why)
    return rows
