"""`prepare` checks and plans a run, `launch` starts it.

The command line, `atoll.serverless` and users call this. Nothing is recorded or started before every check has passed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import disk, journal, registry
from atoll.context import RunContext, default_store, home
from atoll.entry import Entry, is_loading, own_script
from atoll.errors import (
    BackendError,
    ConfigError,
    InvalidSpec,
    Problems,
)
from atoll.executors.base import Composite, Executor, Plan, Preflighter, Pricer, Rated
from atoll.journal import Launch
from atoll.runs import cost, entry_check
from atoll.runs.code_files import with_files
from atoll.runs.parts import backend_for, chosen_parts, place_text
from atoll.runs.run import Run
from atoll.runs.stand_in import check_plan
from atoll.runs.start import start
from atoll.spec import ON_DEAD_AFTER_S, Code, RunSpec, Task
from atoll.stores.base import Store
from atoll.validation import shown

log = logging.getLogger("atoll.runs")

if TYPE_CHECKING:
    from atoll.rounds.origin import OriginCopy


def launch(
    entry: str | Callable[..., Any],
    *,
    replicas: int = 1,
    on: str | Executor | Sequence[Any] = "local",
    store: str | os.PathLike[str] | None = None,
    args: Mapping[str, Any] | None = None,
    argv: Sequence[str] = (),
    run_id: str | None = None,
    workspace: str | None = None,
    settings: Mapping[str, Any] | None = None,
    on_dead: str = "fail",
    on_dead_after_s: float = ON_DEAD_AFTER_S,
    from_run: str | None = None,
    from_round: int | None = None,
    max_cost: float | None = None,
    **placement: Any,
) -> Run:
    """Start `replicas` of `entry` and return at once; they do not need this process.

    `on` is a backend, by name or as an executor; or several parts of the run: `[("kubernetes", 2), ("modal", 2)]`. The
    ranks are given out in the order of the parts, `replicas` is left out, and the settings of a part are named with its
    backend: `settings={"modal.gpu": "H100"}`.

    `run_id` is an idempotency key: the same id with the same content returns the existing run, with other content
    it raises `Conflict`. `placement` takes `gpu`, `image`, `timeout_s`, `grace_s`, `max_restarts`, `env`, `secrets`,
    `cpus`, `memory_gib` and `rank_env`. `settings` are the executor's own. `on_dead="fail"` ends the other replicas
    when a round needs a rank that has been dead for `on_dead_after_s`; with `"wait"` they wait until its deadline.
    `from_run` is another run, by id or handle: the model starts with its agreed weights, after `from_round` rounds or
    after the last one, in place of the weights that the code gives it. `max_cost`, in dollars, becomes a time limit of
    the replicas, where the price of the backend is known.
    """
    if replicas != 1 or chosen_parts(on) is None:  # the parts say how many there are
        placement["replicas"] = replicas
    draft = prepare(
        entry,
        on=on,
        store=store,
        args=args,
        argv=argv,
        run_id=run_id,
        workspace=workspace,
        settings=settings,
        on_dead=on_dead,
        on_dead_after_s=on_dead_after_s,
        from_run=from_run,
        from_round=from_round,
        max_cost=max_cost,
        **placement,
    )
    return draft.submit()


def prepare(
    entry: str | Callable[..., Any] | Entry,
    *,
    on: str | Executor | Sequence[Any] = "local",
    store: str | os.PathLike[str] | None = None,
    workspace: str | None = None,
    settings: Mapping[str, Any] | None = None,
    from_run: str | None = None,
    from_round: int | None = None,
    max_cost: float | None = None,
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
    executor, checked, left_out, spec = backend_for(on, settings, spec, problems)
    if executor is not None:
        problems.trying(lambda: check_program(executor, tuple(spec.get("program", ()))))
    opened = problems.trying(lambda: registry.open_store(uri))
    place = None if opened is None else opened.uri
    found = (
        problems.trying(lambda: code_for(checked, workspace, store=place, has_program=bool(spec.get("program"))))
        if checked is not None
        else None
    )
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
    if from_run is None and from_round is not None:
        problems.trying(lambda: _refuse_round(from_round))
    problems.raise_any(f"run `{spec['run_id']}`" if spec.get("run_id") else "this run")
    assert executor is not None
    assert opened is not None
    assert built is not None
    assert plan is not None
    draft = Draft(_with_place(built, workspace), executor, opened, plan, bundle)
    draft = draft if max_cost is None else draft.limited_to(max_cost)
    return draft if from_run is None else draft.starting_from(from_run, from_round)


def _refuse_round(round_no: int) -> None:
    raise InvalidSpec("this run", [f"from_round={shown(round_no)}: `from_run` names the run that has this round"])


class Draft:
    """A run that is checked and planned but not started."""

    def __init__(self, spec: RunSpec, executor: Executor, store: Store, plan: Plan, bundle: Any = None) -> None:
        self.spec, self.executor, self.store, self.plan, self.bundle = spec, executor, store, plan, bundle
        self.origin: OriginCopy | None = None
        """The weights of the run that this one starts from."""

        self.cost_notes: list[str] = []

    def limited_to(self, max_cost: float) -> Draft:
        """The same draft with a time limit with which the run costs at most so many dollars."""
        placement = self.spec.placement
        hourly_usd = self.hourly_usd()
        limit = cost.limit_s(max_cost, hourly_usd, placement.replicas, backend=place_text(self.spec, self.executor))
        assert hourly_usd is not None
        draft = self
        if limit < placement.timeout_s:
            spec = replace(self.spec, placement=replace(placement, timeout_s=float(limit)))
            plan = self.executor.plan(RunContext(spec.run_id, self.store.uri), spec.placement)
            draft = Draft(spec, self.executor, self.store, plan, self.bundle)
        if hourly_usd:
            note = cost.limit_note(max_cost, hourly_usd, placement.replicas, limit, placement.timeout_s)
            draft.cost_notes = [note]
        return draft

    def hourly_usd(self) -> float | None:
        """The price of one replica for an hour, in dollars; None if it is not known."""
        if not isinstance(self.executor, Rated):
            return None
        try:
            return self.executor.hourly_usd(self.plan, self.spec.placement)
        except BackendError as exc:
            log.debug("run %s: no price: %s", self.spec.run_id, exc.message)
            return None

    def prices(self) -> dict[str, Any]:
        """What the intent records about the price: that of a replica, and that of a replica of each part."""
        if not isinstance(self.executor, Composite):
            return {"hourly_usd": self.hourly_usd()}
        prices = self.executor.part_prices(self.plan, self.spec.placement)
        if all(price is None for price in prices):
            return {"hourly_usd": None}
        return {"hourly_usd": cost.mean_usd(self.spec.placement.parts, prices), "part_usd": prices}

    def starting_from(self, run: str, round_no: int | None = None) -> Draft:
        """The same draft with the agreed weights of another run, which is searched as `attach` does."""
        from atoll.runs.origin import origin_of

        if self.spec.task.program:
            what = "from_run: the program of an image does not load the weights of another run"
            raise InvalidSpec("this run", [what])
        origin = origin_of(run, round_no, self.store)
        task = replace(self.spec.task, origin=origin.origin.to_json())
        draft = Draft(replace(self.spec, task=task), self.executor, self.store, self.plan, self.bundle)
        draft.origin, draft.cost_notes = origin, self.cost_notes
        return draft

    def submit(self) -> Run:
        """Record, then start. If this process is killed, the next submit with the same run id continues from there."""
        launch = start(self)
        if launch.is_resume:
            run = resumed_run(self, launch)
        else:
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

    def notes(self) -> list[str]:
        """What a user should know before the launch. A service that tells its prices is asked; the price is last."""
        found = [*self.cost_notes, *self.plan.notes]
        if isinstance(self.executor, Pricer):
            try:
                found += self.executor.prices(self.plan)
            except BackendError as exc:
                found.append(f"price unknown: {exc.message}")
        return found

    def upload(self) -> None:
        """Upload the code bundle and the weights to start from, if there are any."""
        if self.origin is not None:
            self.origin.upload(self.store, self.spec.run_id)
        if self.bundle is not None:
            from atoll.bundle import upload

            upload(self.bundle, self.store)


def resumed_run(draft: Draft, launch: Launch) -> Run:
    """The run of a launch that continues an earlier one; it may be on another backend than the draft."""
    record = journal.read_launch(draft.store, draft.spec.run_id, launch.number)
    same = record.executor == draft.executor.name
    executor = draft.executor if same else registry.executor(record.executor)
    spec = RunSpec.from_json(record.spec)
    return Run(spec, executor, draft.store, launch.handle, launch=launch.number, rounds_of=record.rounds_of)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError("the working folder was deleted", hint="cd to another one, or give `workspace`") from exc


def code_for(
    executor: Executor,
    workspace: str | None,
    *,
    store: str | None = None,
    has_program: bool = False,
) -> tuple[Code, Any]:
    """How replicas get the code: a bundle of `workspace`, else in place if they share our files, else the image.

    A program of the image gets no code from here.
    """
    if has_program and workspace is not None:
        raise InvalidSpec("this run", ["workspace: the program of an image gets no files of this machine"])
    if has_program and "image" in executor.capabilities.code:
        return Code.image(), None
    if workspace is not None:
        bundle = bundle_of(workspace, store)
        return Code.bundle(bundle.digest), bundle
    if "in_place" in executor.capabilities.code:
        return Code.in_place(_working_folder()), None
    if "image" not in executor.capabilities.code:
        what = "code: no way to get the code works on every part of the run, except to send it"
        raise InvalidSpec("this run", [what], hint='`--workspace .` (in Python `workspace="."`) sends this folder')
    return Code.image(), None


def bundle_of(workspace: str, store: str | None) -> Any:
    """The bundle of a folder, without what Atoll writes there: the store with this address, and this user's state."""
    from atoll.bundle import build

    folder = None if store is None else disk.folder_of(store)
    return build(Path(workspace), without=[home(), *([] if folder is None else [folder])])


