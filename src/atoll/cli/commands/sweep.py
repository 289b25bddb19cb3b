"""`atoll sweep`: find by label, at the services themselves, what still runs of runs that are over; and stop it."""

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


@command("End", short_help="Find and stop what still runs of runs that are over.")
@click.option("--on", multiple=True, metavar="BACKEND", shell_complete=complete_backend, help="Only on these.")
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def sweep_command(out: Output, on: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Ask each backend, by label, what it still runs for runs that are over, and stop that.

    What we remember ourselves plays no part, so this also finds what a lost launcher left behind.
    """
    sweepers, trouble = _sweepers(out, on, config.load())
    found = [(executor, stray) for executor in sweepers for stray in _strays(out, executor, trouble)]
    strays = [{"executor": e.name, "handle": str(s.handle), "id": s.native_id, "message": s.message} for e, s in found]
    stopped: list[str] = []
    out.data({"asked": [e.name for e in sweepers], "strays": strays, "stopped": stopped})
    if not found:
        out.say(f"nothing left over on {', '.join(e.name for e in sweepers) or 'any backend'}")
    else:
        out.text(_table_text(out, found))
        if not dry_run and _may_stop(out, yes, len(found)):
            stopped.extend(_stop(out, found, trouble))
    if trouble:
        raise BackendError("; ".join(trouble))


def _sweepers(out: Output, names: Sequence[str], settings: Config) -> tuple[list[Executor], list[str]]:
    """Backends that can be asked. Named ones must be; of all the others, those that cannot are mentioned."""
    found: list[Executor] = []
    for name in names or registry.known("executor"):
        try:
            executor = registry.executor(name, **settings.executor_settings(name))
        except AtollError as exc:
            if names:
                raise
            out.say(f"{name}: not asked: {exc.message}")
            continue
        if isinstance(executor, Sweeper):
            found.append(executor)
        elif names:
            raise ConfigError(f"backend `{name}` cannot be asked what it still runs")
    return found, []


def _strays(out: Output, executor: Any, trouble: list[str]) -> list[Stray]:
    try:
        return list(executor.strays())
    except AtollError as exc:
        trouble.append(f"{executor.name}: {exc.message}")
        out.say(f"{executor.name}: could not be asked: {exc.message}")
        return []


def _table_text(out: Output, found: Sequence[tuple[Executor, Stray]]) -> str:
    columns = (Column("backend"), Column("id"), Column("what", is_flexible=True), Column("run", is_flexible=True))
    rows = tuple(
        (Cell(e.name), Cell(one_line(s.native_id), "bold"), Cell(one_line(s.message)), Cell(str(s.handle), "dim"))
        for e, s in found
    )
    return table_text(Table(columns, rows), width=out.width(), colour=out.has_colour())


def _may_stop(out: Output, yes: bool, count: int) -> bool:
    if yes:
        return True
    if not out.can_ask:
        raise ConfigError(f"{count} found, and nobody here to ask", hint="`--yes` stops them, `--dry-run` only shows")
    return click.confirm(f"stop {'it' if count == 1 else f'these {count}'}?", err=True)


def _stop(out: Output, found: Sequence[tuple[Executor, Stray]], trouble: list[str]) -> list[str]:
    """Cancel each run once; what was stopped is what the backend says is gone."""
    stopped = []
    for handle, executor in {stray.handle: executor for executor, stray in found}.items():
        try:
            executor.cancel(handle)
        except AtollError as exc:
            trouble.append(f"{handle}: {exc.message}")
            continue
        ids = ", ".join(stray.native_id for _, stray in found if stray.handle == handle)
        out.say(f"stopped {executor.name} {ids}")
        stopped.append(str(handle))
    return stopped
