"""The five methods of the replica protocol, once, over any `Executor`. A facade of a backend is a few lines:

    class MyExecutor(Facade):
        backend_name = "mine"

        @keeps_arguments
        def __init__(self, *, image: str, store=None, run_id=None, idempotency_key=None) -> None:
            self._use(MyAdapter(image=image), store=store, run_id=run_id, idempotency_key=idempotency_key)

It may also say how the backend names a replica (`_native`), what the rows of `collect` add (`_details`) and what a
launch needs of the adapter (`_for_launch`).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any, ClassVar, ParamSpec, Self

from atoll import journal
from atoll._threads import Unanswered, answer_within, in_background
from atoll._time import SYSTEM_CLOCK, Clock, Deadline
from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    ConfigError,
    Conflict,
    InvalidSpec,
    LaunchRefused,
    RunNotFound,
    StoreError,
    StoreUnavailable,
    Unsupported,
    did_you_mean,
)
from atoll.executors.base import OTHER_MACHINE, Executor, Linker
from atoll.names import new_run_id, run_id_problem
from atoll.registry import open_store
from atoll.result import ReplicaOutcome
from atoll.runs.attach import UnrecordedRun
from atoll.runs.cancel import RECORD_TIMEOUT_S
from atoll.runs.entry_check import is_module_here
from atoll.runs.prepare import Draft, prepare
from atoll.runs.run import Run
from atoll.serverless.forms import Form, read_form, store_of
from atoll.serverless.handles import Replica, metadata_of, replica_of
from atoll.serverless.protocol import ReplicaHandle
from atoll.serverless.rows import end_row, rows_of
from atoll.spec import RunSpec
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.validation import PATH, SECONDS, TEXT, is_whole, plain, settings_hint, shown

P = ParamSpec("P")
_TAIL_CHARS = 16
_PREFIX_CHARS = 128 - _TAIL_CHARS - 1
"""A run id is the prefix, `-` and a tail."""


def keeps_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the constructor of a facade: its arguments become attributes of the same names.

    `given_arguments` has the names of those that the caller gave, also if their value is the default.
    """
    parameters = signature(init)

    @wraps(init)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError as exc:
            unknown = next((name for name in kwargs if name not in parameters.parameters), "")
            raise TypeError(f"{type(args[0]).__name__}: {exc}{did_you_mean(unknown, parameters.parameters)}") from None
        given = frozenset(bound.arguments)
        bound.apply_defaults()
        (_, made), *named = bound.arguments.items()
        vars(made).update(named, given_arguments=given)
        init(*args, **kwargs)

    return keeping


