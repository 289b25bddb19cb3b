"""The phases of each rank's last round as a table: `atoll top` shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll import units
from atoll.cli.output import Cell, Column, Table
from atoll.cli.render import percent
from atoll.rounds.timeline import PHASES, RoundRecord

LETTERS = {"compute": "c", "encode": "e", "put": "p", "wait": "w", "get": "g", "reduce": "r", "apply": "a"}
LEGEND = "shape: " + ", ".join(f"{letter} {name}" for name, letter in LETTERS.items()) + ", - none of these"
_WIDTH = 24


def phases_table(records: Mapping[int, RoundRecord], ranks: Sequence[int], *, now: float | None = None) -> Table:
    """One row per rank: the last recorded round, its time, its phases as shares, bytes and requests.

    A phase is a share of the time from the first inner step to the outer step, and the exposed time of what the round
    took; both are equal unless training goes on during the exchange.

    With `now` also the time since that round ended: replicas write several short rounds at once, so newer rounds may
    have ended.
    """
    columns = (
        Column("rank", is_right=True),
        Column("last round", is_right=True),
        *([] if now is None else [Column("ago", is_right=True, is_spare=True)]),
        Column("took", is_right=True),
        Column("shape", is_spare=True),
        *(Column(name, is_right=True, is_spare=name not in ("compute", "wait")) for name in PHASES),
        Column("exposed", is_right=True),
        Column("hidden", is_right=True),
        Column("up", is_right=True),
        Column("down", is_right=True),
        Column("requests", is_right=True, is_spare=True),
        Column("retries", is_right=True, is_spare=True),
    )
    return Table(columns, tuple(_row(records[rank], now) for rank in ranks if rank in records))


def legend(table: Table, width: int) -> str:
    """The meaning of the letters; empty if the table is too wide to have the column."""
    return LEGEND if any(column.title == "shape" for column in table.fitted(width).columns) else ""


def round_json(record: RoundRecord) -> dict[str, Any]:
    """A record for programs: without its intervals, with the computed shares."""
    data = record.to_json()
    for phase in data["phases"].values():
        del phase["spans_us"]
    return {**data, "total_s": round(record.total_s, 6), "hidden_share": round(record.hidden_share, 6)}


def shape(record: RoundRecord, width: int = _WIDTH) -> str:
    """The round as letters from its first inner step to its outer step: for each slice of time the longest phase."""
    spans = [(at, at + lasted, name) for name, phase in record.phases.items() for at, lasted in phase.spans]
    first, last = _extent(record)
    slice_s = (last - first) / width
    if slice_s <= 0:
        return ""
    letters = ""
    for number in range(width):
        began, ended = first + number * slice_s, first + (number + 1) * slice_s
        shares: dict[str, float] = {}
        for span_began, span_ended, name in spans:
            shares[name] = shares.get(name, 0.0) + max(0.0, min(ended, span_ended) - max(began, span_began))
        name = max(shares, key=lambda name: shares[name], default="")
        letters += LETTERS.get(name, "o") if name and shares[name] > 0 else "-"
    return letters


def _extent(record: RoundRecord) -> tuple[float, float]:
    """From the first inner step to the outer step, counted from the begin of the exchange."""
    spans = [span for phase in record.phases.values() for span in phase.spans]
    first = min([0.0, *(at for at, _ in spans)])
    return first, max([record.exchange_s, *(at + lasted for at, lasted in spans)])


def _row(record: RoundRecord, now: float | None) -> tuple[Cell, ...]:
    total_s = record.total_s
    # An exchange that overlaps with the training of the next round may take longer than this round did.
    first, last = _extent(record)
    whole_s = max(total_s, last - first)

    def share(seconds: float, of_s: float = whole_s) -> str:
        return percent(min(1.0, seconds / of_s)) if of_s > 0 else ""

    return (
        Cell(str(record.rank), "bold"),
        Cell(str(record.round_no) + ("" if record.is_over else "?"), "" if record.is_over else "bad"),
        *([] if now is None else [Cell(units.duration_text(now - record.time - record.exchange_s), "dim")]),
        Cell(seconds_text(total_s)),
        Cell(shape(record), "busy"),
        *(Cell(share(record.wall_s(name)) if name in record.phases else "") for name in PHASES),
        Cell(share(record.exposed_s, total_s), "warn" if total_s > 0 and record.exposed_s > total_s / 2 else ""),
        Cell(percent(record.hidden_share)),
        Cell(units.size_text(record.bytes_up)),
        Cell(units.size_text(record.bytes_down)),
        Cell(str(sum(record.requests.values()))),
        Cell(str(record.retries) if record.retries else "", "warn"),
    )


def seconds_text(seconds: float) -> str:
    """Such as `830ms`, `3.2s`, `95s`, `12m`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if seconds < 300:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.1f}h"
