"""`atoll status`: the state of every rank."""

from __future__ import annotations

import time

import click

from atoll import units
from atoll.cli.app import command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Cell, Output, pairs_text
from atoll.cli.render import (
    Rounds,
    counts_text,
    elapsed_s,
    problems_text,
    restarts_text,
    state_cell,
    status_json,
    status_table,
)
from atoll.cli.runs import find_run
from atoll.cli.waits import advice_text, outlook_text, waiting_text
from atoll.cli.watch import RoundPoller, watch
from atoll.errors import RunNotFound
from atoll.rounds.metrics import Waiting
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus


@command("Look", short_help="Show the state of every rank of a run.")
@run_argument
@store_option
@click.option("--watch", "is_watched", is_flag=True, help="Repeat until the run has ended.")
def status_command(out: Output, run: str, store: str | None, is_watched: bool) -> None:
    """Show state, reason, round, metrics and last line of every rank.

    The exit code is 0 even if the run failed; `atoll wait` reports a failed run with its exit code.
    """
    found = find_run(run, store)
    status = watch(found, out) if is_watched else found.status()
    waiting = RoundPoller(found).waiting(status)
    shown = status_json(found.id, status, waiting)
    out.data({**shown, "handle": handle_text(found), "store": found.store.uri})
    out.text(status_text(found, status, out, waiting))


def status_text(run: Run, status: RunStatus, out: Output, waiting: Waiting | None = None) -> str:
    """The facts about the run, then the table of its ranks."""
    now, colour = time.time(), out.has_colour()
    took, rounds = elapsed_s(status, now), str(Rounds.of(status))
    head = [
        ("run", Cell(run.id, "bold")),
        ("state", state_cell(status.state)),
        ("replicas", Cell(counts_text(status))),
        *([("rounds", Cell(rounds))] if rounds else []),
        ("entry", Cell(run.spec.task.entry)),
        ("time", Cell(units.duration_text(took) if took is not None else "not started")),
        ("handle", Cell(handle_text(run) or "none: the run was never started")),
        ("store", Cell(run.store.uri)),
    ]
    if problems := problems_text(status):
        head.append(("problem", Cell(problems, "bad")))
    if restarted := restarts_text(status):
        head.append(("restarts", Cell(restarted, "warn")))
    if waiting is not None:
        head.append(("waiting", Cell(waiting_text(waiting, status, now), "warn")))
    if outlook := outlook_text(waiting, status, run.id, now):
        head.append(("next", Cell(outlook, "warn")))
    if advice := advice_text(waiting, status, could_restart=could_restart(run.spec, run.executor)):
        head.append(("advice", Cell(advice, "warn")))
    table = out.table_text(status_table(status, now=now))
    return pairs_text(head, colour=colour, indent="") + "\n\n" + table


def handle_text(run: Run) -> str | None:
    """The handle; None if the launcher ended before it wrote one."""
    try:
        return str(run.handle)
    except RunNotFound:
        return None
