"""Which known name somebody may have meant. Pure.

A wrong guess is worse than none, so only what looks like a slip of the hand counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHORTEST_STEM = 3
_MOST_NAMES = 3
_WORD_ENDS = re.compile(r"[\W_]+")


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is one slip away, or a few in a long one; or one is the beginning or a word of the other."""
    return next(iter(likely(name, known)), None)


def likely(name: str, known: Iterable[str]) -> list[str]:
    """The closest name, and a few others if they are just as close."""
    near = [(_slips(name.lower(), other.lower()), other) for other in known if other != name]
    meant = sorted(
        (slips, other) for slips, other in near if slips <= _most_slips(name, other) or _is_stem(name, other)
    )
    return [other for slips, other in meant if slips == meant[0][0]][:_MOST_NAMES]


def _most_slips(name: str, other: str) -> int:
    """One for every four letters, and never as many as there are letters."""
    return min(max(1, max(len(name), len(other)) // 4), min(len(name), len(other)) - 1)


def _is_stem(name: str, other: str) -> bool:
    short, long = sorted((name.lower(), other.lower()), key=len)
    return len(short) >= _SHORTEST_STEM and (long.startswith(short) or short in _WORD_ENDS.split(long))


def _slips(first: str, second: str) -> int:
    """How many letters were left out, added, mistaken, or swapped with their neighbour."""
    above: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first):
        above, row, before = row, [i + 1], above
        for j, other in enumerate(second):
            slips = min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1)
            if i and j and letter == second[j - 1] and first[i - 1] == other:
                slips = min(slips, before[j - 1] + 1)
            row.append(slips)
    return row[-1]
