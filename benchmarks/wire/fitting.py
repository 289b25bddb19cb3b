"""Which ways to average have room in memory side by side: every one keeps its files until its own next round."""

from __future__ import annotations

_OF_A_PROCESS = 1 << 29
"""The interpreter, torch, buffers."""
_IN_MEMORY = {"gloo": 0, "naive": 8}
"""Arrays for each replica that one more way to average takes; all others take what one round leaves in files."""


def needed_bytes(arms: tuple[str, ...], replicas: int, size: int) -> int:
    """About, for teams that average arrays of `size` bytes in these ways."""
    files = sum(arm not in _IN_MEMORY for arm in arms) * (replicas + 1) * size
    arrays = (2 + sum(_IN_MEMORY.get(arm, 0) for arm in arms)) * replicas * size
    return files + arrays + replicas * _OF_A_PROCESS


def groups(arms: tuple[str, ...], replicas: int, size: int, available: int) -> list[tuple[str, ...]]:
    """All of them at once if that fits; else without the naive one; else each alone with gloo; else those that fit."""
    for some in (arms, tuple(arm for arm in arms if arm != "naive")):
        if needed_bytes(some, replicas, size) <= available:
            return [some]
    pairs = [("gloo", arm) for arm in some if arm != "gloo"]
    return [pair for pair in pairs if needed_bytes(pair, replicas, size) <= available]