def task_alone(entry: str | Callable[..., Any] | Entry, code: Code, spec: Mapping[str, Any]) -> Task | None:
    """The task of a run whose placement is not valid, so that its entry point is still checked; None if not valid."""
    try:
        about = {name: spec[name] for name in ("args", "argv", "optional_args", "program") if name in spec}
        return RunSpec.build(entry, code=code, **about).task
    except ConfigError:
        return None


def check_program(executor: Executor, program: tuple[str, ...]) -> None:
    """Raise `InvalidSpec` if containers would run another program than the task says."""
    command = tuple(getattr(executor, "command", ()))
    if command != program:
        rule = "containers would run this program and no entry point; leave it out, or use `atoll.serverless`"
        if not command:
            rule = "this backend does not run an image's own program"
        raise InvalidSpec("this run", [f"{'command' if command else 'program'}={shown(command or program)}: {rule}"])


def check_entry(task: Task, workspace: str | None) -> None:
    """Raise `InvalidSpec` if the code is on this machine and the entry point does not fit it."""
    if task.program:
        return
    if task.code.root is not None:
        entry_check.check(task, task.code.root)
    elif workspace is not None:
        entry_check.check_sent(task, workspace)


def _with_place(built: RunSpec, workspace: str | None) -> RunSpec:
    """The same spec with what only this machine knows: the folder of the module, and what a dotted name names."""
    task, code = built.task, built.task.code
    if task.program:
        return built
    entry = Entry.of_record(task.entry)
    if code.root is not None:
        entry = entry_check.decided(entry, code.root)
        code = replace(code, path=entry_check.extra_path(entry, code.root))
        code = with_files(replace(task, entry=str(entry)), code)
    elif workspace is not None:
        entry = entry_check.decided_sent(entry, workspace)
    return replace(built, task=replace(task, entry=str(entry), code=code))
