"""`Run` controls a run that was started; `runs/attach.py` finds it again, `runs/prepare.py` starts it.

The command line, `atoll.serverless` and users call this. All state is in the store and at the backend, so every
method of `Run` works in any process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from atoll import journal, registry
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext
from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    ConfigError,
    MissingExtra,
    RunNotFound,
    StoreError,
    WaitTimeout,
)
from atoll.executors.base import AttemptReader, Executor, Plan, RunWatch, StoreReader
from atoll.handle import RunHandle
from atoll.result import ReplicaOutcome, RunResult, join, last_lines, outcome_of, ranks_text, with_cancelled_ranks
from atoll.rounds.metrics import rounds_held
from atoll.runs.cancel import STATUS_TIMEOUT_S, Cancellation, Stopped
from atoll.runs.cost import Cost, cost_of
from atoll.runs.queue_limit import QueueLimit, WaitedTooLong
from atoll.runs.replacement import Replacements
from atoll.runs.restarts import could_grow, restarted
from atoll.runs.stored import Beat, StoredRun
from atoll.runs.wait import OnDeadline, wait, watching
from atoll.spec import RunSpec
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus, RunStatus, with_progress
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout

if TYPE_CHECKING:
    from atoll.runs.delete import Deletion
    from atoll.training.weights import Weights

log = logging.getLogger("atoll.runs")


class Run:
    """A run that was started. Works in any process that can reach the backend and the store."""

    def __init__(
        self,
        spec: RunSpec,
        executor: Executor,
        store: Store,
        handle: RunHandle | None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        launch: int = 1,
        rounds_of: int | None = None,
    ) -> None:
        self.spec, self.executor, self.store = spec, executor, store
        self.id = spec.run_id
        self.launch = launch
        """The number of the launch; greater than 1 if earlier launches were undone, or if the run was resumed."""
        self.rounds_of = rounds_of or launch
        """The launch in whose folder of the store the rounds are: an earlier one if the run was resumed."""
        self.was_there = False
        """Whether `launch` found the run already started, and started nothing."""
        self._handle = handle
        self._clock = clock
        self._watch: RunWatch | None = None
        self._stored = StoredRun(store, spec.run_id, launch)

    @classmethod
    def stored(
        cls,
        store: Store,
        run_id: str,
        handle: RunHandle | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        launch: int | None = None,
    ) -> Run:
        """The run in a store: its newest launch, or the launch with this handle or number."""
        if launch is not None:
            found = journal.launch_at(store, run_id, launch)
        else:
            found = journal.launch_of(store, run_id, handle) if handle else journal.newest_launch(store, run_id)
        record = journal.read_launch(store, run_id, found.number)
        if record.executor == journal.OTHER_LAUNCHER:
            what = f"run `{run_id}` was started by another launcher, such as TorchX, which alone sees its replicas"
            hint = "ask that launcher for status and logs; `atoll verify` and `atoll export` read the rounds of the run"
            raise ConfigError(what, reason="other_launcher", hint=hint)
        executor = registry.executor(record.executor, **(settings or {}))
        log.debug("run %s: launch %d, %s, on %s", run_id, found.number, found.handle or "no handle", executor.name)
        try:
            spec = RunSpec.from_json(record.spec)
        except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as exc:
            what = f"the record of run `{run_id}` is damaged, or of another version of Atoll: {exc}"
            raise StoreError(what, uri=store.uri, reason="damaged") from exc
        return cls(spec, executor, store, handle or found.handle, launch=found.number, rounds_of=record.rounds_of)

    def __repr__(self) -> str:
        return f"<Run {self.id} on {self.executor.name}, store {self.store.uri}>"

    @property
    def handle(self) -> RunHandle:
        """The handle, whose text is enough to `attach`."""
        if self._handle is None:
            if journal.is_cancelled(self.store, self.id, launch=self.launch):
                raise RunNotFound(f"run `{self.id}` was cancelled before it started", hint="choose another run id")
            raise RunNotFound(
                f"run `{self.id}` was recorded but never started: its launcher failed or was interrupted",
                hint="launch it again with the same run id to continue",
            )
        return self._handle

    def plan(self) -> Plan:
        """The exact request that started this run."""
        return self.executor.plan(RunContext(self.id, self.store.uri, self.launch), self.spec.placement)

    def status(self, *, progress: bool = True) -> RunStatus:
        """The status of every rank, from the backend and the store."""
        backend = self._backend_status()
        outcomes = self._stored.outcomes() if _needs_store(backend) else None
        status = self._joined(backend, outcomes)
        if not progress:
            return status
        beats = self._stored.beats(len(status.replicas))
        return status.with_replicas(self._with_beat(replica, beats.get(replica.rank)) for replica in status.replicas)

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        ranks: Collection[int] | None = None,
        fail_fast: bool = False,
        on_deadline: OnDeadline = "leave",
        on_change: Callable[[RunStatus], None] | None = None,
        on_trouble: Callable[[AtollError | None], None] | None = None,
    ) -> RunStatus:
        """Return when the run, or each of these `ranks`, has ended.

        After `timeout_s` raise `WaitTimeout`; `on_deadline="cancel"` cancels the run first. Meanwhile
        a replica whose machine was lost is replaced, if the backend can do that and the run has restarts; and a run
        whose replicas have waited for longer than a limit of the backend, such as `queue_timeout_s`, is cancelled.

        `WaitTimeout.status` is the last status that was read. The deadline holds also while the service or the store
        does not answer.

        If the store or the backend cannot be reached, retry for five minutes, then raise its error. `on_trouble` is
        called with each such error, and with None after the next success.
        """
        store = with_retry_timeout(self.store, STATUS_TIMEOUT_S)
        try:
            with watched(self, store) as (run, pause):
                queue = QueueLimit(self.executor, self._handle, self._clock)
                replacements = Replacements(run, self._handle, self._clock)

                def read() -> RunStatus:
                    found = replacements.applied(run.status(progress=on_change is not None))
                    return queue.checked(restarted(run, self._handle, found))

                status = wait(
                    read,
                    timeout_s=timeout_s,
                    ranks=ranks,
                    fail_fast=fail_fast,
                    on_change=on_change,
                    on_trouble=on_trouble,
                    pause=pause,
                    clock=self._clock,
                )
        except WaitedTooLong as exc:
            self._cancel(str(exc))
            return self.status()
        except WaitTimeout as exc:
            if on_deadline == "cancel":
                self._cancel(f"cancelled because it was not over after {timeout_s:g} s")
                raise WaitTimeout(f"run `{self.id}` was cancelled: {exc.message}", status=exc.status) from exc
            hint = f"atoll wait {self.id}"
            raise WaitTimeout(f"run `{self.id}` is {exc.message}", status=exc.status, hint=hint) from exc
        if fail_fast and not status.is_terminal:
            self._cancel(f"cancelled because {_ended(status)}")
            return self.status()
        return status

    def cancel(self, ranks: Sequence[int] | None = None, *, abandon: bool = False) -> Stopped:
        """Stop every replica; returns when none runs. A run that was recorded but not started will not start.

        With `ranks`, stop only these: they are not started again, and the others keep running. A backend that can only
        stop all replicas together (`Capabilities.cancels_together`) then raises `ConfigError`.

        Stopping does not need the store: if the stop cannot be recorded, the returned `Stopped` says so. Raises
        `StopFailed`, which names every replica that may still run.

        `abandon` is for a backend that is gone: what it cannot be asked to stop is given up, and the run counts as
        over. `Stopped.left_running` then says what was not stopped.
        """
        return self._cancel(ON_REQUEST, ranks, abandon=abandon)

    def _cancel(self, why: str, ranks: Sequence[int] | None = None, *, abandon: bool = False) -> Stopped:
        return Cancellation(self, self._handle, why).carry_out(ranks, abandon=abandon)

    def cost(self, status: RunStatus | None = None) -> Cost | None:
        """What this launch costs so far, is expected to cost, and costs at most; None if its price is not known.

        `status` is the last one that was read; without it, it is read again.
        """
        recorded = self._prices
        hourly_usd, placement = recorded.get("hourly_usd"), self.spec.placement
        if not isinstance(hourly_usd, int | float):
            return None
        found = self.status() if status is None else status
        return cost_of(
            found,
            hourly_usd,
            timeout_s=placement.timeout_s,
            now=self._clock.time(),
            parts=placement.parts,
            part_usd=recorded.get("part_usd") or (),
        )

    @cached_property
    def _prices(self) -> Mapping[str, Any]:
        """The record of the price before the launch; it does not change."""
        return journal.read_intent(self.store, self.id, self.launch) or {}

    def resume(
        self,
        *,
        on: str | Executor | Sequence[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        workspace: str | os.PathLike[str] | None = None,
        accept_changes: bool = False,
        **placement: Any,
    ) -> Run:
        """Continue a run that is over from its last agreed state, as its next launch; returns that launch.

        Without arguments, it continues as it was launched last. `on` and `settings` choose another backend, `args`
        replaces single arguments, such as `rounds`, and `placement` takes the same names as `launch`, except another
        number of replicas. `workspace` sends a folder as the code. If the code has changed, `Conflict` (reason
        `changed`) lists the differences, unless `accept_changes` is set. A run that is not over is a `Conflict` with
        the reason `running`.
        """
        from atoll.runs.resume import resume

        return resume(
            self,
            on=on,
            settings=settings,
            args=args,
            workspace=workspace,
            accept_changes=accept_changes,
            **placement,
        )

    def result(self, ranks: Collection[int] | None = None, status: RunStatus | None = None) -> RunResult:
        """How every rank, or each of these `ranks`, ended and what it returned.

        `status` is the last one that was read; without it, it is read again. Raises `WaitTimeout` if one of them has
        not ended.
        """
        backend = self._backend_status() if status is None else status
        outcomes = self._stored.outcomes(ranks, with_results=True)
        replicas = [r for r in self._joined(backend, outcomes).replicas if ranks is None or r.rank in ranks]
        running = [replica for replica in replicas if not replica.state.is_terminal]
        if running:
            what = f"run `{self.id}`" if ranks is None else f"{ranks_text(r.rank for r in running)} of run `{self.id}`"
            raise WaitTimeout(f"{what} has not ended: it is {running[0].state}", hint=f"atoll wait {self.id}")
        joined = (outcome_of(replica, outcomes.get(replica.rank)) for replica in replicas)
        final = tuple(self._with_last_lines(outcome) for outcome in joined)
        rounds = (
            0
            if all(o.state is ReplicaState.SUCCEEDED for o in final)
            else rounds_held(self.store, self.id, launch=self.rounds_of)
        )
        return RunResult(self.id, final, could_restart(self.spec, self.executor), rounds)

    def delete(self, *, keep_weights: bool = False) -> Deletion:
        """Delete the objects of a run that is over; a run that is not over is a `Conflict` with the reason `running`.

        With `keep_weights`, the records of the run, its results and its newest agreed weights stay, and only logs,
        checkpoints, metrics and older rounds are deleted; the run cannot be resumed then.
        """
        from atoll.runs.delete import check_is_over, delete, planned_deletion

        planned = planned_deletion(self.store, self.id, keep_weights=keep_weights)
        check_is_over(self)
        delete(self.store, planned)
        return planned

    def weights(self, round_no: int | None = None) -> Weights:
        """The agreed weights after `round_no` rounds, by default after the last finished one; also during the run.

        Raises `RoundError` if no round is finished, or if the store no longer has what the weights are rebuilt from;
        its hint then lists the rounds that can be rebuilt.
        """
        return stored_weights(self.store, self.id, round_no, launch=self.rounds_of)

    def logs(
        self,
        rank: int = 0,
        *,
        tail: int | None = None,
        follow: bool = False,
        since: float | None = None,
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Lines of one rank's output, from the backend if it has them, else from the store.

        Only the backend has the output of an image's own program: not by time, and by attempt only if it keeps the
        output of earlier attempts.
        """
        if not 0 <= rank < self.spec.placement.replicas:
            raise ConfigError(f"rank {rank}: run `{self.id}` has ranks 0 to {self.spec.placement.replicas - 1}")
        if self.spec.task.program:
            yield from self._program_logs(rank, tail, follow, since, attempt)
            return
        problem: BackendError | ConfigError | None = None
        began = False
        if since is None and attempt is None and self._handle is not None:
            try:
                for line in self.executor.logs(self._handle, rank, tail=tail, follow=follow):
                    began = True
                    yield line
                return
            except (BackendError, ConfigError) as exc:
                if began:
                    raise
                # The machine or the job is gone, or we may not read it; the store has the uploaded log chunks.
                problem = exc
        is_over = lambda: self.status(progress=False).replicas[rank].state.is_terminal  # noqa: E731
        for line in self._stored.log.lines(
            rank,
            tail=tail,
            since=since,
            attempt=attempt,
            is_over=is_over if follow else None,
            clock=self._clock,
        ):
            began = True
            yield line
        if not began and isinstance(problem, (AuthError, ConfigError)):
            raise problem
        if not began and attempt is not None and since is None and isinstance(self.executor, AttemptReader):
            with suppress(RunNotFound):
                yield from self.executor.attempt_logs(self.handle, rank, attempt, tail=tail)

    def _program_logs(
        self, rank: int, tail: int | None, follow: bool, since: float | None, attempt: int | None
    ) -> Iterator[str]:
        """The output of an image's own program, which is not in the store."""
        if since is not None:
            raise ConfigError(f"run `{self.id}` runs a program of its image: its log has no `since`", reason="program")
        if attempt is None:
            if self._handle is not None:
                yield from self.executor.logs(self._handle, rank, tail=tail, follow=follow)
            return
        if not isinstance(self.executor, AttemptReader):
            what = f"run `{self.id}` runs a program of its image, and `{self.executor.name}` keeps no earlier attempts"
            raise ConfigError(f"{what}: its log has no `attempt`", reason="program")
        yield from self.executor.attempt_logs(self.handle, rank, attempt, tail=tail)

    def _backend_status(self) -> RunStatus:
        if self._handle is not None:
            return self._status_of(self._handle)
        replicas = self.spec.placement.replicas
        if cancel := journal.read_cancel(self.store, self.id, launch=self.launch):
            if cancel.is_abandoned:
                return RunStatus.lost(replicas, cancel.why)
            message = "cancelled before it started"
            return RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, message)
        launch = journal.launch_at(self.store, self.id, self.launch)
        again = "resume it again" if launch.is_resume else "launch it again"
        if launch.undone is not None:
            message = f"the launch was undone ({launch.undone}); {again} to start it"
            return RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, message)
        message = f"its launcher was interrupted before it started; {again} to continue"
        waiting = RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING, message)
        intended = journal.intended_handle(self.store, self.id, self.launch)
        if intended is None:
            return waiting
        # A half-finished launch: some replicas may run already.
        found = self.executor.status(intended)
        pairs = zip(found.replicas, waiting.replicas, strict=True)
        return RunStatus(tuple(idle if r.state is ReplicaState.LOST else r for r, idle in pairs))

    def _status_of(self, handle: RunHandle) -> RunStatus:
        """The backend's status. If it cannot be asked and the store has the end of every rank, or of the run by a
        cancellation, all are LOST there.

        A `StoreReader` then also knows ranks that have not ended; a process that waits asks the backend again instead.
        """
        try:
            return self.executor.status(handle) if self._watch is None else self._watch.status()
        except (BackendError, ConfigError) as exc:
            if not self._is_over_in_store():
                is_waiting = self._watch is not None
                if isinstance(exc, BackendError) and isinstance(self.executor, StoreReader) and not is_waiting:
                    return self.executor.stored_status(handle, exc.message)
                raise
            log.warning("run %s: read from the store alone: %s", self.id, exc.message)
            return RunStatus.lost(handle.replicas, exc.message)

    def _is_over_in_store(self) -> bool:
        """Whether the store has the end of every rank, or of the run. False if the store does not answer either."""
        try:
            return self._ended_in_store() or self._is_stopped()
        except StoreError as exc:
            log.debug("run %s: the store does not say whether it is over: %s", self.id, exc.message)
            return False

    def _ended_in_store(self) -> bool:
        """Whether every rank has written an outcome that no restart follows."""
        outcomes = self._stored.outcomes()
        return len(outcomes) == self.spec.placement.replicas and all(map(self._is_final, outcomes.values()))

    def _is_stopped(self) -> bool:
        """Whether it is recorded that the run is over: every replica was stopped and no waiting process can start more,
        or the run was abandoned."""
        cancel = journal.read_cancel(self.store, self.id, launch=self.launch)
        return cancel is not None and (cancel.is_abandoned or not could_grow(self.spec, self.executor))

    def _is_final(self, outcome: ReplicaOutcome) -> bool:
        """Whether no restart follows this outcome."""
        if outcome.state is ReplicaState.SUCCEEDED:
            return True
        return outcome.attempt >= self.spec.placement.max_restarts and outcome.reason is not Reason.PREEMPTED

    def _joined(self, backend: RunStatus, outcomes: Mapping[int, ReplicaOutcome] | None) -> RunStatus:
        """The backend's status, corrected by the outcomes, if they were read, and by the records of cancellations."""
        status = backend if outcomes is None else self._join(self._with_stored_rows(backend, outcomes), outcomes)
        if not any(r.state in (ReplicaState.FAILED, ReplicaState.LOST) for r in status.replicas):
            return status
        cancels = journal.read_rank_cancels(self.store, self.id, launch=self.launch)
        return with_cancelled_ranks(status, {rank: each.why for rank, each in cancels.items() if not each.was_over})

    def _with_stored_rows(self, backend: RunStatus, outcomes: Mapping[int, ReplicaOutcome]) -> RunStatus:
        """The status with what the store knows about ranks whose service does not answer."""
        if not any(replica.reason is Reason.NO_ANSWER for replica in backend.replicas):
            return backend
        beats, is_stopped = self._stored.beats(len(backend.replicas)), self._is_stopped()

        def completed(replica: ReplicaStatus) -> ReplicaStatus:
            if replica.reason is not Reason.NO_ANSWER:
                return replica
            if is_stopped or ((outcome := outcomes.get(replica.rank)) is not None and self._is_final(outcome)):
                return replace(replica, state=ReplicaState.LOST, reason=Reason.LOST)  # `join` reads its outcome
            if (beat := beats.get(replica.rank)) is not None and beat.progress.beat_at is not None:
                return replace(replica, state=ReplicaState.RUNNING, attempt=beat.attempt)
            return replica

        return backend.with_replicas(map(completed, backend.replicas))

    def _join(self, backend: RunStatus, outcomes: Mapping[int, ReplicaOutcome]) -> RunStatus:
        may_be_cancelled = {ReplicaState.LOST, ReplicaState.CANCELLED} & {replica.state for replica in backend.replicas}
        cancel = journal.read_cancel(self.store, self.id, launch=self.launch) if may_be_cancelled else None
        why, over = (cancel.why, cancel.over) if cancel and not cancel.is_abandoned else (None, ())
        return join(backend, outcomes, cancelled=why, over=over, writes_outcomes=not self.spec.task.program)

    def _with_beat(self, replica: ReplicaStatus, beat: Beat | None) -> ReplicaStatus:
        """The status with its heartbeat, which also knows of restarts inside a container."""
        replica = with_progress(replica, None if beat is None else beat.progress)
        if beat is None or beat.attempt <= replica.attempt:
            return replica
        before = None if replica.state.is_terminal else self._stored.outcome(replica.rank, beat.attempt - 1)
        message = replica.message if before is None else f"attempt {before.attempt} ended: {before.message}"
        return replace(replica, attempt=beat.attempt, message=message)

    def _with_last_lines(self, outcome: ReplicaOutcome) -> ReplicaOutcome:
        if outcome.state is ReplicaState.SUCCEEDED or outcome.error is not None:
            return outcome
        return replace(outcome, last_lines=last_lines(lambda: self.logs(outcome.rank, tail=5)))


