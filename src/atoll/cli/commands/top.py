"""`atoll top`: a run on the whole screen."""

from __future__ import annotations

from atoll.cli.app import command
from atoll.cli.commands.status import status_text
from atoll.cli.options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.render import counts_text, status_json
from atoll.cli.runs import find_run


@command("Look", short_help="Watch a run on the whole screen; q leaves.")
@run_argument
@store_option
def top_command(out: Output, run: str, store: str | None) -> None:
    """Watch every rank live: state, round, metrics with their trend, heartbeat, last line.

    q or Ctrl-C leaves, and the run goes on. Where there is no terminal, one snapshot is printed.
    """
    found = find_run(run, store)
    status = found.status()
    if out.is_screen:
        from atoll.cli.screen import show

        status = show(found, status, out)
        out.say(f"run `{found.id}`: {counts_text(status)}")
    else:
        out.text(status_text(found, status, out))
    out.data(status_json(found.id, status))
