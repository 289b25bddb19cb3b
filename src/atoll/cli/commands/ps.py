"""`atoll ps`: which runs there are.

Asking many at once, for a bounded time: one that does not answer holds up nobody.

The rows of `atoll ps`: from the local index or a store, each asked how it is; those out of reach say so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from queue import Empty, Queue
from typing import Any, TypeVar

import click

from atoll import journal, registry, units
from atoll._time import SYSTEM_CLOCK, Deadline
from atoll.cli.app import command
from atoll.cli.launch_options import duration
from atoll.cli.output import Cell, Column, Output, Table, one_line, table_text
from atoll.cli.render import STATE_STYLES
from atoll.errors import AtollError, RunNotFound
from atoll.runs import config, index
from atoll.runs.config import Config
from atoll.runs.run import Run
from atoll.spec import RunSpec
from atoll.status import ReplicaState
from atoll.stores.base import Store

T = TypeVar("T")
R = TypeVar("R")


def ask_all(ask: Callable[[T], R], items: Sequence[T], *, within_s: float, workers: int = 8) -> list[R | None]:
    """The answers in the order of `items`; None where there was none in time. `ask` must not raise.

    The threads are daemons: a question that hangs does not keep the command from ending.
    """
    waiting: Queue[tuple[int, T]] = Queue()
    answered: Queue[tuple[int, R]] = Queue()
    for numbered in enumerate(items):
        waiting.put(numbered)
    for _ in range(min(workers, len(items))):
        threading.Thread(target=_work, args=(ask, waiting, answered), daemon=True).start()
    answers: list[R | None] = [None] * len(items)
    deadline = Deadline(within_s, SYSTEM_CLOCK)
    for _ in items:
        try:
            number, answer = answered.get(timeout=max(0.001, deadline.remaining_s))
        except Empty:
            break
        answers[number] = answer
    return answers


def _work(ask: Callable[[T], R], waiting: Queue[tuple[int, T]], answered: Queue[tuple[int, R]]) -> None:
    while True:
        try:
            number, item = waiting.get_nowait()
        except Empty:
            return
        answered.put((number, ask(item)))


UNREACHABLE, GONE = "unreachable", "gone"


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_index(settings: Config, limit: int | None, within_s: float) -> tuple[list[Row], int]:
    """The runs launched from here, newest first, and how many older ones were left out."""
    known = index.everything()
    shown = known[:limit]

    def look(run: index.Known) -> Row:
        unseen = Row(run.run_id, run.store, at=run.at, executor=run.handle.partition("://")[0])
        return _guarded(unseen, lambda: _look(registry.open_store(run.store), run.run_id, settings))

    unseen = [Row(run.run_id, run.store, at=run.at, message=_late(within_s)) for run in shown]
    return _answers(look, shown, unseen, within_s), len(known) - len(shown)


def from_store(uri: str, settings: Config, limit: int | None, within_s: float) -> tuple[list[Row], int]:
    """Every run of a store, newest first. The store is asked, not our memory."""
    store = registry.open_store(uri)
    names = list(journal.run_ids(store))

    def look(run_id: str) -> Row:
        return _guarded(Row(run_id, store.uri), lambda: _look(store, run_id, settings))

    unseen = [Row(run_id, store.uri, message=_late(within_s)) for run_id in names]
    rows = sorted(_answers(look, names, unseen, within_s), key=lambda row: -(row.at or 0.0))
    return rows[:limit], max(0, len(rows) - len(rows[:limit]))


def listing_table(rows: Sequence[Row], *, now: float) -> Table:
    """Run, state, replicas, backend, age, store."""
    columns = (
        Column("run"),
        Column("state"),
        Column("replicas"),
        Column("backend", is_spare=True),
        Column("age", is_right=True),
        Column("store", is_flexible=True, is_spare=True),
        Column("why", is_flexible=True),
    )
    drawn = tuple(
        (
            Cell(one_line(row.run_id), "bold"),
            Cell(row.state, STATE_STYLES[ReplicaState(row.state)] if row.state in set(ReplicaState) else "lost"),
            Cell(_short_counts(row)),
            Cell(row.executor),
            Cell("" if row.at is None else units.duration_text(now - row.at)),
            Cell(one_line(row.store), "dim"),
            Cell(one_line(row.message.partition("\n")[0])),
        )
        for row in rows
    )
    return Table(columns, drawn).without_empty_columns()


def _look(store: Store, run_id: str, settings: Config) -> Row:
    record = journal.read_run(store, run_id)
    spec = RunSpec.from_json(record["spec"])
    row = Row(run_id, store.uri, replicas=spec.placement.replicas, executor=record["executor"], at=record["created_at"])
    return _guarded(row, lambda: _with_status(row, spec, store, settings))


def _with_status(row: Row, spec: RunSpec, store: Store, settings: Config) -> Row:
    executor = registry.executor(row.executor, **settings.executor_settings(row.executor))
    status = Run(spec, executor, store, journal.read_handle(store, row.run_id)).status(progress=False)
    return replace(row, state=str(status.state), counts={str(s): count for s, count in status.counts().items()})


def _short_counts(row: Row) -> str:
    """Just the number where the state says the rest."""
    if len(row.counts) == 1:
        return str(sum(row.counts.values()))
    return ", ".join(f"{count} {state}" for state, count in row.counts.items())


def _guarded(unseen: Row, look: Callable[[], Row]) -> Row:
    """What could be learned; the reason where that is nothing."""
    try:
        return look()
    except RunNotFound as exc:
        return replace(unseen, state=GONE, message=exc.message)
    except AtollError as exc:
        return replace(unseen, message=exc.message)
    except Exception as exc:  # noqa: BLE001  one broken record or plug-in must not hide the other runs
        return replace(unseen, message=f"{type(exc).__name__}: {exc}")


def _answers(look: Callable[[Any], Row], items: Sequence[Any], unseen: Sequence[Row], within_s: float) -> list[Row]:
    found = ask_all(look, items, within_s=within_s)
    return [answer or late for answer, late in zip(found, unseen, strict=True)]


def _late(within_s: float) -> str:
    return f"no answer within {units.duration_text(within_s)}"


_SHOWN = 20


@command("Look", short_help="List runs: those started here, or those of a store.")
@click.option("--store", metavar="URI", help="List the runs of this store, whoever started them.")
@click.option("-a", "--all", "show_all", is_flag=True, help=f"All of them, not only the {_SHOWN} newest.")
@click.option("--timeout", type=duration, metavar="TIME", default="10s", help="Ask for at most this long.")
def ps_command(out: Output, store: str | None, show_all: bool, timeout: float) -> None:
    """List runs with their states, newest first.

    Without --store, those this machine has started. A run whose store or backend does not answer is shown as
    unreachable, with the reason.
    """
    settings, limit = config.load(), None if show_all else _SHOWN
    if store is None:
        rows, older = from_index(settings, limit, timeout)
    else:
        rows, older = from_store(store, settings, limit, timeout)
    out.data({"runs": [row.to_json() for row in rows], "older": older})
    if not rows:
        out.say("no runs yet: `atoll run module:function` starts one" if store is None else f"no runs in {store}")
        return
    out.text(table_text(listing_table(rows, now=time.time()), width=out.width(), colour=out.has_colour()))
    if older:
        out.say(f"… and {older} older: `atoll ps --all`")
