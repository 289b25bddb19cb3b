"""Runs: `prepare` checks one, `launch` starts it, and `Run` controls it; `runs/attach.py` finds it again.

The command line, `atoll.serverless` and users call this. All state is in the store and at the backend, so every
method of `Run` works in any process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll import journal, registry
from atoll._threads import Unanswered, answer_within
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext, default_store
from atoll.errors import (
    AtollError,
    BackendError,
    ConfigError,
    InvalidSpec,
    Problems,
    RunNotFound,
    StoreError,
    StoreUnavailable,
    WaitTimeout,
)
from atoll.executors.base import Executor, Plan, Preflighter
from atoll.handle import RunHandle
from atoll.journal import Cancel
from atoll.result import ReplicaOutcome, RunResult, join, last_lines, outcome_of, ranks_text
from atoll.rounds.metrics import rounds_held
from atoll.runs import entry_check
from atoll.runs.replacement import Replacements, may_replace
from atoll.runs.stand_in import check_plan, likely_executor
from atoll.runs.start import planned_handle, start
from atoll.runs.stored import Beat, StoredRun
from atoll.runs.wait import OnDeadline, wait
from atoll.spec import ON_DEAD_AFTER_S, Code, Entry, RunSpec, Task, is_loading, own_script
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus, RunStatus, with_progress
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout
from atoll.validation import shown

log = logging.getLogger("atoll.runs")
RECORD_TIMEOUT_S = 15.0
"""How long `attach` and `Run.cancel` wait for the store if they can do without it."""
_STATUS_TIMEOUT_S = 10.0
"""`Run.wait` retries a store request for at most this long, so that the caller sees an outage soon."""


def launch(
    entry: str | Callable[..., Any],
    *,
    replicas: int = 1,
    on: str | Executor = "local",
    store: str | os.PathLike[str] | None = None,
    args: Mapping[str, Any] | None = None,
    argv: Sequence[str] = (),
    run_id: str | None = None,
    workspace: str | None = None,
    settings: Mapping[str, Any] | None = None,
    on_dead: str = "fail",
    on_dead_after_s: float = ON_DEAD_AFTER_S,
    **placement: Any,
) -> Run:
    """Start `replicas` of `entry` and return at once; they do not need this process.

    `run_id` is an idempotency key: the same id with the same content returns the existing run, with other content
    it raises `Conflict`. `placement` takes `gpu`, `image`, `timeout_s`, `grace_s`, `max_restarts`, `env`, `secrets`,
    `cpus`, `memory_gib` and `rank_env`. `settings` are the executor's own. `on_dead="fail"` ends the other replicas
    when a round needs a rank that has been dead for `on_dead_after_s`; with `"wait"` they wait until its deadline.
    """
    draft = prepare(
        entry,
        replicas=replicas,
        on=on,
        store=store,
        args=args,
        argv=argv,
        run_id=run_id,
        workspace=workspace,
        settings=settings,
        on_dead=on_dead,
        on_dead_after_s=on_dead_after_s,
        **placement,
    )
    return draft.submit()


def prepare(
    entry: str | Callable[..., Any],
    *,
    on: str | Executor = "local",
    store: str | os.PathLike[str] | None = None,
    workspace: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Draft:
    """Check and plan a run without starting it. Raises all problems together."""
    if is_loading():
        raise ConfigError(
            "a run was launched while a replica was loading your code, so each replica would launch another run",
            hint="put the launch under `if __name__ == '__main__':`",
        )
    if (script := own_script(entry)) is not None:
        name = os.path.basename(script)
        raise ConfigError(
            f"a replica runs `{name}`, and this script launches itself, so each replica would launch another run",
            hint=f"start it with `python {name}`, or run its function: `atoll run {name}:FUNCTION`",
            reason="launches_itself",
        )
    problems, uri = Problems(), default_store() if store is None or store == "" else store
    executor = problems.trying(lambda: executor_for(on, settings))
    checked, left_out = executor, frozenset[str]()
    if executor is None and isinstance(on, str):
        checked, left_out = likely_executor(on, settings, problems)
    opened = problems.trying(lambda: registry.open_store(uri))
    found = problems.trying(lambda: code_for(checked, workspace)) if checked is not None else None
    code, bundle = found or (Code.image(), None)
    built = problems.trying(lambda: RunSpec.build(entry, code=code, **spec))
    task = built.task if built is not None else task_alone(entry, code, spec)
    if task is not None:
        problems.trying(lambda: check_entry(task, workspace))
    plan, address = None, opened.uri if opened is not None else str(uri)
    if executor is not None and built is not None:
        context = RunContext(built.run_id, address)
        plan = problems.trying(lambda: executor.plan(context, built.placement))
    elif checked is not None:
        problems.trying(lambda: check_plan(checked, address, spec, left_out))
    problems.raise_any(f"run `{spec['run_id']}`" if spec.get("run_id") else "this run")
    assert executor is not None
    assert opened is not None
    assert built is not None
    assert plan is not None
    return Draft(with_path(built), executor, opened, plan, bundle)


def executor_for(on: str | Executor, settings: Mapping[str, Any] | None) -> Executor:
    """The executor of a launch. Settings of an executor that exists already would be ignored, so they are an error."""
    if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)):
        raise InvalidSpec("this run", [f"settings={shown(settings)}: a table of names and values"])
    if isinstance(on, str):
        return registry.executor(on, **(settings or {}))
    if not isinstance(on, Executor):
        raise InvalidSpec("this run", [f"on={shown(on)}: the name of an executor, or an executor"])
    if settings:
        names = ", ".join(settings)
        raise InvalidSpec("this run", [f"settings: {names}: `on` is an executor; give them to its constructor"])
    return on


class Draft:
    """A run that is checked and planned but not started."""

    def __init__(self, spec: RunSpec, executor: Executor, store: Store, plan: Plan, bundle: Any = None) -> None:
        self.spec, self.executor, self.store, self.plan, self.bundle = spec, executor, store, plan, bundle

    def submit(self) -> Run:
        """Record, then start. If this process is killed, the next submit with the same run id continues from there."""
        launch = start(self)
        run = Run(self.spec, self.executor, self.store, launch.handle, launch=launch.number)
        run.was_there = launch.was_there
        return run

    def planned(self, launch: int) -> Plan:
        """The plan of a launch of this run; native names contain the number of a later launch."""
        if launch == 1:
            return self.plan
        return self.executor.plan(RunContext(self.spec.run_id, self.store.uri, launch), self.spec.placement)

    def preflight(self) -> None:
        """Run the checks of the executor that need its service; nothing is recorded yet."""
        if isinstance(self.executor, Preflighter):
            self.executor.preflight(self.plan)

    def upload(self) -> None:
        """Upload the code bundle, if there is one."""
        if self.bundle is not None:
            from atoll.bundle import upload

            upload(self.bundle, self.store)


@dataclass(frozen=True)
class Stopped:
    """What a cancellation did. The replicas do not run any more."""

    before: RunStatus | None
    """The backend's status right before; None if the backend did not say."""
    record_error: AtollError | None = None
    """Why the store could not record the cancellation; None if it is recorded, or had not to be."""

    @property
    def warning(self) -> str:
        """What the missing record means; empty if nothing is missing."""
        if self.record_error is None:
            return ""
        if isinstance(self.record_error, RunNotFound):
            return f"the replicas are stopped, but nothing records that: {self.record_error.message}"
        return (
            "the replicas are stopped, but the store could not record that: "
            f"{self.record_error.message}. `status` may show them as lost instead of cancelled, and a launcher that "
            "is starting this run at this moment does not see the stop; repeat the cancel when the store answers"
        )


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
    ) -> None:
        self.spec, self.executor, self.store = spec, executor, store
        self.id = spec.run_id
        self.launch = launch
        """The number of the launch; greater than 1 if earlier launches were undone."""
        self.was_there = False
        """Whether `launch` found the run already started, and started nothing."""
        self._handle = handle
        self._clock = clock
        self._stored = StoredRun(store, spec.run_id, launch)

    @classmethod
    def stored(
        cls, store: Store, run_id: str, handle: RunHandle | None = None, settings: Mapping[str, Any] | None = None
    ) -> Run:
        """The run in a store: its newest launch, or the launch with this handle."""
        record = journal.read_run(store, run_id)
        launch = journal.launch_of(store, run_id, handle) if handle else journal.newest_launch(store, run_id)
        executor = registry.executor(record["executor"], **(settings or {}))
        log.debug("run %s: launch %d, %s, on %s", run_id, launch.number, launch.handle or "no handle", executor.name)
        try:
            spec = RunSpec.from_json(record["spec"])
        except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as exc:
            what = f"the record of run `{run_id}` is damaged, or of another version of Atoll: {exc}"
            raise StoreError(what, uri=store.uri, reason="damaged") from exc
        return cls(spec, executor, store, handle or launch.handle, launch=launch.number)

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
        status = self._joined(backend, self._stored.outcomes()) if _needs_store(backend) else backend
        if not progress:
            return status
        beats = self._stored.beats(len(status.replicas))
        return status.with_replicas(self._with_beat(replica, beats.get(replica.rank)) for replica in status.replicas)

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        fail_fast: bool = False,
        on_deadline: OnDeadline = "leave",
        on_change: Callable[[RunStatus], None] | None = None,
        on_trouble: Callable[[AtollError | None], None] | None = None,
    ) -> RunStatus:
        """Return when the run has ended. After `timeout_s` raise `WaitTimeout`; `on_deadline="cancel"` cancels first.

        Meanwhile a replica whose machine was lost is replaced, if the backend can do that and the run has restarts.

        `WaitTimeout.status` is the last status that was read. The deadline holds also while the service or the store
        does not answer.

        If the store or the backend cannot be reached, retry for five minutes, then raise its error. `on_trouble` is
        called with each such error, and with None after the next success.
        """
        short_timeout = Run(
            self.spec,
            self.executor,
            with_retry_timeout(self.store, _STATUS_TIMEOUT_S),
            self._handle,
            self._clock,
            launch=self.launch,
        )
        replacements = Replacements(short_timeout, self._handle, self._clock)
        try:
            status = wait(
                lambda: replacements.applied(short_timeout.status(progress=on_change is not None)),
                timeout_s=timeout_s,
                fail_fast=fail_fast,
                on_change=on_change,
                on_trouble=on_trouble,
                clock=self._clock,
            )
        except WaitTimeout as exc:
            if on_deadline == "cancel":
                self._cancel(f"cancelled because it was still running after {timeout_s:g} s")
                raise WaitTimeout(f"run `{self.id}` was cancelled: {exc.message}", status=exc.status) from exc
            hint = f"atoll wait {self.id}"
            raise WaitTimeout(f"run `{self.id}` is {exc.message}", status=exc.status, hint=hint) from exc
        if fail_fast and not status.is_terminal:
            self._cancel(f"cancelled because {_ended(status)}")
            return self.status()
        return status

    def cancel(self) -> Stopped:
        """Stop every replica; returns when none runs. A run that was recorded but not started will not start.

        Stopping does not need the store: if the stop cannot be recorded, the returned `Stopped` says so. Raises
        `StopFailed`, which names every replica that may still run.
        """
        return self._cancel(ON_REQUEST)

    def _cancel(self, why: str) -> Stopped:
        store = with_retry_timeout(self.store, _STATUS_TIMEOUT_S)
        handle, is_started = self._handle, self._handle is not None
        if handle is None:
            try:
                launch = answer_within(RECORD_TIMEOUT_S, lambda: journal.newest_launch(store, self.id))
                handle, is_started = launch.handle, launch.handle is not None
                handle = handle or self._intended(store)
            except (StoreError, Unanswered) as exc:
                log.debug("run %s: the store does not say whether it was started: %s", self.id, exc)
        handle = handle or planned_handle(self.executor, self.plan())
        if handle is None:
            message = f"the launcher of run `{self.id}` died, and only it knew what it started"
            raise BackendError(message, executor=self.executor.name, hint="launch it again, then cancel it")
        before = status_or_none(self.executor, handle)
        log.info("run %s: stop %s", self.id, handle)
        self.executor.cancel(handle)
        self._stop_earlier_launches(store)
        could_grow = may_replace(self.spec, self.executor)
        if before is not None and before.is_terminal and is_started and not (could_grow and any(before.failures())):
            return Stopped(before)
        ended = () if before is None else tuple(r.rank for r in before.replicas if _has_ended(r))
        cancel = Cancel(why, ended if is_started else ())
        record = partial(journal.record_cancel, store, self.id, cancel, launch=self.launch)
        try:
            answer_within(RECORD_TIMEOUT_S, record)
        except (StoreError, Unanswered) as problem:
            error = StoreUnavailable("the store does not answer") if isinstance(problem, Unanswered) else problem
            log.info("run %s is stopped, but the store could not record that: %s", self.id, error.message)
            return Stopped(before, error)
        if not is_started or could_grow:
            # A launcher or a watcher that checked for a cancellation before the record was written has created all
            # its replicas by now; a later one sees the record and stops its replicas itself.
            self.executor.cancel(handle)
        return Stopped(before)

    def _stop_earlier_launches(self, store: Store) -> None:
        """Stop what undone launches may have left; a store that does not answer leaves that to `sweep`."""
        for number in range(1, self.launch):
            with suppress(StoreError, Unanswered):
                handle = answer_within(RECORD_TIMEOUT_S, partial(journal.intended_handle, store, self.id, number))
                if handle is not None:
                    self.executor.cancel(handle)

    def _intended(self, store: Store) -> RunHandle | None:
        """The handle of a launch that is not finished. Intents of earlier versions have none: plan it again."""
        intent = journal.read_intent(store, self.id, self.launch)
        if intent is None or "handle" in intent:
            return journal.intended_handle(store, self.id, self.launch)
        plan = self.plan()
        journal.check_intent(store, self.id, plan.request, launch=self.launch)
        return planned_handle(self.executor, plan)

    def result(self) -> RunResult:
        """How every rank ended and what it returned. Raises `WaitTimeout` if the run has not ended."""
        backend = self._backend_status()
        outcomes = self._stored.outcomes(with_results=True)
        status = self._joined(backend, outcomes)
        if not status.is_terminal:
            raise WaitTimeout(f"run `{self.id}` has not ended: it is {status.state}", hint=f"atoll wait {self.id}")
        joined = (outcome_of(replica, outcomes.get(replica.rank)) for replica in status.replicas)
        final = tuple(self._with_last_lines(outcome) for outcome in joined)
        rounds = (
            0
            if all(o.state is ReplicaState.SUCCEEDED for o in final)
            else rounds_held(self.store, self.id, launch=self.launch)
        )
        return RunResult(self.id, final, could_restart(self.spec, self.executor), rounds)

    def logs(
        self,
        rank: int = 0,
        *,
        tail: int | None = None,
        follow: bool = False,
        since: float | None = None,
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Lines of one rank's output, from the backend if it has them, else from the store."""
        if not 0 <= rank < self.spec.placement.replicas:
            raise ConfigError(f"rank {rank}: run `{self.id}` has ranks 0 to {self.spec.placement.replicas - 1}")
        if since is None and attempt is None and self._handle is not None:
            began = False
            try:
                for line in self.executor.logs(self._handle, rank, tail=tail, follow=follow):
                    began = True
                    yield line
                return
            except BackendError:
                if began:
                    raise
                # The machine or the job is gone; the store has the uploaded log chunks.
        is_over = lambda: self.status(progress=False).replicas[rank].state.is_terminal  # noqa: E731
        yield from self._stored.lines(
            rank,
            tail=tail,
            since=since,
            attempt=attempt,
            is_over=is_over if follow else None,
            clock=self._clock,
        )

    def _backend_status(self) -> RunStatus:
        if self._handle is not None:
            return self.executor.status(self._handle)
        replicas = self.spec.placement.replicas
        if journal.is_cancelled(self.store, self.id, launch=self.launch):
            message = "cancelled before it started"
            return RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, message)
        launch = journal.newest_launch(self.store, self.id)
        if launch.undone is not None:
            message = f"the launch was undone ({launch.undone}); launch it again to start it"
            return RunStatus.uniform(replicas, ReplicaState.CANCELLED, Reason.CANCELLED, message)
        message = "its launcher was interrupted before it started; launch it again to continue"
        waiting = RunStatus.uniform(replicas, ReplicaState.PENDING, Reason.WAITING, message)
        intended = journal.intended_handle(self.store, self.id, self.launch)
        if intended is None:
            return waiting
        # A half-finished launch: some replicas may run already.
        found = self.executor.status(intended)
        pairs = zip(found.replicas, waiting.replicas, strict=True)
        return RunStatus(tuple(idle if r.state is ReplicaState.LOST else r for r, idle in pairs))

    def _joined(self, backend: RunStatus, outcomes: Mapping[int, ReplicaOutcome]) -> RunStatus:
        may_be_cancelled = {ReplicaState.LOST, ReplicaState.CANCELLED} & {replica.state for replica in backend.replicas}
        cancel = journal.read_cancel(self.store, self.id, launch=self.launch) if may_be_cancelled else None
        return join(backend, outcomes, cancelled=cancel.why, over=cancel.over) if cancel else join(backend, outcomes)

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


