"""`atoll cancel`: stop runs, and return when none of their replicas runs any more."""

from __future__ import annotations

from typing import Any

import click

from atoll import registry
from atoll.cli.app import command
from atoll.cli.launch_options import complete_run, store_option
from atoll.cli.output import Output, error_record
from atoll.cli.render import counts_text
from atoll.cli.runs import find_run
from atoll.errors import AtollError
from atoll.executors.base import Executor
from atoll.runs import config
from atoll.runs.stop import StopReport, stop


@command("End", short_help="Stop runs; return when none of their replicas runs any more.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@store_option
def cancel_command(out: Output, runs: tuple[str, ...], store: str | None) -> None:
    """Stop every replica of the runs. For runs that have ended, do nothing.

    RUN is a run id or a handle. Stopping does not need the store: if the store does not answer, the replicas are
    stopped through the handle, and a warning says that the stop is not recorded.
    """
    done: list[dict[str, Any]] = []
    first: AtollError | None = None
    for name in runs:
        try:
            done.append(_cancel(out, name, store))
        except AtollError as exc:
            first = first or exc
            done.append({"run_id": name, "error": exc.code, **error_record(exc)})
            if len(runs) > 1:
                out.say(f"{name}: {exc.message}")
    out.data({"runs": done})
    if first is not None:
        raise first


def _cancel(out: Output, name: str, store: str | None) -> dict[str, Any]:
    settings = config.load()

    def executor(backend: str) -> Executor:
        return registry.executor(backend, **settings.executor_settings(backend))

    report = stop(name, lambda: find_run(name, store), executor, in_index=store is None or "://" in name)
    before, after = report.stopped.before, report.after
    was_over = before is not None and before.is_terminal
    counts = counts_text(after) if after is not None else "the backend does not say how its replicas ended"
    out.say(f"run `{report.run_id}` {'had ended already' if was_over else 'is stopped'}: {counts}")
    if warning := report.stopped.warning:
        out.say(f"warning: {warning}", "warn")
    return _json(report, was_over=was_over)


def _json(report: StopReport, *, was_over: bool) -> dict[str, Any]:
    before, after, problem = report.stopped.before, report.after, report.stopped.record_error
    return {
        "run_id": report.run_id,
        "was": before.state if before is not None else None,
        "state": after.state if after is not None else None,
        "was_over": was_over,
        "recorded": problem is None,
        **({"warning": report.stopped.warning} if problem is not None else {}),
    }
