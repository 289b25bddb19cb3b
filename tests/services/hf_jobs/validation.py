"""Pure: checks a request to create a job, and words each problem like the service."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_MEMBERS = {
    "command": list,
    "arguments": list,
    "environment": dict,
    "secrets": dict,
    "flavor": str,
    "timeoutSeconds": int,
    "attempts": int,
    "labels": dict,
    "volumes": list,
    "expose": dict,
    "ssh": dict,
    "network": dict,
    "resourceGroupId": str,
    "dockerImage": str,
    "spaceId": str,
}
_LABEL = re.compile(r"[a-zA-Z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_LABEL_CHARS = 100
"""The peer's own limit: the real one is not documented."""


def problems(spec: Mapping[str, Any], flavors: Mapping[str, Any]) -> Iterator[str]:
    """Each rule that the request breaks."""
    for name, value in spec.items():
        if name not in _MEMBERS:
            yield f'"{name}" is not allowed'
        elif not isinstance(value, _MEMBERS[name]) or isinstance(value, bool):
            yield f'"{name}" must be of type {_MEMBERS[name].__name__}'
    if ("dockerImage" in spec) == ("spaceId" in spec):
        yield '"value" must contain exactly one of [dockerImage, spaceId]'
    if spec.get("flavor") not in flavors:
        yield f'"flavor" must be one of [{", ".join(flavors)}]'
    if not spec.get("command"):
        yield '"command" does not contain 1 required value(s)'
    if spec.get("timeoutSeconds", 1) < 1:
        yield '"timeoutSeconds" must be greater than or equal to 1'
    if not 1 <= spec.get("attempts", 1) <= 10:
        yield '"attempts" must be between 1 and 10'
    yield from _variable_problems(spec)
    yield from _label_problems(spec)


def _variable_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    for part in ("environment", "secrets"):
        for name, value in (spec.get(part) or {}).items():
            if not _VARIABLE.fullmatch(name) or not isinstance(value, str):
                yield f'"{part}.{name}" is not allowed'
    both = set(spec.get("environment") or {}) & set(spec.get("secrets") or {})
    yield from (f'"secrets.{name}" is also in "environment"' for name in sorted(both))


def _label_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    for name, value in (spec.get("labels") or {}).items():
        if not _LABEL.fullmatch(name) or not isinstance(value, str) or not _LABEL.fullmatch(value):
            yield f'"labels.{name}" with value "{value}" fails to match the required pattern: /^[a-zA-Z0-9._-]*$/'
        elif max(len(name), len(value)) > MOST_LABEL_CHARS:
            yield f'"labels.{name}" length must be less than or equal to {MOST_LABEL_CHARS} characters long'
