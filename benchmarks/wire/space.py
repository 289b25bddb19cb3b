"""Extra memory of a replica: the peak over what it had before its first exchange, with both arrays already there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wire.arms import can_recycle
from wire.report import Row
from wire.server import WireServer
from wire.team import Plan, Team
from wire.walls import NAMES

_ROUNDS = 3


def memory_rows(
    folder: Path, server: WireServer | None, replicas: int, mib: int, tuning: dict[str, Any]
) -> Iterator[Row]:
    """A team of its own for each store, so that nobody finds memory that another has left."""
    endpoints = {"wire": server.uri("space")} if server else {}
    for kind in ("file", *(("recycled",) if can_recycle() else ()), *(("wire",) if server else ())):
        with Team(Plan(replicas, mib << 18, (kind,), folder / kind, endpoints, tuning)) as team:
            rounds = [team.round(kind, is_checked_in_full=True) for _ in range(_ROUNDS)]
        extra = max(
            max(r.turns[rank].resident_peak for r in rounds) - rounds[0].turns[rank].resident_before
            for rank in range(replicas)
        )
        chunk_mib = rounds[0].turns[0].facts["chunk_bytes"] / 2**20
        connections = max(turn.facts["connections"] for r in rounds for turn in r.turns)
        limit = 64 + connections * chunk_mib
        note = f"64 + {connections} connections × {chunk_mib:g} MiB; highest of {replicas} replicas in {_ROUNDS} rounds"
        yield Row(f"{NAMES[kind]}: extra MiB", replicas, mib, extra / 2**20, limit, note=note)
