"""`atoll sweep`: ask the backends, by label, for replicas that still run although their run has ended; stop them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from atoll import registry
from atoll.cli.app import command
from atoll.cli.launch_options import complete_backend
from atoll.cli.output import Cell, Column, Output, Table, one_line, table_text
from atoll.errors import AtollError, BackendError, ConfigError
from atoll.executors.base import Executor, Stray, Sweeper
from atoll.runs import config
from atoll.runs.config import Config


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
def sweep_command(out: Output, on: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Ask each backend, by label, for replicas that still run although their run has ended, and stop them.

    The search does not use the local list of runs, so it also finds replicas of runs that other machines started.
    """
    sweepers, errors = _sweepers(out, on, config.load()), list[str]()
    found = [(executor, stray) for executor in sweepers for stray in _strays(out, executor, errors)]
    strays = [{"executor": e.name, "handle": str(s.handle), "id": s.native_id, "message": s.message} for e, s in found]
    stopped: list[str] = []
    out.data({"asked": [e.name for e in sweepers], "strays": strays, "stopped": stopped})
    if not found:
        out.say(f"no leftover replicas on {', '.join(e.name for e in sweepers) or 'any backend'}")
    else:
        out.text(_table_text(out, found))
        if not dry_run and _may_stop(out, yes, len(found)):
            stopped.extend(_stop(out, found, errors))
    if errors:
        raise BackendError("; ".join(errors), hint="`atoll doctor BACKEND` checks a backend")


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


def _strays(out: Output, executor: Any, errors: list[str]) -> list[Stray]:
    try:
        return list(executor.strays())
    except AtollError as exc:
        errors.append(f"{executor.name}: {exc.message}")
        out.say(f"{executor.name}: the search failed: {exc.message}")
        return []


def _table_text(out: Output, found: Sequence[tuple[Executor, Stray]]) -> str:
    columns = (Column("backend"), Column("id"), Column("found", is_flexible=True), Column("run", is_flexible=True))
    rows = tuple(
        (Cell(e.name), Cell(one_line(s.native_id), "bold"), Cell(one_line(s.message)), Cell(str(s.handle), "dim"))
        for e, s in found
    )
    return table_text(Table(columns, rows), width=out.width(), colour=out.has_colour())


def _may_stop(out: Output, yes: bool, count: int) -> bool:
    if yes:
        return True
    if not out.can_ask:
        raise ConfigError(
            f"found {count}, and cannot ask for confirmation without a terminal",
            hint="`--yes` stops them, `--dry-run` only lists them",
        )
    return click.confirm(f"stop {'it' if count == 1 else f'these {count}'}?", err=True)


def _stop(out: Output, found: Sequence[tuple[Executor, Stray]], errors: list[str]) -> list[str]:
    """Cancel each run once; return the handles of those that the backend has stopped."""
    stopped = []
    for handle, executor in {stray.handle: executor for executor, stray in found}.items():
        try:
            executor.cancel(handle)
        except AtollError as exc:
            errors.append(f"{handle}: {exc.message}")
            continue
        ids = ", ".join(stray.native_id for _, stray in found if stray.handle == handle)
        out.say(f"stopped {executor.name} {ids}")
        stopped.append(str(handle))
    return stopped
