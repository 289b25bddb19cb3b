"""`atoll cancel`: stop runs, and return when none of their replicas runs any more."""

from __future__ import annotations

from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.launch_options import complete_run, store_option
from atoll.cli.output import Output
from atoll.cli.render import counts_text
from atoll.cli.runs import find_run
from atoll.errors import AtollError


@command("End", short_help="Stop runs; return when none of their replicas runs any more.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@store_option
def cancel_command(out: Output, runs: tuple[str, ...], store: str | None) -> None:
    """Stop every replica of the runs. For runs that have ended, do nothing."""
    done: list[dict[str, Any]] = []
    first: AtollError | None = None
    for name in runs:
        try:
            done.append(_cancel(out, name, store))
        except AtollError as exc:
            first = first or exc
            done.append({"run_id": name, "error": exc.code, "message": exc.message})
            if len(runs) > 1:
                out.say(f"{name}: {exc.message}")
    out.data({"runs": done})
    if first is not None:
        raise first


def _cancel(out: Output, name: str, store: str | None) -> dict[str, Any]:
    run = find_run(name, store)
    before = run.status(progress=False)
    run.cancel()
    after = run.status(progress=False)
    if before.is_terminal:
        out.say(f"run `{run.id}` had ended already: {counts_text(after)}")
    else:
        out.say(f"run `{run.id}` is stopped: {counts_text(after)}")
    return {"run_id": run.id, "was": before.state, "state": after.state, "was_over": before.is_terminal}
