"""Runs: `prepare` checks one, `launch` starts it, `attach` finds it again, and `Run` controls it.

The command line, `atoll.serverless` and users call this. All state is in the store and at the backend, so every
method of `Run` works in any process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll import journal, registry
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext, default_store
from atoll.errors import AtollError, BackendError, ConfigError, Problems, RunNotFound, WaitTimeout
from atoll.executors.base import Executor, HandleResolver, Plan, Preflighter
from atoll.handle import RunHandle
from atoll.journal import Cancel
from atoll.result import ReplicaOutcome, RunResult, join, last_lines, outcome_of, ranks_text
from atoll.rounds.metrics import rounds_held
from atoll.runs import entry_check, index
from atoll.runs.stored import StoredRun
from atoll.runs.wait import OnDeadline, wait
from atoll.spec import Code, Entry, RunSpec, Task, is_loading, own_script
from atoll.status import ON_REQUEST, Reason, ReplicaState, RunStatus, with_progress
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout

log = logging.getLogger("atoll.runs")
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
    **placement: Any,
) -> Run:
    """Start `replicas` of `entry` and return at once; they do not need this process.

    `run_id` is an idempotency key: the same id with the same content returns the existing run, with other content
    it raises `Conflict`. `placement` takes `gpu`, `image`, `timeout_s`, `grace_s`, `max_restarts`, `env`, `secrets`,
    `cpus`, `memory_gib` and `rank_env`. `settings` are the executor's own.
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
    problems, uri = Problems(), store or default_store()
    executor = problems.trying(lambda: registry.executor(on, **(settings or {}))) if isinstance(on, str) else on
    opened = problems.trying(lambda: registry.open_store(uri))
    found = problems.trying(lambda: code_for(executor, workspace)) if executor is not None else None
    code, bundle = found or (Code.image(), None)
    built = problems.trying(lambda: RunSpec.build(entry, code=code, **spec))
    task = built.task if built is not None else task_alone(entry, code, spec)
    if task is not None:
        problems.trying(lambda: check_entry(task, workspace))
    plan = None
    if executor is not None and built is not None:
        context = RunContext(built.run_id, opened.uri if opened is not None else str(uri))
        plan = problems.trying(lambda: executor.plan(context, built.placement))
    problems.raise_any(f"run `{spec['run_id']}`" if spec.get("run_id") else "this run")
    assert executor is not None
    assert opened is not None
    assert built is not None
    assert plan is not None
    return Draft(with_path(built), executor, opened, plan, bundle)


def attach(run: str, *, store: str | os.PathLike[str] | None = None, settings: Mapping[str, Any] | None = None) -> Run:
    """The run with this id or handle, from any process.

    An id is looked up in `store`, or in the local index; a handle also at the backend it names.
    """
    handle = RunHandle.parse(run) if "://" in run else None
    known = None if store and handle is None else index.find(run)
    run_id, where = (known.run_id, store or known.store) if known else (None if handle else run, store)
    if handle is not None and (run_id is None or where is None):
        run_id, where = _origin(handle, where, settings or {})
    if run_id is None or where is None:
        hint = "give its store: `attach(run, store=…)`, or `--store URI` on the command line"
        raise RunNotFound(f"no run `{run}` in the local index", hint=hint)
    opened = registry.open_store(where)
    record = journal.read_run(opened, run_id)
    found = handle or journal.read_handle(opened, run_id)
    executor = registry.executor(record["executor"], **(settings or {}))
    log.debug("run %s: attached to %s on %s", run_id, found or "no handle", executor.name)
    return Run(RunSpec.from_json(record["spec"]), executor, opened, found)


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


class Draft:
    """A run that is checked and planned but not started."""

    def __init__(self, spec: RunSpec, executor: Executor, store: Store, plan: Plan, bundle: Any = None) -> None:
        self.spec, self.executor, self.store, self.plan, self.bundle = spec, executor, store, plan, bundle

    def submit(self) -> Run:
        """Record, then start. If this process is killed, the next submit with the same run id continues from there."""
        run_id = self.spec.run_id
        handle = journal.read_handle(self.store, run_id)
        if handle is None:
            self.preflight()
            self._upload()
        else:
            log.info("run %s exists already: adopt it", run_id)
        journal.record_run(self.store, self.spec, executor=self.executor.name)
        if handle is None and journal.is_cancelled(self.store, run_id):
            log.info("run %s was cancelled before it started: submit nothing", run_id)
            return Run(self.spec, self.executor, self.store, None)
        if handle is None:
            journal.record_intent(self.store, run_id, self.plan.request)
            log.debug("run %s: submit %d replicas to %s", run_id, self.spec.placement.replicas, self.executor.name)
            handle = journal.record_handle(self.store, run_id, self.executor.submit(self.plan))
            log.info("run %s: started on %s as %s", run_id, self.executor.name, handle)
            if journal.is_cancelled(self.store, run_id):
                log.info("run %s was cancelled while it started: stop it", run_id)
                self.executor.cancel(handle)
        index.remember(run_id, self.store.uri, str(handle))
        return Run(self.spec, self.executor, self.store, handle)

    def preflight(self) -> None:
        """Run the checks of the executor that need its service; nothing is recorded yet."""
        if isinstance(self.executor, Preflighter):
            self.executor.preflight(self.plan)

    def _upload(self) -> None:
        if self.bundle is not None:
            from atoll.bundle import upload

            upload(self.bundle, self.store)


