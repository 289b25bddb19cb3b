"""The five methods for any `Executor`. Each public executor only creates its adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from atoll._threads import Unanswered, answer_within, in_background
from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.context import RANK
from atoll.errors import BackendError, ConfigError, RunNotFound, StoreError, StoreUnavailable, WaitTimeout
from atoll.executors.base import Executor
from atoll.handle import RunHandle
from atoll.registry import open_store
from atoll.result import ReplicaOutcome, join, outcome_of
from atoll.runs.attach import UnrecordedRun
from atoll.runs.run import RECORD_TIMEOUT_S, Run, prepare
from atoll.runs.stored import StoredRun
from atoll.serverless.protocol import ReplicaHandle
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

T = TypeVar("T")
LEAST_S = 0.5
"""The time that each question has even if the deadline of `collect` is nearer."""


class Facade:
    """Stateless: the handles contain all that later calls need."""

    backend_name: str
    supports_inter_replica_network: bool
    earlier_names: tuple[str, ...] = ()
    """Backend names in handles of earlier versions, which this facade reads too."""

    def __init__(
        self,
        executor: Executor,
        *,
        store: str | os.PathLike[str],
        run_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._executor, self._store, self._run_id, self._clock = executor, store, run_id, clock

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        if entrypoint_args is not None and not isinstance(entrypoint_args, Mapping):
            message = f"entrypoint_args is a mapping of names to JSON values, not {entrypoint_args!r}"
            raise ConfigError(message, reason="entrypoint_args")
        args = dict(entrypoint_args or {})
        rank_env = args.pop("rank_env", RANK)
        draft = prepare(
            _with_colon(entrypoint),
            on=self._executor,
            store=self._store,
            args=args,
            run_id=self._run_id,
            replicas=n_replicas,
            gpu=gpu,
            timeout_s=timeout,
            rank_env=rank_env,
        )
        run = draft.submit()
        metadata = {"run_id": run.id, "run": str(run.handle), "store": run.store.uri, "launch": run.launch}
        return [ReplicaHandle(rank, self.backend_name, dict(metadata)) for rank in range(n_replicas)]

    def poll(self, handle: ReplicaHandle) -> str:
        return str(self._run(handle).status(progress=False).replicas[handle.rank].state)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return "".join(f"{line}\n" for line in self._run(handle).logs(handle.rank, tail=n_lines))

    def cancel(self, handle: ReplicaHandle) -> None:
        named = self._checked(handle)
        try:
            run = answer_within(RECORD_TIMEOUT_S, partial(self._run, handle))
        except (StoreError, RunNotFound, Unanswered) as exc:
            problem = StoreUnavailable("the store does not answer") if isinstance(exc, Unanswered) else exc
            run = UnrecordedRun(str(handle.metadata["run_id"]), named, problem, self._executor)
        run.cancel()

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """As in the protocol. The rows come after about `timeout`, also if the service or the store does not answer."""
        firsts: dict[str, ReplicaHandle] = {}
        for handle in handles:
            firsts.setdefault(str(self._checked(handle)), handle)
        deadline = Deadline(timeout, self._clock)
        if timeout is None:
            tables = {name: self._final_rows(self._run(handle)) for name, handle in firsts.items()}
        else:
            reads = {name: in_background(partial(self._rows, each, deadline)) for name, each in firsts.items()}
            tables = {name: read.result() for name, read in reads.items()}
        return [tables[str(handle.metadata["run"])][handle.rank] for handle in handles]

    def _final_rows(self, run: Run) -> list[dict[str, Any]]:
        run.wait()
        return [{**_row(outcome), "run_id": run.id, "run": str(run.handle)} for outcome in run.result().outcomes]

    def _rows(self, handle: ReplicaHandle, deadline: Deadline) -> list[dict[str, Any]]:
        """A row for each rank of the handle's run: its end, or its last known state at the deadline."""
        named = RunHandle.parse(handle.metadata["run"])
        status: RunStatus | None = None
        outcomes: Mapping[int, ReplicaOutcome] | None = None
        try:
            run = _answer(partial(self._run, handle), deadline)
            status = _status_at(run, deadline)
            outcomes = _answer(partial(StoredRun(run.store, run.id, run.launch).outcomes, with_results=True), deadline)
            if status is not None and status.is_terminal:
                rows = [_row(outcome) for outcome in _answer(run.result, deadline).outcomes]
            else:
                rows = _rows_so_far(status, outcomes, named.replicas, run.spec.placement.max_restarts == 0, deadline)
        except (Unanswered, StoreError, RunNotFound):  # by the store; the backend may still know the states
            if status is None:
                with suppress(Unanswered, BackendError):
                    status = _answer(partial(self._executor.status, named), deadline)
            rows = _rows_so_far(status, outcomes, named.replicas, False, deadline)
        native = {"run_id": handle.metadata["run_id"], "run": str(named)}
        return [{**row, **native} for row in rows]

    def _run(self, handle: ReplicaHandle) -> Run:
        """The run of a handle, found from the handle alone."""
        named = self._checked(handle)
        from atoll.journal import read_run
        from atoll.spec import RunSpec

        store = open_store(handle.metadata["store"])
        spec = RunSpec.from_json(read_run(store, handle.metadata["run_id"])["spec"])
        return Run(spec, self._executor, store, named, self._clock, launch=handle.metadata.get("launch", 1))

    def _checked(self, handle: ReplicaHandle) -> RunHandle:
        """The handle of the run. `ConfigError` if this is not a handle of this backend, or has no such rank."""
        if handle.backend_name not in (self.backend_name, *self.earlier_names):
            raise ConfigError(
                f"the handle belongs to `{handle.backend_name}`, but this executor is `{self.backend_name}`"
            )
        missing = [name for name in ("run_id", "run", "store") if name not in handle.metadata]
        if missing:
            raise ConfigError(f"the handle has no {', '.join(missing)}; use handles that `launch_replicas` returned")
        named = RunHandle.parse(handle.metadata["run"])
        if not isinstance(handle.rank, int) or not 0 <= handle.rank < named.replicas:
            raise ConfigError(f"rank {handle.rank}: run `{handle.metadata['run_id']}` has {named.replicas} replicas")
        return named


