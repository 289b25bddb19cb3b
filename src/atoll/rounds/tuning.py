"""Settings of the rounds: the chunk grid, `Tuning`, and the defaults that follow from the latency of the store.

The grid depends only on the size of the vector and the agreed chunk size, never on the participants. This file does
not import numpy, because planning uses it too.
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
    """Elements per chunk: about `parts` chunks of 1 to 64 MiB of float32; a small vector is one chunk.

    That is enough chunks to share and overlap the averaging, and few enough that bytes cost more than requests.
    """
    wanted = max(min(max(size // parts, 1 * _MIB_ELEMENTS), 16 * _MIB_ELEMENTS), min(size // 128, 64 * _MIB_ELEMENTS))
    return -(-wanted // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


_KINDS = {
    "connections": Kind("a whole number from 1, or None to choose it from the latency", is_count, may_be_none=True),
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
    "silent_s": SECONDS_ABOVE_0,
    "retry_s": SECONDS,
    "keep_freed_memory": SWITCH,
}


@dataclass(frozen=True)
class Tuning:
    """Settings of one replica. Replicas may differ in them."""

    connections: int | None = None
    """Bulk requests in flight at once; also the number of chunks in memory. None: chosen from the measured latency, few
    for a fast store and more for a slow one."""
    skip_upload: bool = True
    """Do not upload the chunks that this replica expects to average itself, which saves 1/n of the upload. With False
    every contribution is in the store, so that `atoll verify` can recompute every mean."""
    poll_first_s: float = 0.02
    poll_cap_s: float = 2.0
    list_from: int = 13
    """From this many missing ranks on, one LIST replaces one GET for each."""
    turn_s: float = 0.25
    """How long a rank waits for each lower rank to create the commit."""
    patience_s: float = 20.0
    """How long a replica waits for a chunk of the mean before it computes the chunk itself."""
    claims_age_s: float = 2.0
    """A replica creates a commit only if it read the claims at most this long ago."""
    inline_bytes: int = 1 << 18
    """Updates up to this size are part of their offer."""
    latency_s: float = 0.1
    bandwidth_bytes_s: float = 125e6
    """With the latency, this decides between exchanging whole updates and scatter-reduce."""
    outlier_factor: float | None = 10.0
    init_patience_s: float = 10.0
    """How long other ranks wait for rank 0 to publish the initial weights."""
    silent_s: float = 120.0
    """A rank that was started counts as dead when its heartbeat has not changed for this long."""
    retry_s: float = 120.0
    """How long requests to an unavailable store are retried."""
    keep_freed_memory: bool = False
    """Change the allocator of the whole process (glibc) to reuse freed memory instead of returning it to the system.
    It can save the CPU of fresh pages; the process keeps its largest size until it ends. Never switched off again."""

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)


LOCAL_S = 0.0003
"""Latency below this: the store is on this machine."""
CLOSE_S = 0.002
"""Latency below this: the store is close, and a request costs more CPU time than waiting time."""
IN_PROCESS_S = 0.0002
"""Latency below this: the store runs in this process or kernel, so requests use our own cores."""

_CONNECTIONS = ((LOCAL_S, 4), (0.03, 16))
"""Latency below this → number of connections. A disk is busy with few, a distant store needs many."""
_MOST_CONNECTIONS = 48
_CHUNKS, _FEW_CHUNKS = 16, 4


def good_connections(latency_s: float, replicas: int) -> int:
    """Bulk requests to have in flight at once."""
    wanted = next((few for limit_s, few in _CONNECTIONS if latency_s < limit_s), _MOST_CONNECTIONS)
    if latency_s < IN_PROCESS_S:
        return max(2, min(wanted, _cores()))
    return max(wanted, min(replicas, _MOST_CONNECTIONS))


def good_chunk(latency_s: float, size: int, replicas: int) -> int:
    """Values in a chunk of a vector of `size`: a close store gets fewer and larger chunks."""
    return default_chunk(size, _CHUNKS if latency_s >= CLOSE_S else min(_CHUNKS, max(_FEW_CHUNKS, replicas)))


@cache
def _cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
