"""The full-screen view of `atoll top`, drawn with rich. Loaded only on a terminal.

A thread asks for the status, so that a slow backend never makes the keys slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from atoll.cli.keys import key_presses
from atoll.cli.live import drawn, headline, trouble_lines, waiting_lines
from atoll.cli.lookout import Lookout
from atoll.cli.metrics import metric_names
from atoll.cli.outage import Outage
from atoll.cli.output import Output
from atoll.cli.phases import legend, phases_table
from atoll.cli.render import most_telling, top_table
from atoll.cli.trend import Trend
from atoll.errors import AtollError
from atoll.rounds.metrics import Waiting
from atoll.rounds.timeline import RoundRecord
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus

_AROUND = 6
"""Lines of the screen that are neither ranks nor what they wait for."""
_PHASES_AROUND = 3
"""Lines around the phases of each rank."""
_ASK_EVERY_S = 1.0


class Watcher:
    """Asks a run how it is, again and again, in a thread of its own."""

    def __init__(self, run: Run, first: RunStatus, lookout: Lookout) -> None:
        self._run, self._lookout = run, lookout
        self.status, self.outage = first, Outage()
        self.waiting: Waiting | None = None
        self.records: dict[int, RoundRecord] = {}
        self.trend = Trend()
        self._see(first)
        self._stop = threading.Event()

    @contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask, daemon=True, name="status")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()

    def _ask(self) -> None:
        self._look()
        while not self.status.is_terminal and not self._stop.wait(_ASK_EVERY_S):
            try:
                self._see(self._run.status())
            except AtollError as exc:
                self.outage.hear(exc)
            self._look()
        self.records = self._lookout.records(anew=True)

    def _see(self, status: RunStatus) -> None:
        for name in metric_names(status)[:1]:
            self.trend.see(status, name)
        self.status = status
        self.outage.hear(None)

    def _look(self) -> None:
        self.waiting = self._lookout.waiting(self.status)
        self.records = self._lookout.records()


def show(run: Run, first: RunStatus, lookout: Lookout, out: Output) -> RunStatus:
    """Draw until `q` or Ctrl-C; returns what was seen last."""
    console = Console(no_color=not out.has_colour(), highlight=False)
    watcher = Watcher(run, first, lookout)

    def picture() -> RenderableType:
        return _picture(run, watcher, console)

    try:
        with (
            watcher.asking(),
            key_presses() as key,
            Live(console=console, get_renderable=picture, screen=True, refresh_per_second=4),
        ):
            while key(0.5) not in ("q", "Q", "\x1b", "\x04"):
                continue
    except KeyboardInterrupt:
        pass
    return watcher.status


def _picture(run: Run, watcher: Watcher, console: Console) -> RenderableType:
    status, now = watcher.status, time.time()
    trouble = watcher.outage.text
    restarts = could_restart(run.spec, run.executor)
    below = trouble_lines(trouble, console)
    below = below or waiting_lines(run.id, status, watcher.waiting, now, console, could_restart=restarts)
    room = max(1, console.height - _AROUND - len(below))
    phases_room = _phases_room(watcher, room)
    room -= phases_room
    hidden = len(status.replicas) - room
    parts: list[RenderableType] = [
        headline(run.id, status, now),
        Text(f"{run.spec.task.entry} on {run.executor.name}, {run.store.uri}", style="dim", no_wrap=True),
        Text(),
        drawn(top_table(status, now=now, bars=watcher.trend.bars, limit=room), console),
    ]
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more ranks", style="dim"))
    if phases_room:
        ranks = [r.rank for r in most_telling(status.replicas, phases_room - _PHASES_AROUND)]
        table = phases_table(watcher.records, ranks, now=None if status.is_terminal else now)
        parts += [Text(), drawn(table, console), Text(legend(table, console.width), style="dim", no_wrap=True)]
    parts += below
    parts.append(Text("q leaves" + ("" if status.is_terminal else "; the run goes on"), style="dim"))
    return Group(*parts)


def _phases_room(watcher: Watcher, room: int) -> int:
    """Lines for the phases: as many as there are ranks if all fits, at most half of the screen, none if that is few."""
    wanted = len(watcher.records) + _PHASES_AROUND
    given = wanted if wanted + len(watcher.status.replicas) <= room else min(wanted, room // 2)
    return given if watcher.records and given > _PHASES_AROUND else 0
