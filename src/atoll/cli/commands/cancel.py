"""`atoll cancel`: stop runs, and return when none of their replicas runs any more."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import click

from atoll.cli.app import Interrupted, command
from atoll.cli.launch_options import complete_run, store_option
from atoll.cli.output import Output, error_record
from atoll.cli.render import counts_text
from atoll.cli.runs import find_run
from atoll.errors import AtollError, ConfigError, RunNotFound, StoreError, UnknownName, UsageError
from atoll.runs.attach import attach
from atoll.runs.run import Run, status_or_none
from atoll.status import RunStatus

log = logging.getLogger("atoll.cli")


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
        except KeyboardInterrupt:
            hint = f"`atoll cancel {shlex.join(runs)}` stops the rest"
            raise Interrupted(hint, message=f"replicas of run `{name}` may still run") from None
        except AtollError as exc:
            first = first or exc
            done.append({"run_id": name, "error": exc.code, **error_record(exc)})
            if len(runs) > 1:
                out.say(f"{name}: {exc.message}")
    out.data({"runs": done})
    if first is not None:
        raise first


def _cancel(out: Output, name: str, store: str | None) -> dict[str, Any]:
    run = _found(out, name, store)
    stopped = run.cancel()
    before, after = stopped.before, _status(run)
    was_over = before is not None and before.is_terminal
    counts = counts_text(after) if after is not None else "the backend does not say how its replicas ended"
    out.say(f"run `{run.id}` {'had ended already' if was_over else 'is stopped'}: {counts}")
    if stopped.warning:
        out.say(f"warning: {stopped.warning}", "warn")
    return {
        "run_id": run.id,
        "was": before.state if before is not None else None,
        "state": after.state if after is not None else None,
        "was_over": was_over,
        "recorded": stopped.record_error is None,
        **({"warning": stopped.warning} if stopped.warning else {}),
    }


def _found(out: Output, name: str, store: str | None) -> Run:
    """The run. A wrong configuration must not keep a run alive: what is wrong is left out, with a warning."""
    try:
        return find_run(name, store)
    except (UnknownName, UsageError):
        raise
    except ConfigError as exc:
        out.say(f"warning: {exc.message}\nwarning: the cancel goes on without the settings of this folder", "warn")
        log.info("cancel without the settings of this folder: %s", exc.code)
    try:
        return attach(name, store=store)
    except RunNotFound as exc:
        raise RunNotFound(exc.message, hint="correct the configuration, then repeat the cancel") from exc


def _status(run: Run) -> RunStatus | None:
    """The status after the stop, without the store if that does not answer."""
    try:
        return run.status(progress=False)
    except StoreError:
        return status_or_none(run.executor, run.handle)
