"""Runs iterators in threads and merges their items: the one way in which commands do several things at once.

`logs -f` merges the lines of all ranks, `ps` asks many runs within a time limit, `top` merges key presses and statuses.
The threads are daemons, so a request that hangs does not keep a command from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from queue import Empty, Queue
from typing import Any, TypeVar

from atoll._time import Deadline

K = TypeVar("K")
T = TypeVar("T")
_MOST_BUFFERED = 10_000
"""Items that the threads may be ahead of the reader."""


def merged(streams: Mapping[K, Iterable[T]], *, within_s: float | None = None) -> Iterator[tuple[K, T]]:
    """Yield (name, item) from every stream until all have ended or `within_s` has passed.

    An exception in one of the streams is raised here.
    """
    queue: Queue[tuple[K, Any, Exception | None]] = Queue(_MOST_BUFFERED)
    for name, items in streams.items():
        threading.Thread(target=_read, args=(name, items, queue), daemon=True, name=f"atoll-{name}").start()
    running, deadline = len(streams), Deadline(within_s)
    while running:
        try:
            timeout_s = None if within_s is None else max(0.001, deadline.remaining_s)
            name, item, error = queue.get(timeout=timeout_s)
        except Empty:
            return
        if error is None:
            yield name, item
        elif isinstance(error, _StreamEnd):
            running -= 1
        else:
            raise error


class _StreamEnd(Exception):
    """The mark of a stream that has ended; it is never raised."""


def _read(name: K, items: Iterable[T], queue: Queue[tuple[K, Any, Exception | None]]) -> None:
    try:
        for item in items:
            queue.put((name, item, None))
        queue.put((name, None, _StreamEnd()))
    except Exception as exc:  # noqa: BLE001  `merged` raises it in the reader's thread
        queue.put((name, None, exc))