def _answer(call: Callable[[], T], deadline: Deadline) -> T:
    """What the call returns. Retries it while that may help; `Unanswered` if there is no answer by the deadline."""
    pauses = backoff(0.1, cap_s=2.0)
    while True:
        try:
            return answer_within(max(deadline.remaining_s, LEAST_S), call)
        except (BackendError, StoreError) as exc:
            if not exc.retryable:
                raise
            if deadline.is_past:
                raise Unanswered from exc
        deadline.sleep(next(pauses))


def _status_at(run: Run, deadline: Deadline) -> RunStatus | None:
    """The status when the run has ended, or the last one that was read before the deadline."""
    while True:
        try:
            return run.wait(deadline.remaining_s)
        except WaitTimeout as exc:
            return exc.status
        except (BackendError, StoreError) as exc:  # `wait` has retried for minutes
            if not exc.retryable:
                raise
            if deadline.is_past:
                return None


def _rows_so_far(
    status: RunStatus | None,
    outcomes: Mapping[int, ReplicaOutcome] | None,
    replicas: int,
    ends_once: bool,
    deadline: Deadline,
) -> list[dict[str, Any]]:
    """Rows at the deadline. `outcomes` is None if the store could not be read.

    Without a status, an outcome in the store is the end of its rank if the rank succeeded or is not restarted.
    """
    known = outcomes or {}
    if status is None:
        finals = {rank: each for rank, each in known.items() if ends_once or each.state is ReplicaState.SUCCEEDED}
        unread = RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING).replicas
        return [_row(finals[r.rank]) if r.rank in finals else _open_row(r, False, deadline) for r in unread]
    joined = status if outcomes is None else join(status, outcomes)
    return [
        _row(outcome_of(replica, known.get(replica.rank)))
        if replica.state.is_terminal and outcomes is not None
        else _open_row(replica, True, deadline)
        for replica in joined.replicas
    ]


def _open_row(replica: ReplicaStatus, is_known: bool, deadline: Deadline) -> dict[str, Any]:
    """The row of a replica that has not ended, or whose end could not be read."""
    within = f"within {deadline.timeout_s:g} s"
    if replica.state.is_terminal:
        error = f"the replica has ended ({replica.state}), and its result could not be read from the store {within}"
    elif is_known:
        error = f"the replica has not ended {within}: it is {replica.state}, and it continues"
    else:
        error = f"the status of the replica could not be read {within}"
    return {
        "rank": replica.rank,
        "status": str(replica.state),
        "exit_code": replica.exit_code,
        "error": error,
        "result": None,
        "reason": str(replica.reason),
        "attempt": replica.attempt,
    }


def _with_colon(entrypoint: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Accept `package.module.function`, too, as other tools write it."""
    if isinstance(entrypoint, str) and ":" not in entrypoint and not entrypoint.endswith(".py") and "." in entrypoint:
        module, _, function = entrypoint.rpartition(".")
        return f"{module}:{function}"
    return entrypoint


def _row(outcome: ReplicaOutcome) -> dict[str, Any]:
    error = None
    if outcome.state is not ReplicaState.SUCCEEDED:
        error = outcome.error.traceback if outcome.error and outcome.error.traceback else outcome.message
    return {
        "rank": outcome.rank,
        "status": str(outcome.state),
        "exit_code": outcome.exit_code,
        "error": error,
        "result": outcome.result,
        "reason": str(outcome.reason),
        "attempt": outcome.attempt,
    }
