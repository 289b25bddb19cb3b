"""How far the store is, told by how long small requests take, and what follows for connections and chunks."""

from __future__ import annotations

import os
from functools import cache

from atoll.rounds.grid import default_chunk

NEAR_S = 0.0003
"""Small requests faster than this: the store is this machine's own."""
CLOSE_S = 0.002
"""Small requests faster than this: the server is next door, and a request costs more in work than in waiting."""
AT_ONCE_S = 0.0002
"""Small requests faster than this: nobody answers them but our own processor, which copies when it has several."""

_CONNECTIONS = ((NEAR_S, 4), (0.03, 16))
"""Small requests faster than this: so many connections. A disk is busy with few, a far store needs many."""
_MOST_CONNECTIONS = 48
_CHUNKS, _FEW_CHUNKS = 16, 4


def good_connections(trip_s: float, replicas: int) -> int:
    """Bulk requests to have in flight at once."""
    wanted = next((few for limit_s, few in _CONNECTIONS if trip_s < limit_s), _MOST_CONNECTIONS)
    if trip_s < AT_ONCE_S:
        return max(2, min(wanted, _cores()))
    return max(wanted, min(replicas, _MOST_CONNECTIONS))


def good_chunk(trip_s: float, size: int, replicas: int) -> int:
    """Values in a chunk of the `size` that are averaged: where requests are quick, fewer of them cost less."""
    return default_chunk(size, _CHUNKS if trip_s >= CLOSE_S else min(_CHUNKS, max(_FEW_CHUNKS, replicas)))


@cache
def _cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
