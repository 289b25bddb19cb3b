"""What `atoll logs` adds to what replicas wrote: who wrote nothing, and how those ended who did not succeed. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from atoll import units
from atoll.cli.text import one_line
from atoll.result import ranks_text
from atoll.status import ReplicaState, ReplicaStatus

_TOLD = 8


def silence_text(ranks: Collection[int], *, is_narrowed: bool) -> str:
    """Such as `rank 1 printed nothing`; where only some lines were asked for, there may be others."""
    return f"{ranks_text(ranks)} printed {'no such line' if is_narrowed else 'nothing'}" if ranks else ""


def ending_lines(replicas: Sequence[ReplicaStatus], run: str, now: float) -> Iterator[str]:
    """A line for each replica that is over and did not succeed; of many, the first few."""
    ended = [r for r in replicas if r.state.is_terminal and r.state is not ReplicaState.SUCCEEDED]
    yield from (ending_text(replica, now) for replica in ended[:_TOLD])
    if hidden := [r.rank for r in ended[_TOLD:]]:
        yield f"… and {len(hidden)} more: {ranks_text(hidden)}; `atoll status {run}`"


def ending_text(replica: ReplicaStatus, now: float) -> str:
    """Such as `rank 1 failed at 14:08:02, after 16s: killed by SIGKILL (killed, exit code 137)`."""
    when = "" if replica.ended_at is None else f" at {_moment(replica.ended_at, now)}"
    if replica.ended_at is not None and replica.started_at is not None:
        when += f", after {units.duration_text(replica.ended_at - replica.started_at)}"
    why = one_line(replica.message.strip().partition("\n")[0])
    if why.startswith(f"{replica.state} "):
        why = why.removeprefix(f"{replica.state} ")  # `cancelled on request`
    words = [] if str(replica.reason) == str(replica.state) else [str(replica.reason)]
    words += [] if replica.exit_code is None else [f"exit code {replica.exit_code}"]
    tail = f" ({', '.join(words)})" if words else ""
    return f"rank {replica.rank} {replica.state}{when}" + (f": {why}" if why else "") + tail


def endings_json(replicas: Sequence[ReplicaStatus], counts: Mapping[int, int]) -> list[dict[str, Any]]:
    """For programs: how many lines of each rank were shown, and how it is or was."""
    names = ("rank", "state", "reason", "message", "exit_code", "attempt", "started_at", "ended_at")
    return [{**{name: getattr(r, name) for name in names}, "lines": counts.get(r.rank, 0)} for r in replicas]


def _moment(at: float, now: float) -> str:
    """The time of day here, with the date unless that is today."""
    is_today = time.localtime(at)[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", time.localtime(at))
