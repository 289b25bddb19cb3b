"""`atoll plan`: print the exact request, or every reason for a refusal. Starts and writes nothing."""

from __future__ import annotations

from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.launch_options import announce, draft, draft_json, planned_notes, run_options, say_notes
from atoll.cli.output import Output
from atoll.cli.plan_text import plan_text


@command(
    "Start",
    takes_script_args=True,
    short_help="Show the exact request that `run` would send, or its problems.",
)
@run_options
def plan_command(out: Output, **options: Any) -> None:
    """Show the exact request that `atoll run` with the same options would send, as JSON on stdout.

    Requests that differ only in a few values are grouped: once what they have in common, then what differs for each
    replica. The price comes last, on stderr. `--json` has every request in full.

    If the request is invalid, every reason is listed and the exit code is 2. Nothing is started, and nothing is
    written to the store.
    """
    made = draft(out, options, click.get_current_context().meta.get("script_args", ()))
    announce(out, made)
    notes = planned_notes(made, options["run_id"])
    out.data(draft_json(made, notes))
    made.preflight()
    out.text(plan_text(made.plan.request))
    say_notes(out, made, notes)
