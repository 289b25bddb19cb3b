"""`atoll prune`: delete the data of all runs of a store that ended long ago."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from atoll import journal, registry, units
from atoll.cli.app import command
from atoll.cli.commands.rm import delete_all
from atoll.cli.launch_options import duration
from atoll.cli.output import Output
from atoll.cli.runs import find_run, is_missing
from atoll.errors import AtollError, Conflict
from atoll.runs import config
from atoll.runs.delete import Deletion, check_is_over, planned_deletion
from atoll.runs.run import Run
from atoll.runs.stored import StoredRun
from atoll.stores.base import Store


@command("End", short_help="Delete the data of runs that ended long ago.")
@click.option("--older-than", type=duration, required=True, metavar="TIME", help="Runs that ended this long ago: 30d.")
@click.option("--store", metavar="URI", help="The store.  [default: the configured one]")
@click.option("--keep-weights", is_flag=True, help="Keep the records, the results and the newest agreed weights.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
def prune_command(
    out: Output, older_than: float, store: str | None, keep_weights: bool, dry_run: bool, yes: bool
) -> None:
    """Delete the data of every run of a store that ended at least TIME ago. Shows the sizes first, and asks.

    Runs that are not over are left alone, and so are runs whose state cannot be read; the output names the latter.
    """
    opened = registry.open_store(store or config.load().get("store"))
    found: list[tuple[Store, Deletion]] = []
    for run_id in list(journal.run_ids(opened)):
        try:
            planned = _planned(opened, run_id, time.time() - older_than, keep_weights)
        except AtollError as exc:
            out.say(f"{run_id}: left alone: {exc.message.partition(chr(10))[0]}", "warn")
            continue
        if planned is not None and planned.objects:
            found.append((opened, planned))
    if not found:
        ended = f"ended more than {units.duration_text(older_than)} ago and has data to delete"
        out.say(f"no run in {opened.uri} {ended}" + (": there is no such folder" if is_missing(opened) else ""))
    delete_all(out, found, yes=yes, dry_run=dry_run)


def _planned(store: Store, run_id: str, before: float, keep_weights: bool) -> Deletion | None:
    """What to delete of a run; None if it is not over, or not long enough."""
    if journal.is_deleted(store, run_id):
        return planned_deletion(store, run_id, keep_weights=keep_weights)
    run = find_run(run_id, store.uri)
    if _newest_at(run) > before:
        return None
    try:
        check_is_over(run)
    except Conflict:
        return None
    return replace(planned_deletion(store, run_id, keep_weights=keep_weights), launch=run.launch)


def _newest_at(run: Run) -> float:
    """The time of the last sign of life: the end of a replica, or else the record of the launch."""
    outcomes = StoredRun(run.store, run.id, run.launch).outcomes().values()
    ends = [outcome.ended_at for outcome in outcomes if outcome.ended_at is not None]
    return max([journal.read_launch(run.store, run.id, run.launch).at or 0.0, *ends])
