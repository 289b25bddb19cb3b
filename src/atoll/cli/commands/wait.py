"""`atoll wait`: wait for a run and report its success with the exit code."""

from __future__ import annotations

import shlex
import time

import click

from atoll._threads import Unanswered, answer_within
from atoll._time import Deadline
from atoll.cli.app import command
from atoll.cli.launch_options import duration, run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.render import elapsed_s, status_json, success_text, warnings_text
from atoll.cli.runs import find_run
from atoll.cli.watch import resume_hint, watch
from atoll.errors import WaitTimeout
from atoll.runs.run import Run

_LEAST_S = 1.0
"""The time for finding the run, which does not count as waiting."""


@command("Look", short_help="Wait for a run; exit code 0 if every replica succeeded.")
@run_argument
@store_option
@click.option("--timeout", type=duration, metavar="TIME", help="Stop waiting after this long, with exit code 124.")
@click.option("--fail-fast", is_flag=True, help="Cancel the run when a replica has failed.")
@click.option(
    "--on-deadline",
    type=click.Choice(["leave", "cancel"]),
    default="leave",
    show_default=True,
    help="What to do with the run after --timeout.",
)
def wait_command(
    out: Output, run: str, store: str | None, timeout: float | None, fail_fast: bool, on_deadline: str
) -> None:
    """Wait until a run has ended.

    Exit code 0 if every replica succeeded, 1 if not, 124 if --timeout passes first.
    """
    found, left_s = _found(run, store, timeout)
    status = watch(found, out, live=False, timeout_s=left_s, fail_fast=fail_fast, on_deadline=on_deadline)
    out.data(status_json(found.id, status))
    with resume_hint(found, is_over=True):
        result = found.result()
    if warnings := warnings_text(result.outcomes):
        out.say(warnings, "warn")
    result.raise_for_failures()
    out.say(success_text(result, elapsed_s(status, time.time())), "good")


def _found(name: str, store: str | None, timeout_s: float | None) -> tuple[Run, float | None]:
    """The run, and the time that is left to wait for it. `WaitTimeout` if its store does not answer in time."""
    if timeout_s is None:
        return find_run(name, store), None
    deadline = Deadline(timeout_s)
    try:
        found = answer_within(max(timeout_s, _LEAST_S), lambda: find_run(name, store))
    except Unanswered:
        hint = f"`atoll wait {shlex.quote(name)}` without --timeout waits longer"
        raise WaitTimeout(f"the records of run `{name}` could not be read within {timeout_s:g} s", hint=hint) from None
    is_soon = timeout_s - deadline.remaining_s < _LEAST_S
    return found, timeout_s if is_soon else round(deadline.remaining_s, 1)
