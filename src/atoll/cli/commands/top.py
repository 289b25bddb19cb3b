"""`atoll top`: a run on the whole screen.

Single key presses from a terminal, without waiting for Enter.

How a metric went, from the statuses that were seen: one small line of bars per rank. Pure.

The full-screen view of `atoll top`, drawn with rich. Loaded only on a terminal.

A thread asks for the status, so that a slow backend never makes the keys slow.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from atoll.cli.app import command
from atoll.cli.commands.status import status_text
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.live import drawn, headline, trouble_lines, waiting_lines
from atoll.cli.output import Output, table_text
from atoll.cli.phases import legend, phases_table, round_json
from atoll.cli.render import counts_text, metric_names, most_telling, status_json, top_table
from atoll.cli.runs import find_run
from atoll.cli.watch import OutageReporter, RoundPoller
from atoll.errors import AtollError
from atoll.rounds.metrics import Waiting
from atoll.rounds.timeline import RoundRecord
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus


@contextmanager
def key_presses() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or nothing. Harmless where there are no keys."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system
        yield _no_key
        return
    if sys.stdin is None or not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda wait_s: _key(descriptor, wait_s)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(descriptor: int, wait_s: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], wait_s)
    if not ready:
        return ""
    data = os.read(descriptor, 32)
    return data.decode(errors="replace") or "q"  # the terminal is gone


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


_BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """Remembers the last values of one metric, rank by rank."""

    def __init__(self, width: int = 16) -> None:
        self._width = width
        self._seen: dict[int, deque[float]] = {}
        self._last: dict[int, object] = {}

    def see(self, status: RunStatus, metric: str) -> None:
        """Take note of what is new."""
        for replica in status.replicas:
            progress = replica.progress
            now = (progress.round_no, progress.metrics.get(metric), replica.attempt)
            if metric in progress.metrics and self._last.get(replica.rank) != now:
                self._last[replica.rank] = now
                self._seen.setdefault(replica.rank, deque(maxlen=self._width)).append(progress.metrics[metric])

    def bars(self, rank: int) -> str:
        return bars(self._seen.get(rank, ()))


def bars(values: Sequence[float] | deque[float]) -> str:
    """One bar per value between the lowest and the highest; `×` for a value that is not a number."""
    finite = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "×"
        return _BARS[round((value - low) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0]

    return "".join(map(bar, values))


_AROUND = 6
"""Lines of the screen that are neither ranks nor what they wait for."""
_PHASES_AROUND = 3
"""Lines around the phases of each rank."""
_ASK_EVERY_S = 1.0


class Watcher:
    """Asks a run how it is, again and again, in a thread of its own."""

    def __init__(self, run: Run, first: RunStatus, lookout: RoundPoller) -> None:
        self._run, self._lookout = run, lookout
        self.status, self.outage = first, OutageReporter()
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


def show(run: Run, first: RunStatus, lookout: RoundPoller, out: Output) -> RunStatus:
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


@command("Look", short_help="Watch a run on the whole screen; q leaves.")
@run_argument
@store_option
def top_command(out: Output, run: str, store: str | None) -> None:
    """Watch every rank live: state, round, metrics with their trend, heartbeat, last line; and of its last finished
    round, where the time went: computing, the phases of the exchange, how much of it stood in the way, bytes, requests.

    q or Ctrl-C leaves, and the run goes on. Where there is no terminal, one snapshot is printed.
    """
    found = find_run(run, store)
    status, lookout = found.status(), RoundPoller(found)
    if out.is_screen:
        status = show(found, status, lookout, out)
        out.say(f"run `{found.id}`: {counts_text(status)}")
    else:
        now = None if status.is_terminal else time.time()
        out.text(status_text(found, status, out, lookout.waiting(status)) + _rounds_text(lookout.records(), now, out))
    rounds = {str(rank): round_json(record) for rank, record in sorted(lookout.records().items())}
    out.data({**status_json(found.id, status, lookout.waiting(status)), "rounds": rounds})


def _rounds_text(records: dict[int, RoundRecord], now: float | None, out: Output) -> str:
    if not records:
        return ""
    table = phases_table(records, sorted(records), now=now).without_empty_columns()
    return "\n\nlast round of each rank:\n" + table_text(table, width=out.width(), colour=out.has_colour())
