"""Continue a run that is over from its last agreed state, as its next launch, on the same or on another backend.

The new launch has records, attempts and logs of its own; it continues the rounds and checkpoints of the launch before.
The record `resume.json` of the launch is created once, so of two commands at the same time both start the same launch.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import journal, registry
from atoll.context import RunContext
from atoll.errors import ConfigError, Conflict, InvalidSpec, Problems, RunNotFound, StopFailed, did_you_mean
from atoll.executors.base import Executor
from atoll.journal import Launch
from atoll.runs.code_files import code_differences, with_files
from atoll.runs.entry_check import check_sent
from atoll.runs.over import check_is_over
from atoll.runs.parts import TABLES, On, added, backend_for
from atoll.runs.prepare import Draft, bundle_of, check_entry, resumed_run
from atoll.runs.start import check_not_deleted, check_not_pruned, start_resume
from atoll.spec import Code, Placement, RunSpec, Task
from atoll.stores.base import Store

if TYPE_CHECKING:
    from atoll.runs.run import Run


def resume(
    run: Run,
    *,
    on: On | None = None,
    settings: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    workspace: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    **placement: Any,
) -> Run:
    """Start the next launch of a run that is over; see `Run.resume`."""
    newest = journal.newest_launch(run.store, run.id)
    if newest.number != run.launch:
        run = type(run).stored(run.store, run.id)
    number, before = _next_launch(run, newest)
    draft, differences = _draft(run, number, before, on, settings, args or {}, workspace, placement)
    if differences and not accept_changes:
        what = f"run `{run.id}` is not resumed, because its code has changed since its last launch"
        hint = "`--accept-changes` (in Python `accept_changes=True`) resumes it with these changes"
        raise Conflict(run.id, differences, what=what, reason="changed", hint=hint)
    record = journal.read_launch(run.store, run.id, run.launch)
    launch = start_resume(draft, number, rounds_of=record.rounds_of)
    found = resumed_run(draft, launch)
    found.was_there = launch.was_there
    return found


def _next_launch(run: Run, newest: Launch) -> tuple[int, RunSpec]:
    """The number of the launch to start, and the spec that it continues. Raises if the run is not over."""
    if run.spec.task.program:
        what = f"run `{run.id}` runs a program of its image, and Atoll does not know how that continues"
        raise ConfigError(what, reason="program")
    check_not_deleted(run.store, run.id)
    check_not_pruned(run.store, run.id)
    if newest.is_resume and not newest.is_decided and not _is_cancelled(run, newest.number):
        return newest.number, run.spec  # its launcher was interrupted
    name = shlex.quote(run.id)
    check_is_over(run, hint=f"`atoll cancel {name}` stops it, `atoll wait {name}` waits for its end")
    if not newest.is_decided:
        decided = journal.record_undone(run.store, run.id, "cancelled before it started", launch=newest.number)
        if decided.handle is not None:
            raise Conflict(run.id, what=f"run `{run.id}` has just been started by another launcher", reason="running")
    if newest.handle is None:
        _stop_leftovers(run, newest.number)
    return newest.number + 1, run.spec


def _is_cancelled(run: Run, number: int) -> bool:
    return journal.is_cancelled(run.store, run.id, launch=number)


def _stop_leftovers(run: Run, number: int) -> None:
    """Stop what a launch that was undone may have left, so that the next one starts no twins."""
    handle = journal.handle_to_stop(run.store, run.id, number)
    cancel = journal.read_cancel(run.store, run.id, launch=number)
    if handle is None or (cancel is not None and cancel.is_abandoned):
        return
    executor = run.executor if handle.executor == run.executor.name else registry.executor(handle.executor)
    try:
        executor.cancel(handle)
    except StopFailed as exc:
        what = f"run `{run.id}` is not resumed, because launch {number} was undone but not stopped"
        raise StopFailed(what, exc.refusals, executor=executor.name, hint=exc.hint) from exc
    except RunNotFound:
        return


def _draft(
    run: Run,
    number: int,
    before: RunSpec,
    on: On | None,
    settings: Mapping[str, Any] | None,
    args: Mapping[str, Any],
    workspace: str | os.PathLike[str] | None,
    placement: Mapping[str, Any],
) -> tuple[Draft, list[str]]:
    """The checked draft of the launch, and how its code differs from the code of the launch before."""
    executor, placement = _backend(run, before, on, settings, placement)
    folder = None if workspace is None else os.fspath(workspace)
    code, bundle = _code(executor, before, folder, run.store.uri)
    task = replace(before.task, args={**before.task.args, **args}, code=code)
    spec = RunSpec(run.id, task, _placement(run.id, before.placement, placement))
    check_entry(task, folder)
    if args and folder is None and code.digest is not None:
        _check_sent(task, code.digest, run.store)
    differences = code_differences(before.task, task, folder, run.store, bundle)
    plan = executor.plan(RunContext(run.id, run.store.uri, number), spec.placement)
    return Draft(spec, executor, run.store, plan, bundle), differences


def _check_sent(task: Task, digest: str, store: Store) -> None:
    """Raise `InvalidSpec` if the arguments do not fit the code that an earlier launch has sent.

    Every later launch would have them, too.
    """
    from atoll.bundle import fetch_and_unpack

    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        check_sent(task, str(fetch_and_unpack(store, digest, Path(place))))


def _backend(
    run: Run, before: RunSpec, on: On | None, settings: Mapping[str, Any] | None, placement: Mapping[str, Any]
) -> tuple[Executor, Mapping[str, Any]]:
    """The executor of the launch, and the changes of the placement, with its parts."""
    if on is None and settings is None:
        return run.executor, placement
    parts = before.placement.parts
    problems = Problems()
    chosen = on or [(part.on, part.replicas) for part in parts] or run.executor.name
    found = backend_for(chosen, settings, placement, problems)
    problems.raise_any(f"run `{run.id}`")
    assert found.executor is not None
    now = found.spec.get("parts", ())
    if on is None:  # the parts keep what they had of their own
        kept = [added(old.overrides, new.overrides) for old, new in zip(parts, now, strict=True)]
        now = tuple(replace(part, overrides=own) for part, own in zip(now, kept, strict=True))
    # Variables and secrets that the settings name one by one are added to those of the run.
    named = {name: found.spec[name] for name in TABLES if name in found.spec and name not in placement}
    kept_tables = {name: {**getattr(before.placement, name), **table} for name, table in named.items()}
    return found.executor, {**found.spec, **kept_tables, "parts": now}


def _placement(run_id: str, before: Placement, changes: Mapping[str, Any]) -> Placement:
    known = [each.name for each in fields(Placement)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        problems = [f"{name}: there is no such argument{did_you_mean(name, known)}" for name in unknown]
        raise InvalidSpec(f"run `{run_id}`", problems)
    replicas = changes.get("replicas", before.replicas)
    if replicas != before.replicas:
        what = f"run `{run_id}` has {before.replicas} replicas, and not {replicas}: their number is part of the run"
        hint = f"`atoll run ENTRY -n {replicas} --from {shlex.quote(run_id)}` starts a new run from its weights"
        raise ConfigError(what, reason="replicas", hint=hint)
    return replace(before, **changes)


def _code(executor: Executor, before: RunSpec, workspace: str | None, store: str) -> tuple[Code, Any]:
    """The code of the launch: the given folder as a bundle, else where the code of the launch before is."""
    kept = before.task.code
    if workspace is not None:
        bundle = bundle_of(workspace, store)
        return Code.bundle(bundle.digest), bundle
    if kept.kind not in executor.capabilities.code:
        what = f"`{executor.name}` cannot use the code of run `{before.run_id}`, which is "
        what += f"in the folder `{kept.root}` of one machine" if kept.kind == "in_place" else f"of kind `{kept.kind}`"
        raise ConfigError(what, reason="code", hint="`--workspace DIR` sends the folder with the code")
    return with_files(before.task, kept), None
