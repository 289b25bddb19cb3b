"""How a metric went, from the statuses that were seen: one small line of bars per rank. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from atoll.status import RunStatus

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
