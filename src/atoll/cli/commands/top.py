"""`atoll top`: a run on the whole screen."""

from __future__ import annotations

import time

from atoll.cli.app import command
from atoll.cli.commands.status import status_text
from atoll.cli.lookout import Lookout
from atoll.cli.options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.phases import phases_table, round_json
from atoll.cli.render import counts_text, status_json
from atoll.cli.runs import find_run
from atoll.cli.text import table_text
from atoll.rounds.timeline import RoundRecord


@command("Look", short_help="Watch a run on the whole screen; q leaves.")
@run_argument
@store_option
def top_command(out: Output, run: str, store: str | None) -> None:
    """Watch every rank live: state, round, metrics with their trend, heartbeat, last line; and of its last finished
    round, where the time went: computing, the phases of the exchange, how much of it stood in the way, bytes, requests.

    q or Ctrl-C leaves, and the run goes on. Where there is no terminal, one snapshot is printed.
    """
    found = find_run(run, store)
    status, lookout = found.status(), Lookout(found)
    if out.is_screen:
        from atoll.cli.screen import show

        status = show(found, status, lookout, out)
        out.say(f"run `{found.id}`: {counts_text(status)}")
    else:
        now = None if status.is_terminal else time.time()
        out.text(status_text(found, status, out, lookout.waiting(status)) + _rounds_text(lookout.records(), now, out))
    rounds = {str(rank): round_json(record) for rank, record in sorted(lookout.records().items())}
    out.data({**status_json(found.id, status, lookout.waiting(status)), "rounds": rounds})


def _rounds_text(records: dict[int, RoundRecord], now: float | None, out: Output) -> str:
    if not records:
        return ""
    table = phases_table(records, sorted(records), now=now).without_empty_columns()
    return "\n\nlast round of each rank:\n" + table_text(table, width=out.width(), colour=out.has_colour())