def stored_weights(store: Store, run_id: str, round_no: int | None = None, *, launch: int | None = None) -> Weights:
    """The agreed weights of a run in a store, without its backend; see `Run.weights`."""
    try:
        from atoll.rounds.weights import agreed_weights
        from atoll.training.weights import Weights
    except ModuleNotFoundError as exc:
        raise MissingExtra(exc.name or "torch", extra="train") from exc
    number = journal.newest_rounds(store, run_id) if launch is None else launch
    return Weights(agreed_weights(store, run_id, round_no, launch=number))


@contextmanager
def watched(run: Run, store: Store | None = None) -> Iterator[tuple[Run, Callable[[float], None]]]:
    """The same run for one loop that reads its status, and the function that sleeps between two readings.

    A backend that can watch a run then ends the sleep when something changes, and a status may cost less.
    """
    same = Run(
        run.spec, run.executor, store or run.store, run._handle, run._clock, launch=run.launch, rounds_of=run.rounds_of
    )
    if run._handle is None:
        yield same, run._clock.sleep
        return
    with watching(run.executor, run._handle, run._clock) as same._watch:
        yield same, same._watch.wait


def could_restart(spec: RunSpec, executor: Executor) -> bool:
    """The run has no restarts, and the backend supports them."""
    return spec.placement.max_restarts == 0 and executor.capabilities.max_restarts != 0


def _needs_store(status: RunStatus) -> bool:
    """While a run is running, the backend's status is enough. Ends, lost ranks and ranks whose service does not answer
    need the outcomes in the store."""
    return status.is_terminal or any(
        r.state is ReplicaState.LOST or r.reason is Reason.NO_ANSWER for r in status.replicas
    )


def _ended(status: RunStatus) -> str:
    """Such as `rank 1 failed and ranks 2-3 were cancelled`: the ranks that ended without success."""
    ways: dict[ReplicaState, list[int]] = {}
    for replica in status.failures():
        ways.setdefault(replica.state, []).append(replica.rank)
    return " and ".join(f"{ranks_text(ranks)} {_became(state, len(ranks))}" for state, ranks in ways.items())


def _became(state: ReplicaState, count: int) -> str:
    return str(state) if state is ReplicaState.FAILED else f"{'was' if count == 1 else 'were'} {state}"
