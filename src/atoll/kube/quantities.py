"""Pure: quantities of Kubernetes, such as `500m`, `4`, `16Gi` and `1.5G`, as numbers and as texts."""

from __future__ import annotations

import math
import re

GIB = 1 << 30
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|[eE][+-]?\d{1,2})?\Z")
_SCALE = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": float(1 << (10 * power)) for power, letter in enumerate("KMGTP", 1)
}
RULE = "a quantity such as `500m`, `4` or `16Gi`"


def is_quantity(value: object) -> bool:
    """Whether this is a quantity above 0."""
    return isinstance(value, str) and _QUANTITY.match(value) is not None and parsed(value) > 0


def parsed(quantity: str) -> float:
    """The quantity as a number of cores or bytes; `ValueError` if it is none."""
    found = _QUANTITY.match(quantity)
    if found is None:
        raise ValueError(f"{RULE}, not `{quantity}`")
    suffix = found[2] or ""
    scale = _SCALE[suffix] if suffix in _SCALE else float(f"1{suffix}")
    return float(found[1]) * scale


def of_cpus(cpus: float) -> str:
    """Cores as text, rounded up to a thousandth: `4`, `500m`."""
    milli = math.ceil(round(cpus * 1000, 3))
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def of_gib(gib: float) -> str:
    """GiB as text, exact to the byte: `16Gi`, `1536Mi`."""
    size = math.ceil(round(gib * GIB, 3))
    for suffix, unit in (("Gi", GIB), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)
