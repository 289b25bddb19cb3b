"""The rows of `atoll ps`: from the local index or a store, each asked how it is; those out of reach say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from atoll import journal, registry, units
from atoll.cli.parallel import ask_all
from atoll.cli.render import STATE_STYLES
from atoll.cli.text import Cell, Column, Table, one_line
from atoll.errors import AtollError, RunNotFound
from atoll.runs import index
from atoll.runs.config import Config
from atoll.runs.run import Run
from atoll.spec import RunSpec
from atoll.status import ReplicaState
from atoll.stores.base import Store

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
