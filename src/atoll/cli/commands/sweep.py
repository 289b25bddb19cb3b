"""`atoll sweep`: ask the backends, by label, for replicas that still run although their run has ended; stop them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from atoll import registry
from atoll.cli.app import command
from atoll.cli.launch_options import complete_backend
from atoll.cli.output import Cell, Column, Output, Table, one_line
from atoll.errors import AtollError, BackendError, ConfigError
from atoll.executors.base import Executor, Sweeper
from atoll.runs import config
from atoll.runs.config import Config
from atoll.runs.sweep import Leftover, leftovers


@command("End", short_help="Find and stop replicas that still run after their run has ended.")
@click.option(
    "--on",
    multiple=True,
    metavar="BACKEND",
    shell_complete=complete_backend,
    help="Only on this backend; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only list the replicas that would be stopped.")
@click.option("-y", "--yes", is_flag=True, help="Stop them without asking.")
@click.option("--include-unknown", is_flag=True, help="Also stop replicas of runs whose record cannot be read.")
def sweep_command(out: Output, on: tuple[str, ...], dry_run: bool, yes: bool, include_unknown: bool) -> None:
    """Ask each backend, by label, for replicas that still run although their run has ended, and stop them.

    The search does not use the local list of runs, so it also finds replicas of runs that other machines started. If
    the record of a run cannot be read, its replicas are listed as `unknown`: the run may be healthy, so only
    `--include-unknown` stops them.
    """
    sweepers, errors = _sweepers(out, on, config.load()), list[str]()
    answers = {e.name: (e, _leftovers(out, e, errors, is_named=bool(on))) for e in sweepers}
    searched = [name for name, (_, found) in answers.items() if found is not None]
    found = [(executor, each) for executor, several in answers.values() for each in several or ()]
    chosen = [(executor, each) for executor, each in found if include_unknown or not each.is_unknown]
    stopped: list[str] = []
    not_searched = [name for name in answers if name not in searched]
    strays = [_json(*each) for each in found]
    out.data({"asked": searched, "not_searched": not_searched, "strays": strays, "stopped": stopped})
    if found:
        out.text(_table_text(out, found))
    else:
        out.say(f"no leftover replicas on {', '.join(searched) or 'the backends that were searched: none'}")
    if not_searched:
        out.say(f"not searched, so leftovers are possible: {', '.join(not_searched)}", "warn")
    if len(chosen) < len(found):
        out.say("the runs of `unknown` replicas may be healthy: `--include-unknown` stops these replicas too")
    if chosen and not dry_run and _may_stop(out, yes, len(chosen)):
        stopped.extend(_stop(out, chosen, errors))
    if errors:
        raise BackendError("\n".join(errors), hint="`atoll doctor BACKEND` checks a backend")


def _json(executor: Executor, found: Leftover) -> dict[str, Any]:
    return {
        "executor": executor.name,
        "handle": str(found.stray.handle),
        "id": found.stray.native_id,
        "state": _state(found),
        "message": found.message,
    }


def _state(found: Leftover) -> str:
    return "unknown" if found.is_unknown else "over"


def _sweepers(out: Output, names: Sequence[str], settings: Config) -> list[Executor]:
    """The backends that can search. Without names, a note replaces each backend that does not load."""
    found: list[Executor] = []
    for name in names or registry.known("executor"):
        try:
            executor = registry.executor(name, **settings.executor_settings(name))
        except AtollError as exc:
            if names:
                raise
            out.say(f"{name}: not searched: {exc.message}")
            continue
        if isinstance(executor, Sweeper):
            found.append(executor)
        elif names:
            raise ConfigError(f"backend `{name}` cannot search for leftover replicas", hint="leave out --on")
    return found


def _leftovers(out: Output, executor: Any, errors: list[str], *, is_named: bool) -> list[Leftover] | None:
    """What was found; None if the backend could not be searched."""
    try:
        return leftovers(executor)
    except AtollError as exc:
        is_unused = isinstance(exc, ConfigError) or exc.reason == "no_credentials"
        if is_unused and not is_named:
            out.say(f"{executor.name}: not searched: {exc.message}")
            return None
        errors.append(f"{executor.name}: {exc.message}")
        out.say(f"{executor.name}: the search failed: {exc.message}")
        return None


def _table_text(out: Output, found: Sequence[tuple[Executor, Leftover]]) -> str:
    columns = (
        Column("backend"),
        Column("id"),
        Column("state"),
        Column("found", is_flexible=True),
        Column("run", is_flexible=True),
    )
    rows = tuple(
        (
            Cell(executor.name),
            Cell(one_line(each.stray.native_id), "bold"),
            Cell(_state(each), "warn" if each.is_unknown else ""),
            Cell(one_line(each.message)),
            Cell(str(each.stray.handle), "dim"),
        )
        for executor, each in found
    )
    return out.table_text(Table(columns, rows))


def _may_stop(out: Output, yes: bool, count: int) -> bool:
    if yes:
        return True
    if not out.can_ask:
        raise ConfigError(
            f"found {count}, and cannot ask for confirmation without a terminal",
            hint="`--yes` stops them, `--dry-run` only lists them",
        )
    return click.confirm(f"stop {'it' if count == 1 else f'these {count}'}?", err=True)


def _stop(out: Output, found: Sequence[tuple[Executor, Leftover]], errors: list[str]) -> list[str]:
    """Cancel each run once; return the handles of those that the backend has stopped."""
    stopped = []
    for handle, executor in {each.stray.handle: executor for executor, each in found}.items():
        try:
            executor.cancel(handle)
        except AtollError as exc:
            errors.append(f"{handle}: {exc.message}")
            continue
        ids = ", ".join(each.stray.native_id for _, each in found if each.stray.handle == handle)
        out.say(f"stopped {executor.name} {ids}")
        stopped.append(str(handle))
    return stopped
