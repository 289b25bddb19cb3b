"""GPUs by name and count: `"H100"`, `"H100:8"`, `"any:2"`."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import UnknownName

KNOWN = [
    "any",
    "A10",
    "A10G",
    "A100",
    "A100-80GB",
    "A30",
    "A40",
    "A6000",
    "B200",
    "B300",
    "GB200",
    "GH200",
    "H100",
    "H200",
    "H20",
    "L4",
    "L40",
    "L40S",
    "MI300X",
    "MI325X",
    "P100",
    "RTX3090",
    "RTX4090",
    "RTX5090",
    "RTX6000",
    "T4",
    "V100",
]


@dataclass(frozen=True)
class Gpu:
    """`count` devices of one kind for one replica. `any` is whatever the machine has."""

    name: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.count}"

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """`"H100:8"` as a Gpu. An unknown name raises `UnknownName`, a bad count `ValueError`."""
        name, _, count = text.partition(":")
        spelled = {known.lower().replace("-", ""): known for known in KNOWN}
        plain = name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
        if plain not in spelled:
            raise UnknownName("GPU", name, KNOWN, hint="write a name and a count, such as `H100:8`")
        if count and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"the count after `:` is a whole number from 1, got `{count}`")
        return cls(spelled[plain], int(count) if count else 1)
