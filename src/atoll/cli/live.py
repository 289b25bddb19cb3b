"""The live table of `atoll run` and `status --watch`, drawn with rich on a terminal. Loaded only there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from atoll import durations
from atoll.cli.output import Output
from atoll.cli.render import STATE_STYLES, counts_text, elapsed_s, live_table
from atoll.cli.text import Table
from atoll.status import RunStatus

RICH = {
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "busy": "cyan",
    "lost": "magenta",
    "dim": "dim",
    "bold": "bold",
}
_AROUND = 7
"""Lines of the live view that are not ranks."""


@contextmanager
def live_view(run_id: str, out: Output) -> Iterator[Callable[[RunStatus], None]]:
    """A table on stderr that is redrawn; gone afterwards, so that what is printed next stands alone."""
    console = Console(stderr=True, no_color=not out.has_colour(on_stderr=True), highlight=False)
    latest: list[RunStatus] = []

    def picture() -> RenderableType:
        return _picture(run_id, latest[-1], console.height) if latest else Text(f"{run_id}  asking …", style="dim")

    def show(status: RunStatus) -> None:
        latest[:] = [status]
        live.refresh()

    with Live(console=console, get_renderable=picture, refresh_per_second=4, transient=True) as live:
        yield show


def rich_table(table: Table) -> RichTable:
    """One of our tables as one of rich's: no lines, flexible columns take what is left."""
    drawn = RichTable(box=None, pad_edge=False, header_style="dim", expand=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        drawn.add_column(
            column.title,
            justify="right" if column.is_right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if column.is_flexible else None,
        )
    for row in table.rows:
        drawn.add_row(*(Text(cell.text, style=RICH.get(cell.style, "")) for cell in row))
    return drawn


def headline(run_id: str, status: RunStatus, now: float) -> Text:
    """Run, state, time, counts."""
    took = elapsed_s(status, now)
    return Text.assemble(
        (run_id, "bold"),
        "  ",
        (str(status.state), RICH[STATE_STYLES[status.state]]),
        f"  {durations.text(took)}" if took is not None else "",
        (f"  {counts_text(status)}", "dim"),
    )


def _picture(run_id: str, status: RunStatus, height: int) -> RenderableType:
    room = max(1, height - _AROUND)
    hidden = len(status.replicas) - room
    parts: list[RenderableType] = [
        Text(),
        headline(run_id, status, time.time()),
        rich_table(live_table(status, limit=room)),
    ]
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more ranks: `atoll status {run_id}`", style="dim"))
    parts.append(Text())
    parts.append(Text("Ctrl-C detaches; the run goes on", style="dim"))
    return Group(*parts)
