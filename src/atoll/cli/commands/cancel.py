"""`atoll cancel`: stop runs, or single ranks of a run, and return when none of these replicas runs any more."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import click

from atoll.cli.app import Interrupted, command
from atoll.cli.launch_options import complete_run, rank_option, ranks, store_option
from atoll.cli.output import Output, error_record
from atoll.cli.render import counts_text
from atoll.cli.runs import find_run
from atoll.errors import AtollError, ConfigError, RunNotFound, StoreError, UnknownName, UsageError
from atoll.result import ranks_text
from atoll.runs.attach import UnrecordedRun, attach
from atoll.runs.cancel import status_or_none
from atoll.runs.run import Run
from atoll.status import RunStatus

_SLOW_S = 5.0
log = logging.getLogger("atoll.cli")


@command("End", short_help="Stop runs; return when none of their replicas runs any more.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@rank_option(help="Stop only these ranks of one RUN: 2, or 0-3,7.")
@click.option("--abandon", is_flag=True, help="Give up what a backend that is gone cannot stop.")
@store_option
def cancel_command(out: Output, runs: tuple[str, ...], rank: str | None, abandon: bool, store: str | None) -> None:
    """Stop every replica of the runs. For runs that have ended, do nothing.

    RUN is a run id or a handle. Stopping does not need the store: if the store does not answer, the replicas are
    stopped through the handle, and a warning says that the stop is not recorded.

    With --rank, the other replicas keep running, and the stopped ranks are not started again. A round that needs a
    stopped rank then ends with an error that names it, unless the run waits for it (--on-dead wait). A backend that
    can only stop all replicas together refuses --rank.

    With --abandon, a run whose backend does not answer or cannot be used any more counts as over, so that it can be
    resumed elsewhere or deleted. Replicas that still run go on until their time limit.
    """
    if abandon and rank is not None:
        raise UsageError("--abandon: a run can only be abandoned as a whole, without --rank")
    if rank is not None and len(runs) > 1:
        raise UsageError(f"--rank {rank}: ranks of one run can be stopped at a time, and here are {len(runs)} runs")
    done: list[dict[str, Any]] = []
    first: AtollError | None = None
    for name in runs:
        try:
            done.append(_cancel(out, name, store, rank, abandon=abandon))
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


def _cancel(out: Output, name: str, store: str | None, rank: str | None, *, abandon: bool) -> dict[str, Any]:
    run = _found(out, name, store)
    replicas = run.handle.replicas if isinstance(run, UnrecordedRun) else run.spec.placement.replicas
    chosen = None if rank is None else ranks(rank, replicas)
    with _told_if_slow(out, run.id):
        stopped = run.cancel(chosen, abandon=abandon)
    before, after = stopped.before, _status(run)
    was_over = before is not None and all(
        r.state.is_terminal for r in before.replicas if r.rank in (chosen or [r.rank])
    )
    counts = counts_text(after) if after is not None else "the backend does not say how its replicas ended"
    what = f"run `{run.id}`" if chosen is None else f"run `{run.id}`: {ranks_text(chosen)}"
    is_stopped = "are stopped" if chosen is not None and len(chosen) > 1 else "is stopped"
    if stopped.left_running is not None:
        is_stopped = "is abandoned"
    out.say(f"{what} {'had ended already' if was_over else is_stopped}: {counts}")
    if chosen is not None and after is not None and (others := _others(run, chosen, after)):
        out.say(others)
    if stopped.warning:
        out.say(f"warning: {stopped.warning}", "warn")
    if stopped.left_running is not None and after is not None and not after.is_terminal:
        out.say("warning: its backend answers and says that replicas run, so the run does not count as over", "warn")
    return {
        "run_id": run.id,
        **({} if chosen is None else {"ranks": chosen}),
        "was": before.state if before is not None else None,
        "state": after.state if after is not None else None,
        "was_over": was_over,
        "recorded": stopped.record_error is None,
        **({"abandoned": True} if stopped.left_running is not None else {}),
        **({"warning": stopped.warning} if stopped.warning else {}),
    }


@contextmanager
def _told_if_slow(out: Output, run_id: str) -> Iterator[None]:
    """Say that the command goes on if it takes long: a backend that does not answer is asked for minutes."""
    text = f"run `{run_id}`: waiting until its backend has stopped every replica, or does not answer for minutes"
    timer = Timer(_SLOW_S, out.say, (text, "dim"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _others(run: Run, stopped: list[int], status: RunStatus) -> str:
    """What the ranks do that were not stopped; empty if none is left."""
    left = [r.rank for r in status.replicas if not r.state.is_terminal and r.rank not in stopped]
    if not left:
        return ""
    go_on, needs = ("goes on", "waits") if len(left) == 1 else ("go on", "wait")
    waits = not isinstance(run, UnrecordedRun) and run.spec.task.on_dead == "wait"
    it = "it" if len(stopped) == 1 else "them"
    then = f"{needs} for {it} until the deadline" if waits else f"ends with an error that names {it}"
    return f"{ranks_text(left)} {go_on}; a round that needs {ranks_text(stopped)} {then}"


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
