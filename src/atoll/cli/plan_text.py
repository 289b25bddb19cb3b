"""The request of a plan as text: requests that are nearly equal are shown once, with what differs for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_GROUP = "\0"
"""Marks the place of a group; no request contains it."""
_MOST_DIFFERENT = 0.5
"""Requests are grouped if at most this part of their values differs."""


def plan_text(request: Mapping[str, Any]) -> str:
    """Indented JSON. A list of nearly equal objects becomes `{"common": …, "each": […]}`, with one line for each.

    The keys in `each` are paths in the object, such as `Environment.REPLICA_RANK` or `Tags[1].Value`; at these places
    `common` has "…".
    """
    groups: list[list[dict[str, Any]]] = []
    shown = {name: _grouped(value, groups) for name, value in sorted(request.items())}
    text = json.dumps(shown, indent=2, sort_keys=True, ensure_ascii=False)
    for number, each in enumerate(groups):
        lines = ",\n".join(f"      {json.dumps(one, ensure_ascii=False)}" for one in each)
        text = text.replace(json.dumps(f"{_GROUP}{number}"), f"[\n{lines}\n    ]")
    return text


def _grouped(value: Any, groups: list[list[dict[str, Any]]]) -> Any:
    """The value, or its group; the differences of a new group are added to `groups`."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, dict) for item in value):
        return value
    leaves = [dict(_leaves(item)) for item in value]
    if any(set(each) != set(leaves[0]) for each in leaves):
        return value
    differing = [path for path in leaves[0] if any(each[path] != leaves[0][path] for each in leaves)]
    if len(differing) > _MOST_DIFFERENT * len(leaves[0]):
        return value
    groups.append([{path: each[path] for path in differing} for each in leaves])
    return {"common": _without(value[0], set(differing)), "each": f"{_GROUP}{len(groups) - 1}"}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a container, or an empty one, by its path."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _without(value: Any, paths: set[str], path: str = "") -> Any:
    if path in paths:
        return "…"
    if isinstance(value, dict):
        return {name: _without(item, paths, f"{path}.{name}" if path else name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without(item, paths, f"{path}[{index}]") for index, item in enumerate(value)]
    return value
