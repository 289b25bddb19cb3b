"""Lines of a replica with their times: a limit in time, and the text form that TorchX wants."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")


def since_seconds(since: datetime | None, now: datetime | None = None) -> int | None:
    """Whole seconds since this time, at least 1. A time without a zone is local time."""
    if since is None:
        return None
    current = now or datetime.now(UTC)
    return max(1, math.ceil((current - since.astimezone(UTC)).total_seconds()))


def shown(lines: Iterable[str], *, until: datetime | None, has_times: bool) -> Iterator[str]:
    """Each line ends with a line feed. Lines behind `until` are left out; without `has_times`, so are the times."""
    end = None if until is None else until.astimezone(UTC)
    for line in lines:
        found = _TIME.match(line)
        if end is not None and found is not None:
            moment = datetime.fromisoformat(f"{found[1]}{(found[2] or '')[:7]}{found[3]}")
            if moment > end:
                return
        text = line if has_times or found is None else line[found.end() :]
        yield text if text.endswith("\n") else f"{text}\n"


def split(text: str) -> Iterator[str]:
    """Lines of a text; only a line feed ends a line, so that progress bars stay whole."""
    return io.StringIO(text, newline="\n")
