"""The settings of one replica's rounds. Without numpy, because planning needs them too.

How a vector is cut: the fixed chunk grid over it. Without numpy, because planning needs it too.

The grid depends on the size of the vector and the agreed chunk size only, never on who takes part.

How far the store is, told by how long small requests take, and what follows for connections and chunks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from atoll.errors import InvalidSpec
from atoll.validation import COUNT, INDEX, SECONDS, SECONDS_ABOVE_0, SWITCH, Kind, check_fields, is_count, is_number

CHUNK_MULTIPLE = 1024
"""A chunk holds a multiple of this many elements, so that the blocks of a codec never straddle two chunks."""
_MIB_ELEMENTS = (1 << 20) // 4


@dataclass(frozen=True)
class Grid:
    """Chunk i covers the elements `[i * chunk, (i + 1) * chunk)` of a vector of `size`."""

    size: int
    chunk: int

    def __post_init__(self) -> None:
        is_whole = isinstance(self.chunk, int)
        if self.size < 0 or not is_whole or self.chunk <= 0 or self.chunk % CHUNK_MULTIPLE:
            raise InvalidSpec("chunk grid", [f"chunk={self.chunk!r}: a multiple of {CHUNK_MULTIPLE} above 0"])

    def __len__(self) -> int:
        return (self.size + self.chunk - 1) // self.chunk

    def span(self, index: int) -> tuple[int, int]:
        """The first element of a chunk, and the one after its last."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index * self.chunk, min(self.size, (index + 1) * self.chunk)

    def count(self, index: int) -> int:
        start, stop = self.span(index)
        return stop - start


def default_chunk(size: int, parts: int = 16) -> int:
    """Elements per chunk: small vectors stay whole, others make about `parts` chunks, of 1 to 64 MiB of float32.

    Enough chunks to share the work and overlap it, few enough that requests cost little beside bytes.
    """
    wanted = max(min(max(size // parts, 1 * _MIB_ELEMENTS), 16 * _MIB_ELEMENTS), min(size // 128, 64 * _MIB_ELEMENTS))
    return -(-wanted // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


_KINDS = {
    "connections": Kind("a whole number from 1, or None for as many as are good", is_count, may_be_none=True),
    "skip_upload": SWITCH,
    "poll_first_s": SECONDS_ABOVE_0,
    "poll_cap_s": SECONDS_ABOVE_0,
    "list_from": COUNT,
    "turn_s": SECONDS,
    "patience_s": SECONDS,
    "claims_age_s": SECONDS,
    "inline_bytes": INDEX,
    "latency_s": SECONDS,
    "bandwidth_bytes_s": Kind("bytes a second, above 0", lambda value: is_number(value) and value > 0),
    "outlier_factor": Kind(
        "a number above 1, or None for no limit", lambda value: is_number(value) and value > 1, may_be_none=True
    ),
    "init_patience_s": SECONDS,
    "retry_s": SECONDS,
    "keep_freed_memory": SWITCH,
}


@dataclass(frozen=True)
class Tuning:
    """Settings of one replica that need not be equal everywhere."""

    connections: int | None = None
    """Bulk requests in flight at once; also how many chunks are in memory. None: few where the store answers at once
    and more where it takes its time, as measured."""
    skip_upload: bool = True
    """Do not upload the chunks we expect to average ourselves: their mean is enough. Saves 1/n of the upload. With
    False everything that was averaged is in the store, for `atoll verify` to do all of the arithmetic again."""
    poll_first_s: float = 0.02
    poll_cap_s: float = 2.0
    list_from: int = 13
    """From this many missing ranks on, one LIST is cheaper than probing each."""
    turn_s: float = 0.25
    """How long each rank lets the one before it write the commit."""
    patience_s: float = 20.0
    """How long to wait for a chunk of the mean before computing it oneself."""
    claims_age_s: float = 2.0
    """A commit is made on claims read no longer ago than this, or after the offers."""
    inline_bytes: int = 1 << 18
    """Updates up to this size travel inside their offer."""
    latency_s: float = 0.1
    bandwidth_bytes_s: float = 125e6
    """With the latency, what decides between exchanging whole updates and scattering the reduce."""
    outlier_factor: float | None = 10.0
    init_patience_s: float = 10.0
    """How long other ranks let rank 0 publish the initial weights."""
    retry_s: float = 120.0
    """How long an unavailable store is asked again."""
    keep_freed_memory: bool = False
    """Change the allocator of the whole process (glibc) to reuse freed memory instead of returning it to the system.
    It can save the CPU of fresh pages; the process keeps its largest size until it ends. Never switched off again."""

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)


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