class Facade:
    """Stateless: the handles contain all that later calls need."""

    backend_name: str
    supports_inter_replica_network: bool = False
    earlier_names: tuple[str, ...] = ()
    """Backend names in handles of earlier versions, which this facade reads too."""
    runs_callables: bool = False
    """Whether replicas can run a function of this process; else they run the code of their image."""
    mounts_arguments: bool = False
    """Whether an own `command` finds all arguments in a file; else only those that fit into variables are accepted."""
    argument_names: ClassVar[Mapping[str, str]] = {}
    """Setting of the executor or field of the placement -> the argument of the constructor that sets it."""
    given_arguments: frozenset[str] = frozenset()
    """The arguments that the caller gave to the constructor, in contrast to defaults."""
    _default_store: Callable[[], str] | None = None
    """The store of a launch that names none; a cloud backend has no default."""

    def _use(
        self,
        executor: Executor,
        *,
        store: str | os.PathLike[str] | None,
        run_id: str | None,
        idempotency_key: str | None,
        command: Sequence[str] | None = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Take the adapter and what every facade has. `command` is the image's own program.

        Raises `InvalidSpec` for a prefix or a key that no run id can contain.
        """
        self._executor, self._clock = executor, clock
        self.store, self.run_id, self.idempotency_key, self.command = store, run_id, idempotency_key, command
        prefix, problems = self.run_id, []
        if prefix is not None and (run_id_problem(prefix) or len(prefix) > _PREFIX_CHARS):
            rule = run_id_problem(prefix) or f"a prefix of run ids has at most {_PREFIX_CHARS} characters"
            problems.append(f"run_id={shown(prefix)}: {rule}")
        if idempotency_key is not None and not TEXT.fits(idempotency_key):
            problems.append(f"idempotency_key={shown(idempotency_key)}: one line of text that is not empty")
        if store is not None and store != "" and not PATH.fits(store):
            problems.append(f"store={shown(store)}: an address or a path")
        if problems:
            raise InvalidSpec(type(self).__name__, problems)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        """Start `n_replicas` of a function, or of the trainer that `entrypoint_args` name. Each launch is a new run.

        Raises `ValueError` for wrong input, `RuntimeError` if the launch failed; then nothing is left running, or the
        error names it.
        """
        form = read_form(
            entrypoint,
            entrypoint_args,
            runs_callables=self.runs_callables,
            command=self.command or (),
            mounts_arguments=self.mounts_arguments,
        )
        default = self._default_store() if self._default_store is not None else None
        with self._launch_arguments_named():
            executor, placement = self._for_launch(gpu, form)
            draft = prepare(
                form.entry,
                on=executor,
                store=store_of(form, self.store, default),
                args=form.args,
                optional_args=form.optional_args,
                program=form.program,
                env=form.env,
                run_id=self._new_run_id(),
                replicas=plain(n_replicas),
                timeout_s=plain(timeout),
                rank_env=form.rank_env,
                **placement,
            )
        for text in [*_ignored(form), *self._warnings(draft)]:
            warnings.warn(text, stacklevel=2)
        run = self._submitted(draft)
        submit_ts = self._submitted_at(run)
        ranks = range(draft.spec.placement.replicas)
        native = self._native(run, ranks)
        made = [metadata_of(run, rank, native[rank], submit_ts=submit_ts) for rank in ranks]
        return [
            ReplicaHandle(rank, self.backend_name, {**made[rank], "links": self._links(run, rank)}) for rank in ranks
        ]

    def poll(self, handle: ReplicaHandle) -> str:
        """`pending`, `running`, `succeeded`, `failed`, `cancelled` or `lost`."""
        return str(self._status(self._replica(handle)).state)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines of the replica's output, or one line in angle brackets that says why there is none."""
        replica = self._replica(handle)
        n_lines = plain(n_lines)
        if not is_whole(n_lines) or n_lines < 0:
            raise InvalidSpec("stream_logs", [f"n_lines={shown(n_lines)}: a whole number from 0"])
        try:
            lines = list(self._run(replica).logs(replica.rank, tail=n_lines))
        except (BackendError, StoreError) as exc:
            return self._placeholder(replica, exc)
        if lines or n_lines == 0:
            return "".join(f"{line}\n" for line in lines)
        return self._placeholder(replica, None)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop this replica, or all of its run where the backend can only do that. Quiet if it is over or unknown."""
        replica = self._replica(handle)
        ranks = None if self._executor.capabilities.cancels_together else [replica.rank]
        self._run(replica).cancel(ranks)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for these replicas only, then one dict for each, in their order. A failed replica raises nothing.

        The rows come after about `timeout`, also if the service or the store does not answer.
        """
        timeout = plain(timeout)
        if timeout is not None and not SECONDS.fits(timeout):
            raise InvalidSpec("collect", [f"timeout={shown(timeout)}: {SECONDS.words}, or None"])
        if isinstance(handles, str | Mapping) or not isinstance(handles, Iterable):
            raise ConfigError(f"collect takes a list of handles, not {shown(handles)}", reason="handle")
        replicas = [self._replica(handle) for handle in handles]
        groups: dict[tuple[str, str], list[Replica]] = {}
        for replica in replicas:
            groups.setdefault((str(replica.run), replica.store), []).append(replica)
        deadline = Deadline(timeout, self._clock)
        reads = {key: in_background(partial(self._rows, group, deadline)) for key, group in groups.items()}
        tables = {key: read.result() for key, read in reads.items()}
        return [tables[str(each.run), each.store][each.rank] for each in replicas]

    # What a backend adds.

    def _for_launch(self, gpu: str | None, form: Form) -> tuple[Executor, dict[str, Any]]:  # noqa: ARG002  for subclasses
        """The adapter of a launch, and the fields of its placement: `gpu`, `cpus`, `memory_gib`, `max_restarts`."""
        return self._executor, {"gpu": gpu}

    def _warnings(self, draft: Draft) -> list[str]:  # noqa: ARG002  for subclasses
        """What the caller of a launch should know before it starts."""
        return []

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:  # noqa: ARG002  for subclasses
        """What the backend calls each of these replicas, for the metadata of its handle."""
        return [{} for _ in ranks]

    def _details(self, replica: Replica, ranks: Sequence[int]) -> list[dict[str, Any]]:  # noqa: ARG002  for subclasses
        """What the backend knows of each of these ranks at the end of `collect`."""
        return [{} for _ in ranks]

    # Shared by the methods.

    def _new_run_id(self) -> str:
        """A new run for each launch; with an idempotency key, the same run for each launch with this key."""
        if self.idempotency_key is not None:
            tail = hashlib.sha256(f"{self.run_id}\0{self.idempotency_key}".encode()).hexdigest()[:_TAIL_CHARS]
            return f"{self.run_id or 'run'}-{tail}"
        return new_run_id() if self.run_id is None else f"{self.run_id}-{secrets.token_hex(_TAIL_CHARS // 2)}"

    def _submitted(self, draft: Draft) -> Run:
        """Start the run. A repeated launch with the same idempotency key adopts the first one, also if it is over."""
        try:
            with self._launch_arguments_named():
                return draft.submit()
        except InvalidSpec as exc:  # the plan was valid, so the service has refused it
            raise LaunchRefused("launch_replicas", exc.problems, hint=exc.hint) from exc
        except Conflict as exc:
            if self.idempotency_key is None:
                raise
            launch = journal.newest_launch(draft.store, draft.spec.run_id)
            if exc.reason == "cancelled" and launch.handle is not None:
                run = Run(draft.spec, draft.executor, draft.store, launch.handle, self._clock, launch=launch.number)
                run.was_there = True
                return run
            exc.hint = "use another idempotency_key for another launch"
            raise

    def _launch_arguments_named(self) -> AbstractContextManager[None]:
        return arguments_named("launch_replicas", {**_RENAMED, **self.argument_names}, self._executor.name)

    def _submitted_at(self, run: Run) -> float:
        """When the run was recorded. The replicas run already: a store that fails now must not lose their handles."""
        try:
            return float(journal.read_run(run.store, run.id)["created_at"])
        except (StoreError, RunNotFound, LookupError):
            return time.time()

    def _replica(self, handle: ReplicaHandle) -> Replica:
        return replica_of(handle, self._executor.name, (self.backend_name, *self.earlier_names))

    def _links(self, run: Run, rank: int) -> dict[str, str]:
        return self._executor.links(run.handle, rank) if isinstance(self._executor, Linker) else {}

    def _run(self, replica: Replica) -> Run:
        """The run of a replica; without its record, if the store does not have it or does not answer soon."""
        try:
            return answer_within(RECORD_TIMEOUT_S, partial(self._stored_run, replica))
        except (StoreError, RunNotFound, Unanswered) as exc:
            problem = StoreUnavailable("the store does not answer") if isinstance(exc, Unanswered) else exc
            return UnrecordedRun(replica.run_id, replica.run, problem, self._executor)

    def _stored_run(self, replica: Replica) -> Run:
        store = open_store(replica.store)
        spec = RunSpec.from_json(journal.read_run(store, replica.run_id)["spec"])
        return Run(spec, self._executor, store, replica.run, self._clock, launch=replica.launch)

    def _status(self, replica: Replica) -> ReplicaStatus:
        """The status of one replica, joined with the store if that answers."""
        return self._run_status(replica).replicas[replica.rank]

    def _run_status(self, replica: Replica) -> RunStatus:
        """The status of all replicas of its run."""
        run = self._run(replica)
        try:
            return run.status(progress=False)
        except StoreError:
            return self._executor.status(replica.run)
        except BackendError as exc:
            if exc.reason != OTHER_MACHINE:
                raise
            ranks = range(replica.run.replicas)
            return RunStatus(tuple(ReplicaStatus(r, ReplicaState.LOST, Reason.LOST, exc.message) for r in ranks))

    def _placeholder(self, replica: Replica, error: AtollError | None) -> str:
        """The line that `stream_logs` returns if there is no log, and why there is none."""
        try:
            status = self._status(replica)
        except (BackendError, StoreError) as exc:
            return _line(replica, f"the log cannot be read: {(error or exc).message}")
        why = status.message or str(status.reason)
        if isinstance(error, AuthError):
            return _line(replica, f"the log cannot be read: {error.message}")
        if status.state is ReplicaState.LOST:
            return _line(replica, f"no logs: {why}")
        if status.state.is_terminal and isinstance(error, RunNotFound):
            return _line(replica, f"no logs: the replica {_ENDED[status.state]}, and {error.message}")
        if status.state.is_terminal:
            return _line(replica, f"no output: the replica {_ENDED[status.state]} and has printed nothing")
        if status.state is ReplicaState.RUNNING:
            problem = error or self._log_problem(replica)
            if problem is not None and not isinstance(problem, RunNotFound):
                return _line(replica, f"the log cannot be read: {problem.message}")
            why = "it runs and has printed nothing"
        return _line(replica, f"no logs yet: {why}")

    def _log_problem(self, replica: Replica) -> BackendError | None:
        """Why the backend cannot show the log, which `Run.logs` then takes from the store."""
        try:
            next(iter(self._executor.logs(replica.run, replica.rank, tail=1)), None)
        except BackendError as exc:
            return exc
        return None

    def _rows(self, group: Sequence[Replica], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """The rows of the given replicas of one run."""
        ranks = sorted({replica.rank for replica in group})
        natives = {replica.rank: replica for replica in group}
        try:
            rows = rows_of(group[0], ranks, self._executor, partial(self._stored_run, group[0]), deadline)
        except BackendError as exc:
            if exc.reason != OTHER_MACHINE:
                raise
            rows = {r: end_row(ReplicaOutcome(r, 0, ReplicaState.LOST, Reason.LOST, exc.message)) for r in ranks}
        details = self._details_in_time(group[0], ranks, deadline)
        found: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            replica = natives[rank]
            place = {"run_id": replica.run_id, "run": str(replica.run), "rendezvous_uri": replica.store}
            own = {**rows[rank], **place}
            found[rank] = {**own, **replica.native, **details[rank], **own}  # metadata of the caller replaces no field
        return found

    def _details_in_time(
        self, replica: Replica, ranks: Sequence[int], deadline: Deadline
    ) -> Mapping[int, Mapping[str, Any]]:
        left_s = None if deadline.timeout_s is None else max(deadline.remaining_s, 0.5)
        try:
            found = answer_within(left_s, partial(self._details, replica, ranks))
        except (Unanswered, BackendError, ConfigError):  # the rows are complete without them
            return {rank: {} for rank in ranks}
        return dict(zip(ranks, found, strict=True))


class SettingsFacade(Facade):
    """A facade of an executor with settings, which can be made of one that is there."""

    @classmethod
    def over(
        cls,
        jobs: Any,
        *,
        store: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Self:
        """The protocol for `jobs`, an adapter with any settings, also those without an argument of the constructor."""
        made, settings = cls.__new__(cls), vars(jobs.settings)
        vars(made).update({cls.argument_names.get(name, name): value for name, value in settings.items()})
        command = settings.get("command", ())
        made._use(jobs, store=store, run_id=run_id, idempotency_key=idempotency_key, command=command)
        return made


@contextmanager
def arguments_named(what: str, names: Mapping[str, str], executor: str) -> Iterator[None]:
    """Let problems of the executor name the arguments of `what`; `names` has an argument for each other name."""
    try:
        yield
    except (InvalidSpec, Unsupported) as exc:
        problems = [renamed(problem, names) for problem in exc.problems]
        hint = None if exc.hint == settings_hint(executor) else exc.hint
        if isinstance(exc, Unsupported):
            raise Unsupported(exc.executor, exc.run_id, problems, hint=hint) from exc
        raise type(exc)(what, problems, hint=hint) from exc


def renamed(problem: str, names: Mapping[str, str]) -> str:
    """The problem with the name of the argument that its first word stands for."""
    found = re.match(r"\w+", problem)
    name = found[0] if found else ""
    return names.get(name, name) + problem.removeprefix(name)


_RENAMED = {
    "replicas": "n_replicas",
    "timeout_s": "timeout",
    "entry": "entrypoint",
    "args": "entrypoint_args",
    "env": "entrypoint_args",
}


def _ignored(form: Form) -> Iterator[str]:
    """A warning about an entry point that the caller names and that is not run."""
    if form.ignored and form.program:
        yield f"entrypoint `{form.ignored}` is not run: the containers run their own command"
    elif form.ignored and is_module_here(form.ignored.replace(":", ".").removesuffix(".main")):
        yield f"`{form.ignored}` is not imported: the entry module of Atoll runs the trainer"


_ENDED = {
    ReplicaState.SUCCEEDED: "has succeeded",
    ReplicaState.FAILED: "has failed",
    ReplicaState.CANCELLED: "was cancelled",
}


def _line(replica: Replica, text: str) -> str:
    return f"<replica {replica.rank}: {' '.join(text.split())}>"
