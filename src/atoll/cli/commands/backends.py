"""`atoll backends`: what is registered, what it can do, and whether it would load."""

from __future__ import annotations

from dataclasses import asdict

from atoll.cli.adapters import Adapter, adapters
from atoll.cli.app import command
from atoll.cli.output import Output
from atoll.cli.text import Cell, Column, Table, one_line, table_text

_STYLES = {"ready": "good", "not installed": "warn", "broken": "bad"}


@command("Set up", short_help="List backends and stores: what they can do, what they need.")
def backends_command(out: Output) -> None:
    """List every executor and store, built in or added by a package, and whether it would load here."""
    found = adapters()
    out.data({"adapters": [asdict(adapter) for adapter in found]})
    for kind in ("executor", "store"):
        rows = tuple(_row(adapter) for adapter in found if adapter.kind == kind)
        columns = (Column(kind), Column("state"), Column("extra"), Column("notes", is_flexible=True))
        table = Table(columns, rows).without_empty_columns()
        out.text(table_text(table, width=out.width(), colour=out.has_colour()) + ("\n" if kind == "executor" else ""))


def _row(adapter: Adapter) -> tuple[Cell, ...]:
    notes = adapter.problem or "; ".join(adapter.can)
    return (
        Cell(adapter.name, "bold"),
        Cell(adapter.state, _STYLES[adapter.state]),
        Cell(f"atoll[{adapter.extra}]" if adapter.extra else "", "dim"),
        Cell(one_line(notes)),
    )
