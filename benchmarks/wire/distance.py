"""A store 100 ms away with 100 MB/s for each connection: our wall against the pipelined model 4 L + transfer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wire.report import Row, median
from wire.server import WireServer
from wire.team import Plan, Team, alternate
from wire.walls import ideal_down

LATENCY_S, BYTES_PER_S = 0.1, 100e6


def latency_rows(parent: Path, replicas: int, mib: int, repeat: int, tuning: dict[str, Any]) -> Iterator[Row]:
    """The same exchange near and far, in turn."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        here = Path(folder)
        near, far = WireServer(here / "near"), WireServer(here / "far", latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
        with near, far:
            endpoints = {"wire": near.uri("near"), "slow": far.uri("far")}
            with Team(Plan(replicas, mib << 18, ("wire", "slow"), here, endpoints, tuning)) as team:
                seen = alternate(team.warm_up(), repeat)
    size = mib << 20
    connections = max(turn.facts["connections"] for r in seen["slow"] for turn in r.turns)
    line_s = (size + ideal_down(replicas, size)) / (connections * BYTES_PER_S)
    near_s, far_s = median([r.wall_s for r in seen["wire"]]), median([r.wall_s for r in seen["slow"]])
    model_s = 4 * LATENCY_S + max(line_s, near_s)
    note = (
        f"{far_s:.3f} s / (4 × {LATENCY_S:g} + the larger of {line_s:.3f} on {connections} connections of "
        f"{BYTES_PER_S / 1e6:g} MB/s and {near_s:.3f} s near)"
    )
    samples = {"near": [r.wall_s for r in seen["wire"]], "far": [r.wall_s for r in seen["slow"]]}
    yield Row("100 ms, 100 MB/s: wall / model", replicas, mib, far_s / model_s, 1.3, 1.15, note=note, samples=samples)
    misses = [turn.facts["misses"] for r in seen["slow"] for turn in r.turns]
    yield Row(
        "100 ms: wasted GETs per rank", replicas, mib, median(misses), float(replicas), note=f"most {max(misses)}"
    )
