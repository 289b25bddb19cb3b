"""Durations, counts, sizes and rates as text: `1h30m`, `8B` parameters, `64MiB`, `25Gbit/s`. Pure.

Each `parse_…` accepts a number too, and raises `ValueError` with a message that shows the form.
"""

from __future__ import annotations

import math
import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_SIZE = re.compile(rf"{_NUMBER}([kmgtp]i?)?(b|byte|bytes)?\Z", re.I)
_COUNT = re.compile(rf"{_NUMBER}([kmbgt])?\Z", re.I)
_RATE = re.compile(rf"{_NUMBER}([kmgt]i?)?(bit|bits|b|byte|bytes)?(?:/s|ps)?\Z", re.I)

DURATION_RULE = "write a length of time such as `90`, `90s`, `15m`, `2h` or `1d`"
COUNT_RULE = "write a number such as `350M`, `8B` or `8e9`"
SIZE_RULE = "write a size such as `64MiB`, `500MB` or `2GB`"
RATE_RULE = "write a rate such as `25Gbit`, `400MB/s` or `100Mbit`; bits say `bit`, bytes say `B`"


def parse_duration(value: str | float) -> float:
    """`90`, `90s`, `15m`, `1h30m` in seconds; a number without a unit is seconds."""
    if _is_number(value):
        return float(value)
    text = str(value).strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(DURATION_RULE)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def duration_text(duration_s: float) -> str:
    """Such as `12s`, `3m20s`, `2h` or `3d04h`: two units at most, so that a column of them stays narrow."""
    whole = int(max(0.0, duration_s))
    for size, unit, smaller, below in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}{rest:02d}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def rough_text(duration_s: float) -> str:
    """A duration that is only an estimate, such as `about 40 s`, `about 12 min`, `about 2.5 h` or `about 3 days`."""
    seconds = max(0.0, duration_s)
    if seconds < 10:
        return "a few seconds"
    if seconds < 55:
        return f"about {round(seconds, -1):.0f} s"
    if seconds < 5_400:
        return f"about {seconds / 60:.0f} min"
    hours = seconds / 3_600
    return f"about {hours:.{int(hours < 9.95)}f} h" if hours < 48 else f"about {hours / 24:.0f} days"


def size_text(size_bytes: float) -> str:
    """Bytes with three digits, such as `80.6 kB`. A kB is 1000 bytes, as in networks and clouds."""
    if not math.isfinite(size_bytes):
        return str(size_bytes)
    size, unit = abs(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            break
        size /= 1000
    number = f"{size:.0f}" if unit == "B" or size >= 99.95 else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
    return f"{'-' if size_bytes < 0 else ''}{number} {unit}"


def parse_count(value: str | float) -> float:
    """`8B`, `350M`, `1.5b`, `8e9` as a number."""
    if _is_number(value):
        return float(value)
    match = _COUNT.match(_plain(value))
    if match is None:
        raise ValueError(COUNT_RULE)
    return float(match[1]) * _COUNTS[(match[2] or "").lower()]


def parse_size(value: str | float) -> float:
    """`64MiB`, `500MB`, `4k`, `8388608` in bytes."""
    if _is_number(value):
        return float(value)
    match = _SIZE.match(_plain(value))
    if match is None:
        raise ValueError(SIZE_RULE)
    return float(match[1]) * _scale(match[2])


def parse_rate(value: str | float) -> float:
    """`25Gbit`, `25Gbit/s`, `25Gbps`, `400MB/s` in bytes a second. `b` is a bit, `B` is a byte; one is required."""
    if _is_number(value):
        return float(value)
    match = _RATE.match(_plain(value))
    unit = "" if match is None else match[3] or ""
    if match is None or not unit:
        raise ValueError(RATE_RULE)
    is_bits = unit == "b" or unit.lower().startswith("bit")
    return float(match[1]) * _scale(match[2]) / (8 if is_bits else 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: object) -> str:
    return str(value).strip().replace(" ", "").replace("_", "")


def _scale(prefix: str | None) -> int:
    found = (prefix or "").lower()
    return _BINARY[found] if found in _BINARY else _DECIMAL[found]
