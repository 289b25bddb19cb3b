"""`atoll run`: start a run and watch it. Ctrl-C ends only the command, never the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from atoll.cli.app import Interrupted, command
from atoll.cli.launch_options import announce, draft, run_options, say_notes
from atoll.cli.output import Output, pairs_text, table_text
from atoll.cli.render import (
    counts_text,
    elapsed_s,
    live_table,
    next_commands,
    rejected_text,
    result_json,
    result_lines,
    success_text,
    warnings_text,
)
from atoll.cli.watch import deferred_interrupt, relaunch_hint, relaunch_text, resume_hint, watch
from atoll.errors import ConfigError
from atoll.runs.joinable import waiting_line
from atoll.runs.run import Run
from atoll.status import RunStatus

_LATER = "the launch is being completed, then this command detaches; Ctrl-C again undoes the launch"
F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 16
"""Ranks shown on a terminal at the end of a run."""


def watching_options(function: F) -> F:
    """The options of commands that start a run and watch it."""
    for option in (
        click.option(
            "--fail-fast", is_flag=True, help="Cancel the run when a replica has failed and cannot be restarted."
        ),
        click.option("--wait", is_flag=True, help="Print progress lines instead of the live table."),
        click.option("-d", "--detach", is_flag=True, help="Return after the start; print the run id on stdout."),
    ):
        function = option(function)
    return function


@command(
    "Start", takes_script_args=True, short_help="Start replicas and watch them; Ctrl-C detaches, the run continues."
)
@run_options
@watching_options
def run_command(out: Output, detach: bool, wait: bool, fail_fast: bool, **options: Any) -> None:
    """Start replicas of ENTRY and watch them until they have ended.

    ENTRY is `package.module:function`, `script.py` or `script.py:function`. A script gets the arguments after `--`.
    Ctrl-C ends only this command: the run continues, and the output lists the commands to watch it again. Options that
    are not given come from ATOLL_* variables, then from atoll.toml.
    """
    check_watching(detach, wait, fail_fast)
    made = draft(out, options, click.get_current_context().meta.get("script_args", ()))
    announce(out, made)
    say_notes(out, made)
    again = relaunch_text(made.spec.run_id)
    start_and_watch(out, made.submit, again, detach=detach, wait=wait, fail_fast=fail_fast)


def check_watching(detach: bool, wait: bool, fail_fast: bool) -> None:
    if detach and (wait or fail_fast):
        raise ConfigError(
            "--detach returns at once, so it excludes --wait and --fail-fast",
            hint="leave one out, or use `atoll run --detach` and then `atoll wait RUN --fail-fast`",
        )


def start_and_watch(
    out: Output, submit: Callable[[], Run], again: str, *, detach: bool, wait: bool, fail_fast: bool
) -> None:
    """Start a run and watch it until it has ended. `again` says how to finish an interrupted launch."""
    run = _submit(out, submit, again)
    if not run.was_there and (line := waiting_line(run)):
        out.say(line)
    if detach:
        _show_next_commands(out, run)
        if (status := run.status()).is_terminal:
            out.say(f"run `{run.id}` has ended already: {counts_text(status)}; use another --run-id to start it again")
        out.text(run.id)
        return
    try:
        status = watch(run, out, live=not wait, fail_fast=fail_fast)
    except KeyboardInterrupt:
        raise _detached(out, run) from None
    _finish(out, run, status)


def _submit(out: Output, submit: Callable[[], Run], again: str) -> Run:
    run = None
    try:
        with relaunch_hint(again), deferred_interrupt(_LATER):
            run = submit()
    except KeyboardInterrupt as exc:
        if run is None:
            # The notes say whether the launch was undone, or was complete already.
            message = "; ".join(getattr(exc, "__notes__", ())) or "the launch was not finished"
            raise Interrupted(again, message=message) from None
        raise _detached(out, run) from None
    out.data(_identity(run))
    out.event("adopted" if run.was_there else "started", _identity(run))
    if run.was_there:
        out.say(
            f"run `{run.id}` exists already: nothing new is started; another --run-id starts a new run",
            "warn",
        )
    return run


def _detached(out: Output, run: Run) -> Interrupted:
    out.data(_identity(run))
    out.say(f"detached: run `{run.id}` continues")
    _show_next_commands(out, run)
    return Interrupted(quiet=True)


def _show_next_commands(out: Output, run: Run) -> None:
    rows = [("handle", str(run.handle)), *next_commands(run.id)]
    out.say(pairs_text(rows, colour=out.has_colour(on_stderr=True)))


def _finish(out: Output, run: Run, status: RunStatus) -> None:
    if out.is_live:
        width, colour = out.width(on_stderr=True), out.has_colour(on_stderr=True)
        table = live_table(status, limit=_SHOWN).without_empty_columns()
        out.say(f"\n{table_text(table, width=width, colour=colour)}")
        if (hidden := len(status.replicas) - _SHOWN) > 0:
            out.say(f"… and {hidden} more ranks: `atoll status {run.id}` shows them", "dim")
        if rejected := rejected_text(status):
            out.say(rejected, "warn")
        out.say()
    with resume_hint(run, is_over=True):
        result = run.result()
    out.data({**_identity(run), "state": status.state, "result": result_json(result)})
    if warnings := warnings_text(result.outcomes):
        out.say(warnings, "warn")
    result.raise_for_failures()
    out.say(success_text(result, elapsed_s(status, time.time())), "good")
    if any(value is not None for value in result.values):
        shown = result.outcomes[:_SHOWN] if out.is_screen else result.outcomes
        out.text("\n".join(result_lines(shown, width=out.width())))
        if len(shown) < len(result.outcomes):
            out.say(f"… and {len(result.outcomes) - len(shown)} more: `atoll result {run.id}` prints them")


def _identity(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "handle": str(run.handle),
        "store": run.store.uri,
        "executor": run.executor.name,
        "launch": run.launch,
    }
