"""`atoll status`: the state of every rank."""

from __future__ import annotations

import shlex
import time
from typing import Any

import click

from atoll import units
from atoll.cli.app import command
from atoll.cli.launch_options import launch_option, run_argument, store_option
from atoll.cli.output import Cell, Output, one_line, pairs_text
from atoll.cli.render import (
    Rounds,
    counts_text,
    elapsed_s,
    link_lines,
    part_rows,
    problems_text,
    restarts_text,
    state_cell,
    status_json,
    status_table,
)
from atoll.cli.runs import find_run, replica_links
from atoll.cli.waits import advice_text, outlook_text, waiting_text
from atoll.cli.watch import RoundPoller, watch
from atoll.errors import RunNotFound
from atoll.result import warning_lines
from atoll.rounds.metrics import Waiting
from atoll.runs.cost import Cost
from atoll.runs.run import Run, could_restart
from atoll.status import ReplicaState, RunStatus


@command("Look", short_help="Show the state of every rank of a run.")
@run_argument
@store_option
@click.option("--watch", "is_watched", is_flag=True, help="Repeat until the run has ended.")
@launch_option
def status_command(out: Output, run: str, store: str | None, is_watched: bool, launch: int | None) -> None:
    """Show state, reason, round, metrics and last line of every rank.

    The exit code is 0 even if the run failed; `atoll wait` reports a failed run with its exit code.
    """
    found = find_run(run, store, launch)
    status = watch(found, out) if is_watched else found.status()
    waiting = RoundPoller(found).waiting(status)
    shown = status_json(found.id, status, waiting)
    cost = found.cost(status)
    failed_first = dict.fromkeys(replica.rank for replica in (*status.failures(), *status.replicas))
    links = replica_links(found, failed_first)
    for replica in shown["replicas"]:
        replica["links"] = links.get(replica["rank"], {})
    place = {"handle": handle_text(found), "store": found.store.uri, "launch": found.launch}
    out.data({**shown, **place, **parts_json(found), **cost_json(cost)})
    pages = "\n".join(link_lines(links, shlex.quote(found.id)))
    out.text(status_text(found, status, out, waiting, cost) + (f"\n\n{pages}" if pages else ""))


def parts_json(run: Run) -> dict[str, Any]:
    """`parts` for programs; nothing if the run is on one backend."""
    found = part_rows(run.spec.placement)
    return {"parts": found} if found else {}


def cost_json(cost: Cost | None) -> dict[str, Any]:
    """`cost` for programs; nothing if the price of the backend is not known."""
    return {} if cost is None else {"cost": cost.to_json()}


def status_text(
    run: Run, status: RunStatus, out: Output, waiting: Waiting | None = None, cost: Cost | None = None
) -> str:
    """The facts about the run, then the table of its ranks."""
    now, colour = time.time(), out.has_colour()
    took, rounds = elapsed_s(status, now), str(Rounds.of(status))
    head = [
        ("run", Cell(run.id, "bold")),
        ("state", state_cell(status.state)),
        ("replicas", Cell(counts_text(status))),
        *([("rounds", Cell(rounds))] if rounds else []),
        ("program" if run.spec.task.program else "entry", Cell(run.spec.task.title)),
        ("time", Cell(units.duration_text(took) if took is not None else _no_time(status))),
        *([("cost", Cell(str(cost)))] if cost is not None else []),
        ("handle", Cell(handle_text(run) or "none: its launcher did not finish the start")),
        ("store", Cell(run.store.uri)),
    ]
    if problems := problems_text(status):
        head.append(("problem", Cell(problems, "bad")))
    head += [("warning", Cell(one_line(line), "warn")) for line in warning_lines(status.replicas)]
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


def _no_time(status: RunStatus) -> str:
    """What is shown in place of a time, if no replica has one."""
    return "not started" if all(each.state is ReplicaState.PENDING for each in status.replicas) else "unknown"


def handle_text(run: Run) -> str | None:
    """The handle; None if the launcher ended before it wrote one."""
    try:
        return str(run.handle)
    except RunNotFound:
        return None
