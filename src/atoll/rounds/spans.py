"""Intervals of time: their union, how long they last, what others leave uncovered, and fewer of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""When something began and ended, in seconds."""

_COMPACT_FROM = 2048


def union(spans: Iterable[Span]) -> list[Span]:
    """The same stretches of time as sorted intervals that do not touch."""
    joined: list[Span] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        elif ended > began:
            joined.append((began, ended))
    return joined


def length(spans: Iterable[Span]) -> float:
    """How long at least one of them lasted."""
    return sum(ended - began for began, ended in union(spans))


def uncovered(spans: Iterable[Span], cover: Iterable[Span]) -> list[Span]:
    """The parts of `spans` in which nothing of `cover` went on."""
    left: list[Span] = []
    covers = union(cover)
    for began, ended in union(spans):
        for c_began, c_ended in covers:
            if c_ended <= began or c_began >= ended:
                continue
            if c_began > began:
                left.append((began, c_began))
            began = c_ended
            if began >= ended:
                break
        if began < ended:
            left.append((began, ended))
    return left


def limited(spans: Sequence[Span], most: int) -> list[Span]:
    """At most `most` intervals: the shortest gaps between those of the union are closed."""
    joined = union(spans)
    if len(joined) <= most:
        return joined
    gaps = range(1, len(joined))
    kept = sorted(heapq.nlargest(most - 1, gaps, key=lambda i: joined[i][0] - joined[i - 1][1]))
    firsts = [0, *kept]
    lasts = [*(i - 1 for i in kept), len(joined) - 1]
    return [(joined[first][0], joined[last][1]) for first, last in zip(firsts, lasts, strict=True)]


class Track:
    """What one phase of a round did: how long, how often and when. Memory is bounded, however many are added."""

    def __init__(self) -> None:
        self.busy_s, self.count = 0.0, 0
        self._spans: list[Span] = []

    def add(self, began: float, ended: float) -> None:
        self.busy_s += max(0.0, ended - began)
        self.count += 1
        self._spans.append((began, ended))
        if len(self._spans) >= _COMPACT_FROM:
            self._spans = limited(self._spans, _COMPACT_FROM // 2)

    @property
    def spans(self) -> list[Span]:
        """The union, in order."""
        return union(self._spans)
