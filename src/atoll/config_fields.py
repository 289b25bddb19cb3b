"""What may be configured: each key, what its value looks like, and its environment variable. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll import durations

PREFIX = "ATOLL_"
"""Every variable of ours begins so."""

Reader = Callable[[Any], Any]
"""A value as it was written -> the value we use; `ValueError` says the rule."""


@dataclass(frozen=True)
class Field:
    """One key. `option` is what `atoll.prepare` calls it."""

    key: str
    read: Reader
    option: str
    default: Any = None
    is_path: bool = False
    """In a file, relative to the folder of that file."""
    show: Callable[[Any], str] = str

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.key.upper()}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None


def _duration(value: Any) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(durations.RULE)
    return durations.seconds(value)


FIELDS: dict[str, Field] = {
    field.key: field
    for field in (
        Field("entry", _text, "entry"),
        Field("replicas", _whole, "replicas", default=1),
        Field("on", _text, "on", default="local"),
        Field("store", _text, "store", is_path=True),
        Field("workspace", _text, "workspace", is_path=True),
        Field("gpu", _text, "gpu"),
        Field("cpus", _number, "cpus"),
        Field("memory_gib", _number, "memory_gib"),
        Field("image", _text, "image"),
        Field("timeout", _duration, "timeout_s", default=86_400.0, show=durations.text),
        Field("grace", _duration, "grace_s", default=10.0, show=durations.text),
        Field("max_restarts", _whole, "max_restarts", default=0),
        Field("rank_env", _text, "rank_env", default="REPLICA_RANK"),
    )
}

TABLES = ("args", "env", "secrets")
"""Tables whose keys are the user's own; each key is a setting by itself, so layers add up."""

SECTIONS = ("executors", "profiles")

OTHER_VARIABLES = frozenset(
    {
        *("ATOLL_HOME", "ATOLL_CONFIG", "ATOLL_PROFILE", "ATOLL_DEBUG", "ATOLL_PURE"),
        *("ATOLL_RUN_ID", "ATOLL_ATTEMPT", "ATOLL_SPOOL", "ATOLL_LABEL", "ATOLL_TIMEOUT_S", "ATOLL_GRACE_S"),
    }
)
"""Variables of ours that are no settings of a run."""


def table_problem(table: str, value: Any) -> str | None:
    """Why this value cannot be in `[env]` or `[secrets]`; `[args]` takes any JSON, and the spec checks that."""
    if table != "args" and not isinstance(value, str):
        return "a text in quotes"
    return None


def is_table(value: Any) -> bool:
    return isinstance(value, Mapping)
