"""Resident memory of this process: now, and at its peak since the last time one asked. Linux only; elsewhere 0."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_watching() -> int:
    """Forget the peak; the bytes that are resident now."""
    if not _CLEAR.exists():
        return 0
    _CLEAR.write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM") if _CLEAR.exists() else 0


def available_bytes() -> int:
    """What the machine has left for new processes and files in memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
