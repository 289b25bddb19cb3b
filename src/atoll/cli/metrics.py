"""Metrics of replicas as columns: which ones, in which order, and in whose units. Pure."""

from __future__ import annotations

from atoll import units
from atoll.cli.text import Cell, Column
from atoll.status import ReplicaStatus, RunStatus

REJECTED = "updates_rejected"
OURS = {"wait_share": "wait", "hidden_share": "hidden", "bytes_up": "up", "bytes_down": "down", REJECTED: "rejected"}
"""What training by rounds reports by itself, and how its column is called; it comes after what the user logs."""
_TOTAL = "bytes"
_MOST = 8
_SURE = 2
"""Metrics that stay when the terminal is narrow."""


def metric_names(status: RunStatus) -> list[str]:
    """Names of metrics that some rank reported: `loss`, the user's own, ours."""
    names = {name for replica in status.replicas for name in replica.progress.metrics}
    if names & {"bytes_up", "bytes_down"}:
        names.discard(_TOTAL)
    ours = list(OURS)
    return sorted(names, key=lambda name: (ours.index(name) if name in OURS else -1, name != "loss", name))


def shown_metrics(status: RunStatus) -> list[str]:
    """Those that get a column."""
    names = metric_names(status)
    users = [name for name in names if name not in OURS]
    return users[: max(_SURE, _MOST - (len(names) - len(users)))] + [name for name in names if name in OURS]


def metric_columns(names: list[str]) -> list[Column]:
    """Narrow terminals lose those on the right."""
    return [Column(OURS.get(name, name), is_right=True, is_spare=i >= _SURE) for i, name in enumerate(names)]


def metric_cell(replica: ReplicaStatus, name: str) -> Cell:
    value = replica.progress.metrics.get(name)
    return Cell("" if value is None else metric_text(name, value))


def metric_text(name: str, value: float) -> str:
    """Bytes as amounts, shares in per cent, anything else as a number."""
    if name == _TOTAL or name.startswith("bytes_") or name.endswith("_bytes"):
        return units.size_text(value)
    if name.endswith("_share") and 0.0 <= value <= 1.0:
        return percent(value)
    return number_text(value)


def number_text(value: float) -> str:
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
