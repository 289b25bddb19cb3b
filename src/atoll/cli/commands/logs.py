"""`atoll logs`: the output of replicas, the last lines by default or all lines as they come."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.background import merged
from atoll.cli.launch_options import duration, launch_option, rank_option, ranks, run_argument, store_option
from atoll.cli.output import Output, encoded, one_line, styled
from atoll.cli.render import ending_lines, endings_json, held_text, link_lines, no_output_text
from atoll.cli.runs import find_run, replica_links
from atoll.errors import AtollError, ConfigError
from atoll.runs.run import Run
from atoll.status import ReplicaStatus
from atoll.terminal_text import shown_line

log = logging.getLogger("atoll.cli")
_TAIL = 100
_MOST_FOLLOWED = 64
_BARS_EVERY_S = 3.0
_COLOURS = ("busy", "good", "warn", "lost")


def _line_count(text: str) -> int:
    """A number of lines; `all` is -1."""
    if text != "all" and not text.isdecimal():
        raise click.BadParameter(f"`{text}`: write a number of lines, or `all`.")
    return -1 if text == "all" else int(text)


@command("Look", short_help="Show the output of replicas; -f follows it.")
@run_argument
@store_option
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run has ended.")
@rank_option(default="all", help="Only these ranks: 2, or 0-3,7.  [default: all]")
@click.option(
    "--tail", type=_line_count, metavar="N", help=f"The last N lines of each rank, or `all`.  [default: {_TAIL}]"
)
@click.option("--since", type=duration, metavar="TIME", help="Only lines from this long ago until now, such as 10m.")
@click.option("--attempt", type=int, metavar="A", help="Only this attempt of restarted replicas, from 0.")
@click.option("--grep", metavar="RE", help="Only lines that match this regular expression.")
@launch_option
def logs_command(
    out: Output, run: str, store: str | None, follow: bool, rank: str, launch: int | None, **options: Any
) -> None:
    """Show the output of replicas, one rank after the other; with several ranks, each line begins with its rank.

    Works after the machines are gone, because replicas upload their output to the store. With --since or --grep, all
    matching lines are shown unless --tail is given. On stderr: the ranks that printed nothing, what replicas wait for,
    how those ended that did not succeed, and the web pages of the backend about them.
    """
    found = find_run(run, store, launch)
    chosen = ranks(rank, found.spec.placement.replicas)
    selection = _Selection(**options)
    if follow and len(chosen) > _MOST_FOLLOWED:
        raise ConfigError(
            f"cannot follow {len(chosen)} ranks at once, at most {_MOST_FOLLOWED}",
            hint=f"choose some of them: `--rank 0-{_MOST_FOLLOWED - 1}`",
        )
    if follow:
        lines = _followed(
            found,
            {k: selection.lines(found, k, follow=True) for k in chosen},
            bars=out.is_screen and not selection.is_filtered,
        )
    else:
        lines = ((k, line) for k in chosen for line in selection.lines(found, k))
    counts = _print(out, lines, chosen, is_stream=follow)
    replicas = _replicas(found, chosen)
    links = replica_links(found, chosen)
    out.data({"run_id": found.id, "ranks": endings_json(replicas, counts, links)})
    without_output = [] if selection.is_empty else [k for k in chosen if not counts[k]]
    notes = (
        no_output_text(without_output, is_filtered=selection.is_filtered),
        held_text(replicas),
        *ending_lines(replicas, shlex.quote(found.id), time.time()),
        *link_lines(links, shlex.quote(found.id)),
    )
    for note in filter(None, notes):
        out.say(note)


def _followed(run: Run, streams: dict[int, Iterator[str]], *, bars: bool) -> Iterator[tuple[int, str]]:
    """The lines of all ranks as they come; with `bars`, every few seconds also the lines that have not ended yet."""
    ended = threading.Event()
    left = set(streams)

    def until_end(rank: int) -> Iterator[tuple[int, str]]:
        for line in streams[rank]:
            yield rank, line
        left.discard(rank)
        if not left:
            ended.set()

    sources = {str(rank): until_end(rank) for rank in streams}
    if bars:
        sources["bars"] = _open_lines(run, left, ended)
    shown: dict[int, str] = {}
    for source, (rank, line) in merged(sources):
        # A bar that was shown with the same text does not appear again when its line ends.
        if shown.pop(rank, None) != one_line(line) or source == "bars":
            yield rank, line
        if source == "bars":
            shown[rank] = one_line(line)


def _open_lines(run: Run, ranks: Collection[int], ended: threading.Event) -> Iterator[tuple[int, str]]:
    """The last lines of the heartbeats, such as progress bars, when they have changed and have no line end yet."""
    shown: dict[int, str] = {}
    while not ended.wait(_BARS_EVERY_S):
        try:
            replicas = run.status().replicas
        except AtollError as exc:
            log.debug("run %s: cannot read the heartbeats: %s", run.id, exc.message)
            continue
        for rank in sorted(ranks):
            progress = replicas[rank].progress
            if progress.is_line_open and shown.get(rank) != progress.last_line:
                shown[rank] = progress.last_line
                yield rank, progress.last_line


class _Selection:
    """The lines of a rank that the options ask for."""

    def __init__(self, tail: int | None, since: float | None, attempt: int | None, grep: str | None) -> None:
        self._pattern = _compiled(grep)
        if tail is None:
            tail = _TAIL if since is None and self._pattern is None else -1
        self._tail = None if tail < 0 else tail
        self._since = None if since is None else time.time() - since
        self._attempt = attempt

    @property
    def is_empty(self) -> bool:
        return self._tail == 0

    @property
    def is_filtered(self) -> bool:
        """Whether a rank without a selected line may have printed others."""
        return any(option is not None for option in (self._pattern, self._since, self._attempt))

    def lines(self, run: Run, rank: int, *, follow: bool = False) -> Iterator[str]:
        pattern = self._pattern
        # The last matching lines are known only after reading all lines; with `follow`, the tail is where to begin.
        tail = self._tail if pattern is None or follow else None
        found: Iterable[str] = run.logs(rank, tail=tail, follow=follow, since=self._since, attempt=self._attempt)
        if pattern is not None:
            found = (line for line in found if pattern.search(shown_line(line)))
            if self._tail is not None and not follow:
                found = deque(found, maxlen=self._tail)
        yield from found


def _compiled(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as exc:
        raise ConfigError(
            f"--grep {grep}: not a regular expression: {exc}",
            hint=r"write special characters with a backslash, such as `\.`",
        ) from exc


def _replicas(run: Run, chosen: Iterable[int]) -> list[ReplicaStatus]:
    """The states of these ranks; none if the backend does not answer, because the lines were read already."""
    try:
        status = run.status(progress=False)
    except AtollError as exc:
        log.debug("run %s: no status after the logs: %s", run.id, exc.message)
        return []
    return [status.replicas[rank] for rank in chosen]


def _print(out: Output, lines: Iterable[tuple[int, str]], chosen: list[int], *, is_stream: bool) -> Counter[int]:
    """Print the lines and return their number for each rank. Only a stream is flushed after each line.

    Lines are written as bytes, so that output which is not valid text cannot fail. Only a terminal gets their colours.
    """
    counts: Counter[int] = Counter()
    width, colour = len(str(chosen[-1])), out.has_colour()
    prefixes = {k: styled(f"{k:>{width}} |", _COLOURS[k % len(_COLOURS)], colour=colour) + " " for k in chosen}
    if len(chosen) == 1:
        prefixes = {chosen[0]: ""}
    for rank, line in lines:
        counts[rank] += 1
        if out.is_json:
            out.event("line", {"rank": rank, "line": shown_line(line)})
            continue
        sys.stdout.buffer.write(encoded(f"{prefixes[rank]}{shown_line(line, colour=colour)}\n"))
        if is_stream:
            sys.stdout.buffer.flush()
    sys.stdout.flush()
    return counts
