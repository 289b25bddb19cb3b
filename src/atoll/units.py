"""Amounts as people write them: `80.6 kB`, `64MiB`, `8B` parameters, `25Gbit` a second. Pure.

Lengths of time as people write them: `90`, `90s`, `15m`, `2h`, `1d`, `1h30m`. Pure.
"""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
DURATION_RULE = "write a length of time such as `90`, `90s`, `15m`, `2h` or `1d`"


def parse_duration(value: str | int | float) -> float:
    """The length in seconds; a bare number is seconds. `ValueError` says what a length looks like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    duration_text = str(value).strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", duration_text):
        return float(duration_text)
    parts = _PART.findall(duration_text)
    if not parts or "".join(number + unit for number, unit in parts) != duration_text:
        raise ValueError(DURATION_RULE)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def duration_text(length_s: float) -> str:
    """Such as `12s`, `3m20s`, `2h` or `3d04h`: two units at most, so that a column of them stays narrow."""
    whole = int(max(0.0, length_s))
    for size, unit, smaller, below in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}{rest:02d}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_AMOUNT = re.compile(rf"{_NUMBER}([kmgtp]i?)?(b|byte|bytes)?\Z", re.I)
_COUNT = re.compile(rf"{_NUMBER}([kmbgt])?\Z", re.I)
_RATE = re.compile(rf"{_NUMBER}([kmgt]i?)?(bit|bits|b|byte|bytes)?(?:/s|ps)?\Z", re.I)

COUNT_RULE = "write a number such as `350M`, `8B` or `8e9`"
AMOUNT_RULE = "write an amount such as `64MiB`, `500MB` or `2GB`"
RATE_RULE = "write a rate such as `25Gbit`, `400MB/s` or `100Mbit`; bits say `bit`, bytes say `B`"


def size_text(amount: float) -> str:
    """Bytes with three digits, such as `80.6 kB`; thousands, as networks and clouds count them."""
    if not math.isfinite(amount):
        return str(amount)
    size, unit = abs(amount), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            break
        size /= 1000
    number = f"{size:.0f}" if unit == "B" or size >= 99.95 else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
    return f"{'-' if amount < 0 else ''}{number} {unit}"


def count(value: str | float) -> float:
    """`8B`, `350M`, `1.5b`, `8e9` as a number. `ValueError` says what one looks like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _COUNT.match(_plain(value))
    if match is None:
        raise ValueError(COUNT_RULE)
    return float(match[1]) * _COUNTS[(match[2] or "").lower()]


def amount(value: str | float) -> float:
    """`64MiB`, `500MB`, `4k`, `8388608` as bytes. `ValueError` says what one looks like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _AMOUNT.match(_plain(value))
    if match is None:
        raise ValueError(AMOUNT_RULE)
    return float(match[1]) * _scale(match[2])


def rate(value: str | float) -> float:
    """`25Gbit`, `25Gbit/s`, `25Gbps`, `400MB/s` as bytes a second. `ValueError` says what one looks like.

    A small `b` after a scale is a bit and a capital `B` a byte, as everywhere; without either it could be both.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _RATE.match(_plain(value))
    unit = "" if match is None else match[3] or ""
    if match is None or not unit:
        raise ValueError(RATE_RULE)
    is_bits = unit == "b" or unit.lower().startswith("bit")
    return float(match[1]) * _scale(match[2]) / (8 if is_bits else 1)


def _plain(value: object) -> str:
    return str(value).strip().replace(" ", "").replace("_", "")


def _scale(prefix: str | None) -> int:
    found = (prefix or "").lower()
    return _BINARY[found] if found in _BINARY else _DECIMAL[found]
