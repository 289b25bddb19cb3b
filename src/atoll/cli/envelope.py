"""Machine output: one versioned envelope per command, JSON lines for what streams. Pure.

A stream line has `event`; the last line of every command is the envelope, which has `ok` and `exit_code`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from atoll.errors import AtollError

SCHEMA = "atoll/1"


def envelope(command: str, exit_code: int, data: Any, error: Mapping[str, Any] | None) -> dict[str, Any]:
    """The last word of a command."""
    return {
        "schema": SCHEMA,
        "command": command,
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "data": data,
        "error": error,
    }


def event(command: str, name: str, data: Any) -> dict[str, Any]:
    """One line of a stream."""
    return {"schema": SCHEMA, "command": command, "event": name, "data": data}


def error_record(error: AtollError) -> dict[str, Any]:
    """What `error` holds: a stable word, the message, the next step, and single problems where there are some."""
    record: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint}
    for name in ("problems", "differences", "left_running"):
        if found := getattr(error, name, None):
            record[name] = list(found)
    return record


def dumps(value: Any) -> str:
    """One line of strict JSON in ASCII: no NaN, no lone surrogates, whatever a replica said."""
    return json.dumps(_strict(value), allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
