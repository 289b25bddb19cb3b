"""`atoll plan`: the exact request, or every reason it would be refused. Starts and writes nothing."""

from __future__ import annotations

from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.launch_options import announce, draft, draft_json, run_options
from atoll.cli.output import Output


@command("Start", takes_words=True, short_help="Show the exact request `run` would send, or why not; start nothing.")
@run_options
def plan_command(out: Output, **options: Any) -> None:
    """Show the exact request that `atoll run` with the same options would send, as JSON on stdout.

    If the backend would refuse it, every reason is listed and the exit code is 2. Nothing is started, and nothing is
    written to the store.
    """
    made = draft(out, options, click.get_current_context().meta.get("words", ()))
    announce(out, made)
    out.data(draft_json(made))
    made.preflight()
    out.text(str(made.plan))
