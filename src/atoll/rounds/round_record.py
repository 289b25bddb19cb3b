"""What one replica's round cost: seconds by phase, bytes, requests; as one line of JSON in the store. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("compute", "encode", "put", "wait", "get", "reduce", "apply")
"""Those we know, in the order they come; a record may have others."""
_MICRO = 1_000_000


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a round."""

    busy_s: float
    """Summed over everything that went on side by side."""
    wall_s: float
    """How long at least one of them went on."""
    count: int = 1
    spans: tuple[tuple[float, float], ...] = ()
    """(when after the exchange began, how long): a bounded number, so short gaps may be closed."""

    def to_json(self) -> dict[str, Any]:
        spans = [[round(at * _MICRO), round(lasted * _MICRO)] for at, lasted in self.spans]
        return {"busy_s": _short(self.busy_s), "wall_s": _short(self.wall_s), "count": self.count, "spans_us": spans}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PhaseTime:
        spans = tuple((at / _MICRO, max(0, lasted) / _MICRO) for at, lasted in data["spans_us"])
        return cls(_number(data["busy_s"]), _number(data["wall_s"]), int(_number(data["count"])), spans)


@dataclass(frozen=True)
class RoundRecord:
    """One round of one process."""

    rank: int
    incarnation: int
    round_no: int
    fragment: int
    time: float
    """When the exchange began, by the replica's own clock: for people and pictures, never for decisions."""
    exchange_s: float
    exposed_s: float
    """The part of the exchange during which nothing was computed."""
    is_over: bool
    """False for an exchange that never came to its end."""
    is_included: bool
    """Whether this replica's update is part of the mean."""
    phases: dict[str, PhaseTime] = field(default_factory=dict)
    bytes_up: int = 0
    """Bytes and requests from the beginning of this exchange to that of the next one."""
    bytes_down: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    retries: int = 0

    @property
    def hidden_share(self) -> float:
        """The part of the exchange that went on behind computing."""
        return 1.0 - self.exposed_s / self.exchange_s if self.exchange_s > 0 else 0.0

    @property
    def total_s(self) -> float:
        """What the round took of the replica's time: computing, standing still for the exchange, and the outer step."""
        return self.wall_s("compute") + self.exposed_s + self.wall_s("apply")

    def wall_s(self, phase: str) -> float:
        found = self.phases.get(phase)
        return 0.0 if found is None else found.wall_s

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round_no,
            "fragment": self.fragment,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "time": _short(self.time),
            "exchange_s": _short(self.exchange_s),
            "exposed_s": _short(self.exposed_s),
            "over": self.is_over,
            "included": self.is_included,
            "phases": {name: phase.to_json() for name, phase in self.phases.items()},
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "requests": self.requests,
            "misses": self.misses,
            "retries": self.retries,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundRecord:
        """`KeyError`, `TypeError` or `ValueError` when it is no such record."""
        return cls(
            rank=int(_number(data["rank"])),
            incarnation=int(_number(data["incarnation"])),
            round_no=int(_number(data["round"])),
            fragment=int(_number(data["fragment"])),
            time=_number(data["time"]),
            exchange_s=_number(data["exchange_s"]),
            exposed_s=_number(data["exposed_s"]),
            is_over=bool(data["over"]),
            is_included=bool(data["included"]),
            phases={str(name): PhaseTime.from_json(phase) for name, phase in data["phases"].items()},
            bytes_up=int(_number(data["bytes_up"])),
            bytes_down=int(_number(data["bytes_down"])),
            requests={str(verb): int(_number(count)) for verb, count in data["requests"].items()},
            misses=int(_number(data["misses"])),
            retries=int(_number(data["retries"])),
        )


def _number(value: object) -> float:
    """JSON from anywhere: a text that looks like a number is none."""
    if not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r}")
    return value


def _short(seconds: float) -> float:
    return round(seconds, 6)
