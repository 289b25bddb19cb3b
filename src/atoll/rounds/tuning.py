"""The settings of one replica's rounds. Without numpy, because planning needs them too."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.arguments import COUNT, INDEX, SECONDS, SECONDS_ABOVE_0, SWITCH, Kind, check_fields, is_count, is_number

_KINDS = {
    "connections": Kind("a whole number from 1, or None for as many as are good", is_count, may_be_none=True),
    "hold_back": SWITCH,
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
    hold_back: bool = True
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
