"""`atoll logs`: what replicas wrote; a tail by default, or as it comes.

Several streams of lines as one, each line as it comes.
"""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from queue import Queue
from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.launch_options import duration, ranks, run_argument, store_option
from atoll.cli.output import Output, encoded, styled
from atoll.cli.render import ending_lines, endings_json, silence_text
from atoll.cli.runs import find_run
from atoll.errors import AtollError, ConfigError
from atoll.runs.run import Run
from atoll.status import ReplicaStatus

_HELD = 10_000
"""Lines read ahead of a slow terminal, at most."""


def merged(streams: Mapping[int, Iterator[str]]) -> Iterator[tuple[int, str]]:
    """(rank, line) from every stream until all have ended. What goes wrong in one is raised here."""
    if len(streams) == 1:
        (rank, lines), *_ = streams.items()
        yield from ((rank, line) for line in lines)
        return
    queue: Queue[tuple[int, str | None, Exception | None]] = Queue(_HELD)
    for rank, lines in streams.items():
        threading.Thread(target=_pump, args=(rank, lines, queue), daemon=True, name=f"logs-{rank}").start()
    left = len(streams)
    while left:
        rank, line, error = queue.get()
        if error is not None:
            raise error
        if line is None:
            left -= 1
        else:
            yield rank, line


def _pump(rank: int, lines: Iterator[str], queue: Queue[tuple[int, str | None, Exception | None]]) -> None:
    try:
        for line in lines:
            queue.put((rank, line, None))
    except Exception as exc:  # noqa: BLE001  carried to the thread that reads
        queue.put((rank, None, exc))
    else:
        queue.put((rank, None, None))


_TAIL = 100
_MOST_FOLLOWED = 64
_COLOURS = ("busy", "good", "warn", "lost")


def _line_count(text: str) -> int:
    """A number of lines; `all` is -1."""
    if text != "all" and not text.isdecimal():
        raise click.BadParameter(f"`{text}`: a number of lines, or `all`.")
    return -1 if text == "all" else int(text)


@command("Look", short_help="Show what replicas wrote; -f follows.")
@run_argument
@store_option
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until the run is over.")
@click.option("--rank", default="all", metavar="K", help="Only these ranks: 2, or 0-3,7.  [default: all]")
@click.option(
    "--tail", type=_line_count, metavar="N", help=f"So many lines of each rank, or `all`.  [default: {_TAIL}]"
)
@click.option("--since", type=duration, metavar="TIME", help="Only what is younger than this, such as 10m.")
@click.option("--attempt", type=int, metavar="A", help="Only this attempt of restarted replicas, from 0.")
@click.option("--grep", metavar="RE", help="Only lines in which this is found.")
def logs_command(out: Output, run: str, store: str | None, follow: bool, rank: str, **options: Any) -> None:
    """Show the output of replicas, one rank after the other; with several ranks, each line begins with its rank.

    Works after the machines are gone: the store has what was sealed. With --since or --grep there is no tail unless
    you ask for one. On stderr: which ranks printed nothing, and how those ended that did not succeed.
    """
    found = find_run(run, store)
    chosen = ranks(rank, found.spec.placement.replicas)
    wanted = _Wanted(**options)
    if follow and len(chosen) > _MOST_FOLLOWED:
        raise ConfigError(
            f"{len(chosen)} ranks are too many to follow at once, {_MOST_FOLLOWED} is the most",
            hint=f"choose some: `--rank 0-{_MOST_FOLLOWED - 1}`",
        )
    if follow:
        lines = merged({k: wanted.lines(found, k, follow=True) for k in chosen})
    else:
        lines = ((k, line) for k in chosen for line in wanted.lines(found, k))
    counts: Counter[int] = Counter()
    _print(out, _counted(lines, counts), chosen, is_stream=follow)
    replicas = _replicas(found, chosen)
    out.data({"run_id": found.id, "ranks": endings_json(replicas, counts)})
    silent = [] if wanted.is_nothing else [k for k in chosen if not counts[k]]
    told = (
        silence_text(silent, is_narrowed=wanted.is_narrowed),
        *ending_lines(replicas, shlex.quote(found.id), time.time()),
    )
    for text in filter(None, told):
        out.say(text)


class _Wanted:
    """Which lines of a rank are wanted."""

    def __init__(self, tail: int | None, since: float | None, attempt: int | None, grep: str | None) -> None:
        self._pattern = _compiled(grep)
        if tail is None:
            tail = _TAIL if since is None and self._pattern is None else -1
        self._tail = None if tail < 0 else tail
        self._since = None if since is None else time.time() - since
        self._attempt = attempt

    @property
    def is_nothing(self) -> bool:
        return self._tail == 0

    @property
    def is_narrowed(self) -> bool:
        """Whether a rank may have printed more than is wanted, and nothing of what is."""
        return any(word is not None for word in (self._pattern, self._since, self._attempt))

    def lines(self, run: Run, rank: int, *, follow: bool = False) -> Iterator[str]:
        pattern = self._pattern
        # A tail of matching lines needs all lines; while following, the tail is only where to begin.
        tail = self._tail if pattern is None or follow else None
        found: Iterable[str] = run.logs(rank, tail=tail, follow=follow, since=self._since, attempt=self._attempt)
        if pattern is not None:
            found = (line for line in found if pattern.search(line))
            if self._tail is not None and not follow:
                found = deque(found, maxlen=self._tail)
        yield from found


def _compiled(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as exc:
        raise ConfigError(f"--grep {grep}: not a regular expression: {exc}") from exc


def _counted(lines: Iterable[tuple[int, str]], counts: Counter[int]) -> Iterator[tuple[int, str]]:
    for rank, line in lines:
        counts[rank] += 1
        yield rank, line


def _replicas(run: Run, chosen: Iterable[int]) -> list[ReplicaStatus]:
    """How those ranks are. A backend that does not answer is no reason to fail: the lines are what was asked for."""
    try:
        status = run.status(progress=False)
    except AtollError:
        return []
    return [status.replicas[rank] for rank in chosen]


def _print(out: Output, lines: Iterable[tuple[int, str]], chosen: list[int], *, is_stream: bool) -> None:
    """Written as bytes, so that nothing a replica prints can break it; flushed line by line only when following."""
    if out.is_json:
        for rank, line in lines:
            out.event("line", {"rank": rank, "line": line})
        return
    width, colour = len(str(chosen[-1])), out.has_colour()
    prefixes = {k: styled(f"{k:>{width}} |", _COLOURS[k % len(_COLOURS)], colour=colour) + " " for k in chosen}
    if len(chosen) == 1:
        prefixes = {chosen[0]: ""}
    sink = sys.stdout.buffer
    for rank, line in lines:
        sink.write(encoded(f"{prefixes[rank]}{line}\n"))
        if is_stream:
            sink.flush()
    sink.flush()
