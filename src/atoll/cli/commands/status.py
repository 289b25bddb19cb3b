"""`atoll status`: how every rank is doing."""

from __future__ import annotations

import time

import click

from atoll import units
from atoll.cli.app import command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Cell, Output, pairs_text, table_text
from atoll.cli.render import counts_text, elapsed_s, restarts_text, state_cell, status_json, status_table
from atoll.cli.runs import find_run
from atoll.cli.waits import avoid_text, outlook_text, waiting_text
from atoll.cli.watch import RoundPoller, watch
from atoll.rounds.metrics import Waiting
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus


@command("Look", short_help="Show how every rank of a run is doing.")
@run_argument
@store_option
@click.option("--watch", "is_watched", is_flag=True, help="Go on until the run is over.")
def status_command(out: Output, run: str, store: str | None, is_watched: bool) -> None:
    """Show state, reason, round, metrics and last line of every rank.

    The exit code is 0 whenever the question could be answered; `atoll wait` is the one that fails with the run.
    """
    found = find_run(run, store)
    status = watch(found, out) if is_watched else found.status()
    waiting = RoundPoller(found).waiting(status)
    shown = status_json(found.id, status, waiting)
    out.data({**shown, "handle": handle_text(found), "store": found.store.uri})
    out.text(status_text(found, status, out, waiting))


def status_text(run: Run, status: RunStatus, out: Output, waiting: Waiting | None = None) -> str:
    """The head and the table."""
    now, colour = time.time(), out.has_colour()
    took = elapsed_s(status, now)
    head = [
        ("run", Cell(run.id, "bold")),
        ("state", state_cell(status.state)),
        ("replicas", Cell(counts_text(status))),
        ("entry", Cell(run.spec.task.entry)),
        ("time", Cell(units.duration_text(took) if took is not None else "not started")),
        ("handle", Cell(handle_text(run) or "none: never started")),
        ("store", Cell(run.store.uri)),
    ]
    if restarted := restarts_text(status):
        head.append(("again", Cell(restarted, "warn")))
    if waiting is not None:
        head.append(("waiting", Cell(waiting_text(waiting, status, now), "warn")))
    if outlook := outlook_text(waiting, status, run.id, now):
        head.append(("next", Cell(outlook, "warn")))
    if avoid := avoid_text(waiting, status, could_restart=could_restart(run.spec, run.executor)):
        head.append(("later", Cell(avoid, "warn")))
    table = table_text(status_table(status, now=now), width=out.width(), colour=colour)
    return pairs_text(head, colour=colour, indent="") + "\n\n" + table


def handle_text(run: Run) -> str | None:
    """The handle, or None if its launcher never came that far."""
    from atoll.errors import RunNotFound

    try:
        return str(run.handle)
    except RunNotFound:
        return None
