"""`atoll top`: a run on the whole screen, or one snapshot where there is no terminal."""

from __future__ import annotations

import time

from atoll.cli.app import command
from atoll.cli.commands.status import cost_json, status_text
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.phases import phases_table, round_json
from atoll.cli.render import counts_text, status_json
from atoll.cli.runs import find_run
from atoll.cli.watch import RoundPoller
from atoll.rounds.timeline import RoundRecord


@command("Look", short_help="Watch a run on the whole screen; q quits.")
@run_argument
@store_option
def top_command(out: Output, run: str, store: str | None) -> None:
    """Watch every rank live: state, round, metrics with their trend, heartbeat, last line. Below, watch the last
    finished round of each rank: the time of each phase, the exposed and hidden time, bytes and requests.

    q or Ctrl-C quits, and the run continues. Without a terminal, one snapshot is printed.
    """
    found = find_run(run, store)
    status, poller = found.status(), RoundPoller(found)
    cost = found.cost(status)
    if out.is_screen:
        from atoll.cli.live import show_top

        status = show_top(found, status, poller, out)
        out.say(f"run `{found.id}`: {counts_text(status)}")
    else:
        now = None if status.is_terminal else time.time()
        text = status_text(found, status, out, poller.waiting(status), cost)
        out.text(text + _rounds_text(poller.records(), now, out))
    rounds = {str(rank): round_json(record) for rank, record in sorted(poller.records().items())}
    out.data({**status_json(found.id, status, poller.waiting(status)), "rounds": rounds, **cost_json(cost)})


def _rounds_text(records: dict[int, RoundRecord], now: float | None, out: Output) -> str:
    if not records:
        return ""
    table = phases_table(records, sorted(records), now=now).without_empty_columns()
    return "\n\nlast round of each rank:\n" + out.table_text(table)
