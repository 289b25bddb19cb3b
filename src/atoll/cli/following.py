"""Several streams of lines as one, each line as it comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from queue import Queue

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
