"""`atoll result`: the value that every rank returned, or its error."""

from __future__ import annotations

from dataclasses import replace

import click

from atoll.cli.app import command
from atoll.cli.launch_options import ranks, run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.render import result_json, result_lines
from atoll.cli.runs import find_run


@command("Look", short_help="Show the return value of every rank, or its traceback.")
@run_argument
@store_option
@click.option("--rank", default="all", metavar="K", help="Only these ranks: 2, or 0-3,7.  [default: all]")
def result_command(out: Output, run: str, store: str | None, rank: str) -> None:
    """Show the return values as JSON, one line per rank.

    Exit code 1, with the remote traceback, if a replica did not succeed; 124 if the run has not ended.
    """
    found = find_run(run, store)
    chosen = ranks(rank, found.spec.placement.replicas)
    everything = found.result()
    result = replace(everything, outcomes=tuple(everything.outcomes[k] for k in chosen))
    out.data(result_json(result))
    out.text("\n".join(result_lines(result.outcomes, width=out.width())))
    result.raise_for_failures()
