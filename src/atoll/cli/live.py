"""The live table of `atoll run` and `status --watch`, drawn with rich on a terminal. Loaded only there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from atoll import units
from atoll.cli.output import Output, Table, table_text
from atoll.cli.render import STATE_STYLES, counts_text, elapsed_s, live_table
from atoll.cli.waits import avoid_text, outlook_text, waiting_text
from atoll.cli.watch import OutageReporter, RoundPoller, View
from atoll.errors import AtollError
from atoll.rounds.metrics import Waiting
from atoll.runs.run import Run, could_restart
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
_AROUND = 6
"""Lines of the live view that are neither ranks nor what they wait for."""


@contextmanager
def live_view(run: Run, out: Output) -> Iterator[View]:
    """A table on stderr that is redrawn; gone afterwards, so that what is printed next stands alone."""
    console = Console(stderr=True, no_color=not out.has_colour(on_stderr=True), highlight=False)
    latest: list[tuple[RunStatus, Waiting | None]] = []
    lookout, outage = RoundPoller(run), OutageReporter()

    def picture() -> RenderableType:
        if not latest:
            return Text(f"{run.id}  {outage.text or 'asking …'}", style="dim")
        return _picture(run, *latest[-1], outage.text, console)

    def show(status: RunStatus) -> None:
        latest[:] = [(status, lookout.waiting(status))]
        live.refresh()

    def hear(error: AtollError | None) -> None:
        outage.hear(error)
        live.refresh()

    with Live(console=console, get_renderable=picture, refresh_per_second=4, transient=True) as live:
        yield View(show, hear)


def drawn(table: Table, console: Console) -> Text:
    """One of our tables, laid out by us: rich would cut every column of a narrow terminal, we know which may go."""
    text = Text.from_ansi(table_text(table, width=console.width, colour=not console.no_color))
    text.no_wrap, text.overflow = True, "crop"
    return text


def headline(run_id: str, status: RunStatus, now: float) -> Text:
    """Run, state, time, counts."""
    took = elapsed_s(status, now)
    return Text.assemble(
        (run_id, "bold"),
        "  ",
        (str(status.state), RICH[STATE_STYLES[status.state]]),
        f"  {units.duration_text(took)}" if took is not None else "",
        (f"  {counts_text(status)}", "dim"),
    )


def waiting_lines(
    run_id: str,
    status: RunStatus,
    waiting: Waiting | None,
    now: float,
    console: Console,
    *,
    could_restart: bool = False,
) -> list[RenderableType]:
    """Whom the round waits for, and what comes of it, whole: a command that is cut is of no use. One line at least."""
    outlook = outlook_text(waiting, status, run_id, now)
    told = waiting_text(waiting, status, now), outlook, avoid_text(waiting, status, could_restart=could_restart)
    texts = [Text(text, style="yellow") for text in told if text]
    return [line for text in texts for line in text.wrap(console, console.width)] or [Text()]


def trouble_lines(text: str, console: Console) -> list[RenderableType]:
    """That nobody answers, whole; no line if that is not so."""
    return list(Text(text, style="red").wrap(console, console.width)) if text else []


def _picture(run: Run, status: RunStatus, waiting: Waiting | None, trouble: str, console: Console) -> RenderableType:
    now, restarts = time.time(), could_restart(run.spec, run.executor)
    below = trouble_lines(trouble, console)
    below = below or waiting_lines(run.id, status, waiting, now, console, could_restart=restarts)
    room = max(1, console.height - _AROUND - len(below))
    hidden = len(status.replicas) - room
    parts: list[RenderableType] = [
        Text(),
        headline(run.id, status, now),
        drawn(live_table(status, limit=room), console),
    ]
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more ranks: `atoll status {run.id}`", style="dim"))
    parts += below
    parts.append(Text("Ctrl-C detaches; the run goes on", style="dim"))
    return Group(*parts)