class Run:
    """A run that was started. Works in any process that can reach the backend and the store."""

    def __init__(
        self, spec: RunSpec, executor: Executor, store: Store, handle: RunHandle | None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.spec, self.executor, self.store = spec, executor, store
        self.id = spec.run_id
        self._handle = handle
        self._clock = clock
        self._stored = StoredRun(store, spec.run_id)

    def __repr__(self) -> str:
        return f"<Run {self.id} on {self.executor.name}, store {self.store.uri}>"

    @property
    def handle(self) -> RunHandle:
        """The handle, whose text is enough to `attach`."""
        if self._handle is None:
            if journal.is_cancelled(self.store, self.id):
                raise RunNotFound(f"run `{self.id}` was cancelled before it started", hint="choose another run id")
            raise RunNotFound(
                f"run `{self.id}` was recorded but never started: its launcher was interrupted",
                hint="launch it again with the same run id to continue",
            )
        return self._handle

    def plan(self) -> Plan:
        """The exact request that started this run."""
        return self.executor.plan(RunContext(self.id, self.store.uri), self.spec.placement)

    def status(self, *, progress: bool = True) -> RunStatus:
        """The status of every rank, from the backend and the store."""
        backend = self._backend_status()
        status = self._joined(backend, self._stored.outcomes()) if _needs_store(backend) else backend
        if not progress:
            return status
        beats = self._stored.progress(len(status.replicas))
        return status.with_replicas(with_progress(r, beats.get(r.rank)) for r in status.replicas)

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

        If the store or the backend cannot be reached, retry for five minutes, then raise its error. `on_trouble` is
        called with each such error, and with None after the next success.
        """
        short_timeout = Run(
            self.spec, self.executor, with_retry_timeout(self.store, _STATUS_TIMEOUT_S), self._handle, self._clock
        )
        try:
            status = wait(
                lambda: short_timeout.status(progress=on_change is not None),
                timeout_s=timeout_s,
                fail_fast=fail_fast,
                on_change=on_change,
                on_trouble=on_trouble,
                clock=self._clock,
            )
        except WaitTimeout as exc:
            if on_deadline == "cancel":
                self._cancel(f"cancelled because it was still running after {timeout_s:g} s")
                raise WaitTimeout(f"run `{self.id}` was cancelled: {exc.message}") from exc
            raise WaitTimeout(f"run `{self.id}` is {exc.message}", hint=f"atoll wait {self.id}") from exc
        if fail_fast and not status.is_terminal:
            self._cancel(f"cancelled because {_ended(status)}")
            return self.status()
        return status

    def cancel(self) -> None:
        """Stop every replica; returns when none runs. A run that was recorded but not started will not start."""
        self._cancel(ON_REQUEST)

    def _cancel(self, why: str) -> None:
        status = self.status(progress=False)
        log.info("run %s is %s: cancel it", self.id, status.state)
        if not status.is_terminal:
            ended = (r.rank for r in status.replicas if r.state.is_terminal and r.state is not ReplicaState.LOST)
            journal.record_cancel(self.store, self.id, Cancel(why, tuple(ended)))
        self._handle = self._handle or journal.read_handle(self.store, self.id)
        if self._handle is None and journal.has_intent(self.store, self.id):
            # A launcher died between intent and handle. Submitting again adopts what it started.
            log.info("run %s has an intent and no handle: submit it again, then cancel", self.id)
            plan = self.plan()
            journal.check_intent(self.store, self.id, plan.request)
            self._handle = journal.record_handle(self.store, self.id, self.executor.submit(plan))
        if self._handle is not None:
            self.executor.cancel(self._handle)
            log.info("run %s: nothing of it runs any more", self.id)

    def result(self) -> RunResult:
        """How every rank ended and what it returned. Raises `WaitTimeout` if the run has not ended."""
        backend = self._backend_status()
        outcomes = self._stored.outcomes(with_results=True)
        status = self._joined(backend, outcomes)
        if not status.is_terminal:
            raise WaitTimeout(f"run `{self.id}` has not ended: it is {status.state}", hint=f"atoll wait {self.id}")
        joined = (outcome_of(replica, outcomes.get(replica.rank)) for replica in status.replicas)
        final = tuple(self._with_last_lines(outcome) for outcome in joined)
        rounds = 0 if all(o.state is ReplicaState.SUCCEEDED for o in final) else rounds_held(self.store, self.id)
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
        if self._handle is None and journal.is_cancelled(self.store, self.id):
            message = "cancelled before it started"
            return RunStatus.uniform(self.spec.placement.replicas, ReplicaState.CANCELLED, Reason.CANCELLED, message)
        if self._handle is None:
            message = "its launcher was interrupted before it started; launch it again to continue"
            return RunStatus.uniform(self.spec.placement.replicas, ReplicaState.PENDING, Reason.WAITING, message)
        return self.executor.status(self._handle)

    def _joined(self, backend: RunStatus, outcomes: Mapping[int, ReplicaOutcome]) -> RunStatus:
        may_be_cancelled = {ReplicaState.LOST, ReplicaState.CANCELLED} & {replica.state for replica in backend.replicas}
        cancel = journal.read_cancel(self.store, self.id) if may_be_cancelled else None
        return join(backend, outcomes, cancelled=cancel.why, over=cancel.over) if cancel else join(backend, outcomes)

    def _with_last_lines(self, outcome: ReplicaOutcome) -> ReplicaOutcome:
        if outcome.state is ReplicaState.SUCCEEDED or outcome.error is not None:
            return outcome
        return replace(outcome, last_lines=last_lines(lambda: self.logs(outcome.rank, tail=5)))


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
