"""Rows with a verdict: what was measured, what it must be, and what we aim at."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    what: str
    replicas: int
    mib: int
    value: float
    must: float | None = None
    aim: float | None = None
    at_least: bool = False
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.must is None:
            return ""
        if self.aim is not None and self._reaches(self.aim):
            return "PASS, aim"
        return "PASS" if self._reaches(self.must) else "FAIL"

    @property
    def wanted(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return "" if self.must is None else f"{sign} {self.must:g}" + (f" ({self.aim:g})" if self.aim else "")

    def line(self) -> str:
        n = f"N={self.replicas}" if self.replicas else ""
        size = f"{self.mib} MiB" if self.mib else ""
        place = f"{self.what:<36} {n:<4} {size:>8} {self.value:>8.3f}"
        return f"{place}  {self.wanted:<13} {self.verdict:<9}  {self.note}".rstrip()

    def markdown(self) -> str:
        """The row as one of a table with `MARKDOWN_HEAD`."""
        cells = (
            self.what,
            self.replicas or "",
            self.mib or "",
            f"{self.value:.3f}",
            self.wanted,
            self.verdict,
            self.note,
        )
        return "| " + " | ".join(map(str, cells)) + " |"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}

    def _reaches(self, limit: float) -> bool:
        return self.value >= limit if self.at_least else self.value <= limit


MARKDOWN_HEAD = "| what | N | MiB | value | must (aim) | | |\n|---|--:|--:|--:|---|---|---|"


def machine() -> str:
    """The machine and the moment, in one line."""
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    load = _lines("/proc/loadavg")
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {len(cpus)} × {cpus[0] if cpus else platform.processor()}, "
        f"kernel {platform.release()}, Python {platform.python_version()}, load {load[0].split()[0] if load else '?'}"
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(ours) / median(theirs)


def median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
