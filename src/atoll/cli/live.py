"""The views that are redrawn on a terminal, with rich: the live table of `run` and `status --watch`, and `atoll top`.

Loaded only when there is a terminal, because rich is slow to import.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from atoll import units
from atoll.cli.background import merged
from atoll.cli.output import Output, Table, table_text
from atoll.cli.phases import legend, phases_table
from atoll.cli.render import (
    STATE_STYLES,
    Rounds,
    counts_text,
    elapsed_s,
    live_table,
    metric_names,
    most_important,
    problems_text,
    top_table,
)
from atoll.cli.waits import advice_text, outlook_text, waiting_text
from atoll.cli.watch import OutageReporter, RoundPoller, View
from atoll.errors import AtollError
from atoll.rounds.metrics import Waiting
from atoll.rounds.timeline import RoundRecord
from atoll.runs.cost import Cost
from atoll.runs.parts import place_text
from atoll.runs.run import Run, could_restart, watched
from atoll.status import RunStatus

RICH_STYLES = {
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "busy": "cyan",
    "lost": "magenta",
    "dim": "dim",
    "bold": "bold",
}
_FIXED_LINES = 6
"""Lines of a view besides the rows of ranks and the lines below the table."""
_PHASES_FIXED_LINES = 3
"""Lines of the table of phases besides its rows."""
_STATUS_EVERY_S = 1.0
_QUIT_KEYS = ("q", "Q", "\x1b", "\x04")
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_view(run: Run, out: Output) -> Iterator[View]:
    """A table on stderr that is redrawn, and erased at the end so that the final output stands alone."""
    console = Console(stderr=True, no_color=not out.has_colour(on_stderr=True), highlight=False)
    latest: list[tuple[RunStatus, Waiting | None]] = []
    poller, outage = RoundPoller(run), OutageReporter()

    def picture() -> RenderableType:
        if not latest:
            return Text(f"{run.id}  {outage.text or 'asking for the status …'}", style="dim")
        return _live_picture(run, *latest[-1], outage.text, console)

    def on_change(status: RunStatus) -> None:
        latest[:] = [(status, poller.waiting(status))]
        live.refresh()

    def on_trouble(error: AtollError | None) -> None:
        outage.report(error)
        live.refresh()

    with Live(console=console, get_renderable=picture, refresh_per_second=4, transient=True) as live:
        yield View(on_change, on_trouble)


def show_top(run: Run, first: RunStatus, poller: RoundPoller, out: Output) -> RunStatus:
    """Draw the full-screen view until `q` or Ctrl-C, and return the last status.

    Statuses and keys are read in threads, so a slow backend delays neither the keys nor the drawing.
    """
    console = Console(no_color=not out.has_colour(), highlight=False)
    seen, trend, outage = _Observation(first), Trend(), OutageReporter()

    def picture() -> RenderableType:
        return _top_picture(run, seen, trend, outage.text, console)

    try:
        with (
            single_keys() as keys,
            Live(console=console, get_renderable=picture, screen=True, refresh_per_second=4),
        ):
            for _, item in merged({"keys": keys, "status": _observations(run, first, poller)}):
                if isinstance(item, _Observation):
                    seen = item
                    outage.report(seen.error)
                    for name in metric_names(seen.status)[:1]:
                        trend.add(seen.status, name)
                elif item in _QUIT_KEYS:
                    break
    except KeyboardInterrupt:
        pass
    return seen.status


class _Observation(NamedTuple):
    """What `top` knows about the run at one moment."""

    status: RunStatus
    waiting: Waiting | None = None
    records: Mapping[int, RoundRecord] = {}
    error: AtollError | None = None
    """Why the status could not be read again."""
    cost: Cost | None = None


def _observations(run: Run, status: RunStatus, poller: RoundPoller) -> Iterator[_Observation]:
    """The run every second, and when something changes, until it has ended."""
    error: AtollError | None = None
    with watched(run) as (same, pause):
        while True:
            records, cost = poller.records(refresh=status.is_terminal), run.cost(status)
            yield _Observation(status, poller.waiting(status), records, error, cost)
            if status.is_terminal:
                return
            pause(_STATUS_EVERY_S)
            try:
                status, error = same.status(), None
            except AtollError as exc:
                error = exc


@contextmanager
def single_keys() -> Iterator[Iterator[str]]:
    """The keys that are pressed, without Enter; an iterator that waits forever where there is no keyboard."""
    if os.name != "posix" or sys.stdin is None or not sys.stdin.isatty():
        yield _no_keys()
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _keys(descriptor: int) -> Iterator[str]:
    while True:
        select.select([descriptor], [], [])
        yield os.read(descriptor, 32).decode(errors="replace") or "q"  # empty: the terminal was closed


def _no_keys() -> Iterator[str]:
    threading.Event().wait()
    yield from ()


class Trend:
    """The last values of one metric, for each rank."""

    def __init__(self, width: int = 16) -> None:
        self._width = width
        self._values: dict[int, deque[float]] = {}
        self._last: dict[int, object] = {}

    def add(self, status: RunStatus, metric: str) -> None:
        """Add the values that have changed since the last status."""
        for replica in status.replicas:
            progress = replica.progress
            now = (progress.round_no, progress.metrics.get(metric), replica.attempt)
            if metric in progress.metrics and self._last.get(replica.rank) != now:
                self._last[replica.rank] = now
                self._values.setdefault(replica.rank, deque(maxlen=self._width)).append(progress.metrics[metric])

    def bars(self, rank: int) -> str:
        return bars(self._values.get(rank, ()))


def bars(values: Sequence[float] | deque[float]) -> str:
    """One bar per value, scaled between the lowest and the highest; `×` for a value that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "×"
        return _BARS[round((value - low) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0]

    return "".join(map(bar, values))


def _live_picture(run: Run, status: RunStatus, waiting: Waiting | None, outage: str, console: Console) -> Group:
    now = time.time()
    below = _lines_below(run, status, waiting, outage, now, console)
    rows = max(1, console.height - _FIXED_LINES - len(below))
    hidden = len(status.replicas) - rows
    parts: list[RenderableType] = [
        Text(),
        _headline(run.id, status, now),
        _drawn(live_table(status, limit=rows), console),
    ]
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more ranks: `atoll status {run.id}`", style="dim"))
    return Group(*parts, *below, Text("Ctrl-C detaches; the run continues", style="dim"))


def _top_picture(run: Run, seen: _Observation, trend: Trend, outage: str, console: Console) -> Group:
    status, now = seen.status, time.time()
    below = _lines_below(run, status, seen.waiting, outage, now, console)
    rows = max(1, console.height - _FIXED_LINES - len(below))
    phases_lines = _phases_lines(len(seen.records), len(status.replicas), rows)
    rows -= phases_lines
    hidden = len(status.replicas) - rows
    parts: list[RenderableType] = [
        _headline(run.id, status, now, seen.cost),
        Text(f"{run.spec.task.title} on {_place(run)}, {run.store.uri}", style="dim", no_wrap=True),
        Text(),
        _drawn(top_table(status, now=now, bars=trend.bars, limit=rows), console),
    ]
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more ranks", style="dim"))
    if phases_lines:
        ranks = [r.rank for r in most_important(status.replicas, phases_lines - _PHASES_FIXED_LINES)]
        table = phases_table(seen.records, ranks, now=None if status.is_terminal else now)
        parts += [Text(), _drawn(table, console), Text(legend(table, console.width), style="dim", no_wrap=True)]
    return Group(*parts, *below, Text("q quits" + ("" if status.is_terminal else "; the run continues"), style="dim"))


def _phases_lines(records: int, replicas: int, lines: int) -> int:
    """How many of `lines` the table of phases gets: all it needs if both tables fit, otherwise at most half."""
    wanted = records + _PHASES_FIXED_LINES
    given = wanted if wanted + replicas <= lines else min(wanted, lines // 2)
    return given if records and given > _PHASES_FIXED_LINES else 0


def _headline(run_id: str, status: RunStatus, now: float, cost: Cost | None = None) -> Text:
    """Run, state, time, counts, rounds, cost."""
    took, rounds = elapsed_s(status, now), str(Rounds.of(status))
    return Text.assemble(
        (run_id, "bold"),
        "  ",
        (str(status.state), RICH_STYLES[STATE_STYLES[status.state]]),
        f"  {units.duration_text(took)}" if took is not None else "",
        (f"  {counts_text(status)}", "dim"),
        f"  round {rounds}" if rounds else "",
        f"  {cost}" if cost is not None else "",
    )


def _drawn(table: Table, console: Console) -> Text:
    """The table, laid out by `table_text`: rich would shorten every column, and `table_text` drops the spare ones."""
    text = Text.from_ansi(table_text(table, width=console.width, colour=not console.no_color))
    text.no_wrap, text.overflow = True, "crop"
    return text


def _lines_below(
    run: Run, status: RunStatus, waiting: Waiting | None, outage: str, now: float, console: Console
) -> list[RenderableType]:
    """The lines below the table: the outage while there is one, otherwise full disks and what the round waits for."""
    if outage:
        return list(Text(outage, style="red").wrap(console, console.width))
    problems = problems_text(status)
    above = list(Text(problems, style="red").wrap(console, console.width)) if problems else []
    restarts = could_restart(run.spec, run.executor)
    return [*above, *waiting_lines(run.id, status, waiting, now, console, could_restart=restarts)]


def waiting_lines(
    run_id: str,
    status: RunStatus,
    waiting: Waiting | None,
    now: float,
    console: Console,
    *,
    could_restart: bool = False,
) -> list[RenderableType]:
    """What the round waits for, what happens next, and what to do. Wrapped, never cut: users copy the commands."""
    texts = (
        waiting_text(waiting, status, now),
        outlook_text(waiting, status, run_id, now),
        advice_text(waiting, status, could_restart=could_restart),
    )
    shown = [Text(text, style="yellow") for text in texts if text]
    return [line for text in shown for line in text.wrap(console, console.width)] or [Text()]


def _place(run: Run) -> str:
    return place_text(run.spec, run.executor)