def status_or_none(executor: Executor, handle: RunHandle) -> RunStatus | None:
    try:
        return executor.status(handle)
    except BackendError as exc:
        log.debug("no status of %s before it is stopped: %s", handle, exc.message)
        return None


def _has_ended(replica: ReplicaStatus) -> bool:
    return replica.state.is_terminal and replica.state is not ReplicaState.LOST


def could_restart(spec: RunSpec, executor: Executor) -> bool:
    """The run has no restarts, and the backend supports them."""
    return spec.placement.max_restarts == 0 and executor.capabilities.max_restarts != 0


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError("the working folder was deleted", hint="cd to another one, or give `workspace`") from exc


def code_for(executor: Executor, workspace: str | None) -> tuple[Code, Any]:
    """How replicas get the code: a bundle of `workspace`, else in place if they share our files, else the image."""
    if workspace is not None:
        from atoll.bundle import build

        bundle = build(Path(workspace))
        return Code.bundle(bundle.digest), bundle
    if "in_place" in executor.capabilities.code:
        return Code.in_place(_working_folder()), None
    return Code.image(), None


def task_alone(entry: str | Callable[..., Any], code: Code, spec: Mapping[str, Any]) -> Task | None:
    """The task of a run whose placement is not valid, so that its entry point is still checked; None if not valid."""
    try:
        return RunSpec.build(entry, code=code, args=spec.get("args"), argv=spec.get("argv", ())).task
    except ConfigError:
        return None


