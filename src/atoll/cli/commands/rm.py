"""`atoll rm`: delete the objects of runs that are over."""

from __future__ import annotations

import click

from atoll import journal
from atoll.cli.app import command
from atoll.cli.launch_options import complete_run, store_option
from atoll.cli.output import Output
from atoll.cli.runs import find_place, find_run, suggesting
from atoll.errors import ConfigError, RunNotFound
from atoll.rounds.keys import RoundKeys
from atoll.runs import index
from atoll.runs.delete import Deletion, check_is_over, delete, planned_deletion
from atoll.stores.base import Store
from atoll.units import size_text


@command("End", short_help="Delete the data of runs that are over.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@store_option
@click.option("--keep-weights", is_flag=True, help="Keep the records, the results and the newest agreed weights.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
def rm_command(
    out: Output, runs: tuple[str, ...], store: str | None, keep_weights: bool, dry_run: bool, yes: bool
) -> None:
    """Delete everything that the store has of the runs: records, logs, results, checkpoints, rounds and weights.

    Shows the size first, and asks. A run that is not over is refused, and nothing of any RUN is deleted then. Other
    runs and code bundles are not touched. A deletion that was interrupted can be repeated.
    """
    found: list[tuple[Store, Deletion]] = []
    for name in dict.fromkeys(runs):
        run_id, opened = find_place(name, store)
        with suggesting(name, store):
            planned = planned_deletion(opened, run_id, keep_weights=keep_weights)
        if not journal.is_deleted(opened, run_id):
            _check_is_over(run_id, opened)
        found.append((opened, planned))
    delete_all(out, found, yes=yes, dry_run=dry_run)


def _check_is_over(run_id: str, store: Store) -> None:
    """Raise `Conflict` if the run is not over. A lost machine may have written objects after the run was deleted."""
    try:
        journal.read_run(store, run_id)
    except RunNotFound:
        agreement = RoundKeys(run_id).agreement()
        if agreement not in store.list(agreement) and index.find_in(store.uri, run_id) is None:
            return
    check_is_over(find_run(run_id, store.uri))


def delete_all(out: Output, found: list[tuple[Store, Deletion]], *, yes: bool, dry_run: bool) -> None:
    """Show the size of each run, ask, and delete."""
    records = [
        {"run_id": planned.run_id, "store": store.uri, "objects": len(planned.objects), "bytes": planned.size_bytes}
        for store, planned in found
    ]
    done: list[str] = []
    out.data({"runs": records, "deleted": done})
    for _, planned in found:
        kept = ", the weights stay" if planned.keeps_weights else ""
        out.text(f"{planned.run_id}: {_size(planned)}{kept}")
    if dry_run or not found or not _may_delete(out, found, yes):
        return
    for store, planned in found:
        delete(store, planned)
        done.append(planned.run_id)
        rest = " but its records and newest weights" if planned.keeps_weights else ""
        out.say(f"deleted {'all of ' if rest else ''}{planned.run_id}{rest}")


def _size(planned: Deletion) -> str:
    count = len(planned.objects)
    size = "" if planned.size_bytes is None else f"{size_text(planned.size_bytes)} in "
    return f"{size}{count} object{'' if count == 1 else 's'}"


def _may_delete(out: Output, found: list[tuple[Store, Deletion]], yes: bool) -> bool:
    if yes:
        return True
    if not out.can_ask:
        raise ConfigError(
            "cannot ask for confirmation without a terminal",
            hint="`--yes` deletes, `--dry-run` only shows what would be deleted",
        )
    what = f"run `{found[0][1].run_id}`" if len(found) == 1 else f"these {len(found)} runs"
    return click.confirm(f"delete {what}? This cannot be undone.", err=True)
