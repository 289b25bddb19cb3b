"""Lengths of time as people write them: `90`, `90s`, `15m`, `2h`, `1d`, `1h30m`. Pure."""

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
RULE = "write a length of time such as `90`, `90s`, `15m`, `2h` or `1d`"


def seconds(value: str | int | float) -> float:
    """The length in seconds; a bare number is seconds. `ValueError` says what a length looks like."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = str(value).strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(RULE)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def text(length_s: float) -> str:
    """Such as `12s`, `3m20s`, `2h` or `3d04h`: two units at most, so that a column of them stays narrow."""
    whole = int(max(0.0, length_s))
    for size, unit, smaller, below in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}{rest:02d}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"
