"""`atoll result`: the value that every rank returned, or its error."""

from __future__ import annotations

from dataclasses import replace

from atoll.cli.app import command
from atoll.cli.commands.status import cost_json, parts_json
from atoll.cli.launch_options import launch_option, rank_option, ranks, run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.render import result_json, result_lines, warnings_text
from atoll.cli.runs import find_run


@command("Look", short_help="Show the return value of every rank, or its traceback.")
@run_argument
@store_option
@rank_option(default="all", help="Only these ranks: 2, or 0-3,7.  [default: all]")
@launch_option
def result_command(out: Output, run: str, store: str | None, rank: str, launch: int | None) -> None:
    """Show the return values as JSON, one line per rank.

    Exit code 1, with the remote traceback, if a replica did not succeed; 124 if the run has not ended.
    """
    found = find_run(run, store, launch)
    chosen = ranks(rank, found.spec.placement.replicas)
    everything = found.result()
    result = replace(everything, outcomes=tuple(everything.outcomes[k] for k in chosen))
    cost = found.cost()
    out.data({**result_json(result), **parts_json(found), **cost_json(cost)})
    out.text("\n".join(result_lines(result.outcomes, width=out.width())))
    if warnings := warnings_text(result.outcomes):
        out.say(warnings, "warn")
    if cost is not None:
        out.say(f"cost: {cost}")
    result.raise_for_failures()
