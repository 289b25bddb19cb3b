"""Which ranks a person means: `all`, `2`, `0-3,7`. Pure."""

from __future__ import annotations

import re

from atoll.errors import ConfigError

_PART = re.compile(r"(\d+)(?:-(\d+))?\Z")


def ranks(text: str, replicas: int) -> list[int]:
    """The ranks named, in order, each once."""
    if text == "all":
        return list(range(replicas))
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise ConfigError(f"--rank {text}: write `all`, a rank such as `2`, or several such as `0-3,7`")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= replicas:
            raise ConfigError(f"--rank {part.strip()}: this run has ranks 0 to {replicas - 1}")
        found.update(range(first, last + 1))
    return sorted(found)