def check_entry(task: Task, workspace: str | None) -> None:
    """Raise `InvalidSpec` if the code is on this machine and the entry point does not fit it."""
    if task.code.root is not None:
        entry_check.check(task, task.code.root)
    elif workspace is not None:
        entry_check.check_sent(task, workspace)


def with_path(built: RunSpec) -> RunSpec:
    """The same spec, with the folder in which replicas find the module."""
    code = built.task.code
    if code.root is None:
        return built
    code = replace(code, path=entry_check.extra_path(Entry.parse(built.task.entry), code.root))
    return replace(built, task=replace(built.task, code=code))


def _needs_store(status: RunStatus) -> bool:
    """While a run is running, the backend's status is enough; ends and lost ranks need the outcomes in the store."""
    return status.is_terminal or any(r.state is ReplicaState.LOST for r in status.replicas)


def _ended(status: RunStatus) -> str:
    """Such as `rank 1 failed and ranks 2-3 were cancelled`: the ranks that ended without success."""
    ways: dict[ReplicaState, list[int]] = {}
    for replica in status.failures():
        ways.setdefault(replica.state, []).append(replica.rank)
    return " and ".join(f"{ranks_text(ranks)} {_became(state, len(ranks))}" for state, ranks in ways.items())


def _became(state: ReplicaState, count: int) -> str:
    return str(state) if state is ReplicaState.FAILED else f"{'was' if count == 1 else 'were'} {state}"
