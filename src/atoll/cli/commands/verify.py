"""`atoll verify`: recompute the rounds of a run from the objects in its store, and compare."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from atoll import journal
from atoll.cli.app import command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.render import rejections_text
from atoll.cli.runs import find_place, have_all_ended, suggesting
from atoll.errors import CorruptUpdate, MissingExtra, RoundError
from atoll.stores.fast import recycles

if TYPE_CHECKING:
    from atoll.rounds.verify import Report
    from atoll.stores.base import Store


@command("Look", short_help="Recompute the rounds of a run that are still in the store, and compare.")
@run_argument
@store_option
def verify_command(out: Output, run: str, store: str | None) -> None:
    """Recompute the rounds of a run from the objects in its store: checksums, means, outer steps, states.

    Only reads. Exit code 5, with the first difference, if an object differs from the recomputed value; and before
    the first round has ended, because there is nothing to recompute.
    """
    run_id, opened = find_place(run, store)
    try:
        from atoll.rounds.verify import verify
    except ModuleNotFoundError as exc:
        raise MissingExtra(exc.name or "numpy", extra="train") from exc
    with suggesting(run, store):
        report = verify(opened, run_id, launch=journal.newest_rounds(opened, run_id))
    out.data(asdict(report))
    out.text(_text(report))
    for note in report.notes:
        out.say(f"note: {note}")
    if report.difference is not None:
        raise CorruptUpdate(f"run `{run_id}` does not verify: {report.difference}")
    if report.partial and not report.rounds:
        gone, hint = "some objects of every round are no longer in the store", _recycling_hint(opened)
        if journal.is_pruned(opened, run_id):
            gone, hint = "its rounds were deleted, and only the last snapshot of its weights was kept", None
        raise RoundError(f"run `{run_id}` has nothing to verify: {gone}", hint=hint)
    if not report.rounds:
        hint = None if have_all_ended(opened, run_id) else "try again after the first round"
        raise RoundError(f"run `{run_id}` has nothing to verify: none of its rounds has ended", hint=hint)
    out.say("verified: every compared object has the recomputed value", "good")


def _recycling_hint(store: Store) -> str | None:
    """Only the address of a store says that it recycles, that is, deletes chunks after they were read."""
    if not store.uri.startswith("file:") or recycles(store):
        return None
    separator = "&" if "?" in store.uri else "?"
    return f"if the run used a recycling store, use its address: --store '{store.uri}{separator}recycle=1'"


def _text(report: Report) -> str:
    last = report.first_round + report.rounds - 1
    span = f"rounds {report.first_round} to {last}" if report.rounds else "no rounds"
    is_published = bool(report.means or report.trusted)
    means = [f"{report.means} chunks of means"] if is_published else []
    checked = ", ".join([f"{report.updates} updates", *means, f"{report.states} states", f"{report.records} records"])
    text = f"run {report.run_id}: {span} recomputed; {checked} compared"
    if report.rounds and not is_published:
        text += "; no means were published, because each replica averaged whole updates"
    if report.trusted:
        text += f"; {report.trusted} more chunks taken as published, because the store lacks contributions"
    return "; ".join(filter(None, (text, rejections_text(report.rejected))))
