"""`atoll ps`: the runs of the local index or of a store, each with its state.

All runs are asked at the same time; a run without an answer within the time limit is listed as unreachable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import click

from atoll import journal, registry, units
from atoll.cli.app import command
from atoll.cli.background import merged
from atoll.cli.launch_options import duration
from atoll.cli.output import Cell, Column, Output, Table, one_line
from atoll.cli.render import STATE_STYLES, part_rows, problems_text
from atoll.cli.runs import is_missing
from atoll.errors import AtollError, RunNotFound
from atoll.journal import Launch
from atoll.runs import config, index
from atoll.runs.config import Config
from atoll.runs.run import Run
from atoll.spec import RunSpec
from atoll.status import ReplicaState
from atoll.stores.base import Store

T = TypeVar("T")
UNREACHABLE, GONE = "unreachable", "gone"
_SHOWN = 20
_MOST_REQUESTS = 8
"""Runs that are asked at the same time."""


@dataclass(frozen=True)
class Row:
    """One run as `ps` shows it."""

    run_id: str
    store: str
    state: str = UNREACHABLE
    replicas: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """How many ranks are in each state."""
    executor: str = ""
    at: float | None = None
    message: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """As in `status --json`, if the run is on several backends."""


@command("Look", short_help="List runs: those started on this machine, or those of a store.")
@click.option("--store", metavar="URI", help="List all runs of this store.")
@click.option("-a", "--all", "show_all", is_flag=True, help=f"List all runs, not only the {_SHOWN} newest.")
@click.option(
    "--timeout",
    type=duration,
    metavar="TIME",
    default="10s",
    show_default=True,
    help="Wait at most this long for answers.",
)
def ps_command(out: Output, store: str | None, show_all: bool, timeout: float) -> None:
    """List runs with their states, newest first.

    Without --store, the runs that were started on this machine. A run whose store or backend does not answer is
    listed as unreachable, with the reason.
    """
    settings, limit = config.load(), None if show_all else _SHOWN
    if store is None:
        rows, older = _from_index(settings, limit, timeout)
    else:
        rows, older = _from_store(store, settings, limit, timeout)
    out.data({"runs": [asdict(row) for row in rows], "older": older})
    if not rows:
        out.say(_none_text(store))
        return
    out.text(out.table_text(_table(rows, now=time.time())))
    if older:
        out.say(f"… and {older} older runs: `atoll ps --all` lists them")


def _none_text(store: str | None) -> str:
    """Why the list is empty."""
    if store is None:
        return "no runs yet: `atoll run module:function` starts one"
    return f"no runs in {store}" + (": there is no such folder" if is_missing(registry.open_store(store)) else "")


def _from_index(settings: Config, limit: int | None, within_s: float) -> tuple[list[Row], int]:
    """The runs started on this machine, newest first, and the number of older ones that are left out."""
    known = index.everything()
    shown = known[:limit]

    def ask(run: index.Known) -> Row:
        known = Row(run.run_id, run.store, at=run.at, executor=run.handle.partition("://")[0])
        return _or_reason(known, lambda: _row(registry.open_store(run.store), run.run_id, settings))

    unanswered = [Row(run.run_id, run.store, at=run.at, message=_timeout_text(within_s)) for run in shown]
    return _answers(ask, shown, unanswered, within_s), len(known) - len(shown)


def _from_store(uri: str, settings: Config, limit: int | None, within_s: float) -> tuple[list[Row], int]:
    """All runs of a store, newest first, and the number of older ones that are left out."""
    store = registry.open_store(uri)
    names = list(journal.run_ids(store))

    def ask(run_id: str) -> Row:
        return _or_reason(Row(run_id, store.uri), lambda: _row(store, run_id, settings))

    unanswered = [Row(run_id, store.uri, message=_timeout_text(within_s)) for run_id in names]
    rows = sorted(_answers(ask, names, unanswered, within_s), key=lambda row: -(row.at or 0.0))
    return rows[:limit], max(0, len(rows) - len(rows[:limit]))


def _table(rows: Sequence[Row], *, now: float) -> Table:
    """Run, state, replicas, backend, age, store."""
    columns = (
        Column("run"),
        Column("state"),
        Column("replicas"),
        Column("backend", is_spare=True),
        Column("age", is_right=True),
        Column("store", is_flexible=True, is_spare=True),
        Column("reason", is_flexible=True),
    )
    cells = tuple(
        (
            Cell(one_line(row.run_id), "bold"),
            Cell(row.state, STATE_STYLES[ReplicaState(row.state)] if row.state in set(ReplicaState) else "lost"),
            Cell(_short_counts(row)),
            Cell(" + ".join(dict.fromkeys(part["backend"] for part in row.parts)) or row.executor),
            Cell("" if row.at is None else units.duration_text(now - row.at)),
            Cell(one_line(row.store), "dim"),
            Cell(one_line(row.message.partition("\n")[0])),
        )
        for row in rows
    )
    return Table(columns, cells).without_empty_columns()


def _row(store: Store, run_id: str, settings: Config) -> Row:
    launch = journal.newest_launch(store, run_id)
    record = journal.read_launch(store, run_id, launch.number)
    spec = RunSpec.from_json(record.spec)
    parts = part_rows(spec.placement)
    row = Row(run_id, store.uri, replicas=spec.placement.replicas, executor=record.executor, at=record.at, parts=parts)
    return _or_reason(row, lambda: _with_status(row, spec, launch, store, settings))


def _with_status(row: Row, spec: RunSpec, launch: Launch, store: Store, settings: Config) -> Row:
    executor = registry.executor(row.executor, **settings.executor_settings(row.executor))
    status = Run(spec, executor, store, launch.handle, launch=launch.number).status(progress=False)
    counts = {str(state): count for state, count in status.counts().items()}
    return replace(row, state=str(status.state), counts=counts, message=problems_text(status))


def _short_counts(row: Row) -> str:
    """Only the number if all ranks are in the same state, which has its own column."""
    if len(row.counts) == 1:
        return str(sum(row.counts.values()))
    return ", ".join(f"{count} {state}" for state, count in row.counts.items())


def _or_reason(known: Row, ask: Callable[[], Row]) -> Row:
    """The answer; without one, the row that is known already with the reason."""
    try:
        return ask()
    except RunNotFound as exc:
        return replace(known, state=GONE, message=exc.message)
    except AtollError as exc:
        return replace(known, message=exc.message)
    except Exception as exc:  # noqa: BLE001  one broken record or plug-in must not hide the other runs
        return replace(known, message=f"{type(exc).__name__}: {exc}")


def _answers(ask: Callable[[T], Row], items: Sequence[T], unanswered: Sequence[Row], within_s: float) -> list[Row]:
    """Ask about all items at the same time; an item without an answer in time keeps its row of `unanswered`."""
    rows, numbered = list(unanswered), enumerate(items)

    def worker() -> Iterator[tuple[int, Row]]:
        for number, item in numbered:  # shared by the workers: each takes the next item
            yield number, ask(item)

    workers = {f"ps-{k}": worker() for k in range(min(_MOST_REQUESTS, len(items)))}
    for _, (number, row) in merged(workers, within_s=within_s):
        rows[number] = row
    return rows


def _timeout_text(within_s: float) -> str:
    return f"no answer within {units.duration_text(within_s)}; a longer --timeout waits longer"
