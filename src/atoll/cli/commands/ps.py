"""`atoll ps`: which runs there are."""

from __future__ import annotations

import time

import click

from atoll.cli.app import command
from atoll.cli.listing import from_index, from_store, listing_table
from atoll.cli.options import duration
from atoll.cli.output import Output
from atoll.cli.text import table_text
from atoll.runs import config

_SHOWN = 20


@command("Look", short_help="List runs: those started here, or those of a store.")
@click.option("--store", metavar="URI", help="List the runs of this store, whoever started them.")
@click.option("-a", "--all", "show_all", is_flag=True, help=f"All of them, not only the {_SHOWN} newest.")
@click.option("--timeout", type=duration, metavar="TIME", default="10s", help="Ask for at most this long.")
def ps_command(out: Output, store: str | None, show_all: bool, timeout: float) -> None:
    """List runs with their states, newest first.

    Without --store, those this machine has started. A run whose store or backend does not answer is shown as
    unreachable, with the reason.
    """
    settings, limit = config.load(), None if show_all else _SHOWN
    if store is None:
        rows, older = from_index(settings, limit, timeout)
    else:
        rows, older = from_store(store, settings, limit, timeout)
    out.data({"runs": [row.to_json() for row in rows], "older": older})
    if not rows:
        out.say("no runs yet: `atoll run module:function` starts one" if store is None else f"no runs in {store}")
        return
    out.text(table_text(listing_table(rows, now=time.time()), width=out.width(), colour=out.has_colour()))
    if older:
        out.say(f"… and {older} older: `atoll ps --all`")
