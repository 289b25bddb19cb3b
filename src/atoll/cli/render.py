"""Status, results and plans as tables and texts. Pure: what was learned goes in, what is shown comes out.

Metrics of replicas as columns: which ones, in which order, and in whose units. Pure.

What `atoll logs` adds to what replicas wrote: who wrote nothing, and how those ended who did not succeed. Pure.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from atoll import units
from atoll.cli.output import Cell, Column, Table, cut, one_line
from atoll.cli.waits import SILENT_S
from atoll.result import ReplicaOutcome, RunResult, again_text, ranks_text
from atoll.rounds.metrics import Waiting
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus

REJECTED = "updates_rejected"
OURS = {"wait_share": "wait", "hidden_share": "hidden", "bytes_up": "up", "bytes_down": "down", REJECTED: "rejected"}
"""What training by rounds reports by itself, and how its column is called; it comes after what the user logs."""
_TOTAL = "bytes"
_MOST = 8
_SURE = 2
"""Metrics that stay when the terminal is narrow."""


def metric_names(status: RunStatus) -> list[str]:
    """Names of metrics that some rank reported: `loss`, the user's own, ours."""
    names = {name for replica in status.replicas for name in replica.progress.metrics}
    if names & {"bytes_up", "bytes_down"}:
        names.discard(_TOTAL)
    ours = list(OURS)
    return sorted(names, key=lambda name: (ours.index(name) if name in OURS else -1, name != "loss", name))


def shown_metrics(status: RunStatus) -> list[str]:
    """Those that get a column."""
    names = metric_names(status)
    users = [name for name in names if name not in OURS]
    return users[: max(_SURE, _MOST - (len(names) - len(users)))] + [name for name in names if name in OURS]


def metric_columns(names: list[str]) -> list[Column]:
    """Narrow terminals lose those on the right."""
    return [Column(OURS.get(name, name), is_right=True, is_spare=i >= _SURE) for i, name in enumerate(names)]


def metric_cell(replica: ReplicaStatus, name: str) -> Cell:
    value = replica.progress.metrics.get(name)
    return Cell("" if value is None else metric_text(name, value))


def metric_text(name: str, value: float) -> str:
    """Bytes as amounts, shares in per cent, anything else as a number."""
    if name == _TOTAL or name.startswith("bytes_") or name.endswith("_bytes"):
        return units.size_text(value)
    if name.endswith("_share") and 0.0 <= value <= 1.0:
        return percent(value)
    return number_text(value)


def number_text(value: float) -> str:
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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


_LISTED = 4
"""Restarted replicas that are named in a line."""
STATE_STYLES = {
    ReplicaState.PENDING: "warn",
    ReplicaState.RUNNING: "busy",
    ReplicaState.SUCCEEDED: "good",
    ReplicaState.FAILED: "bad",
    ReplicaState.CANCELLED: "warn",
    ReplicaState.LOST: "lost",
}


def state_cell(state: ReplicaState) -> Cell:
    return Cell(str(state), STATE_STYLES[state])


def counts_text(status: RunStatus) -> str:
    """Such as `3 running, 1 succeeded`."""
    return ", ".join(f"{count} {state}" for state, count in status.counts().items())


def progress_line(status: RunStatus) -> str:
    """How the run is doing, in one line for a log: counts, the rounds, and the mean of the leading metric.

    What those who are over or silent said last is not how the run is doing.
    """
    parts = [counts_text(status)]
    heard = [replica.progress for replica in alive(status)]
    rounds = [progress.round_no for progress in heard if progress.round_no is not None]
    if rounds:
        parts.append(f"round {min(rounds)}" if min(rounds) == max(rounds) else f"rounds {min(rounds)} to {max(rounds)}")
    for name in metric_names(status)[:1]:
        values = [progress.metrics[name] for progress in heard if name in progress.metrics]
        if values:
            parts.append(f"{name} {metric_text(name, sum(values) / len(values))}")
    return ", ".join([*parts, *filter(None, [restarts_text(status), rejected_text(status)])])


def restarts_text(status: RunStatus) -> str:
    """Such as `restarted: rank 1 (attempt 0 ended: killed by SIGKILL)`; empty if nobody is at a second try."""
    again = [r for r in status.replicas if r.attempt and not r.state.is_terminal]
    told = ", ".join(f"rank {r.rank} ({_first_line(r.message) or f'try {r.attempt}'})" for r in again[:_LISTED])
    more = f" and {len(again) - _LISTED} more" if again[_LISTED:] else ""
    return f"restarted: {told}{more}" if told else ""


def rejected_text(status: RunStatus) -> str:
    """Such as `updates rejected: 2 of rank 1`; empty if none was."""
    counts = {r.rank: r.progress.metrics.get(REJECTED, 0.0) for r in status.replicas}
    return rejections_text({rank: int(count) for rank, count in counts.items() if 1 <= count < math.inf})


def rejections_text(counts: Mapping[int, int]) -> str:
    """Rank → how many, in words."""
    told = ", ".join(f"{count} of rank {rank}" for rank, count in sorted(counts.items()))
    return f"updates rejected: {told}" if told else ""


def alive(status: RunStatus) -> list[ReplicaStatus]:
    """Those who run and are heard of; of a run that is over, those who succeeded, or everybody if nobody did."""
    if status.is_terminal:
        return [r for r in status.replicas if r.state is ReplicaState.SUCCEEDED] or list(status.replicas)
    running = [r for r in status.replicas if r.state is ReplicaState.RUNNING]
    newest = max((r.progress.beat_at or 0.0 for r in running), default=0.0)  # by their clocks, which ours may not match
    return [r for r in running if newest - (r.progress.beat_at or newest) <= SILENT_S]


def elapsed_s(status: RunStatus, now: float) -> float | None:
    """How long the run has been going, or went; None if nothing has started."""
    starts = [r.started_at for r in status.replicas if r.started_at is not None]
    if not starts:
        return None
    ends = [r.ended_at for r in status.replicas if r.ended_at is not None]
    end = max(ends) if status.is_terminal and ends else now
    return max(0.0, end - min(starts))


def live_table(status: RunStatus, *, limit: int | None = None) -> Table:
    """What `atoll run` redraws: rank, state, reason, round, metrics, last line."""
    metrics = shown_metrics(status)
    columns = (
        Column("rank", is_right=True),
        Column("state"),
        Column("reason"),
        Column("round", is_right=True),
        *metric_columns(metrics),
        Column("last line", is_flexible=True),
    )
    rows = tuple(
        (
            Cell(str(r.rank), "bold"),
            state_cell(r.state),
            Cell(reason_text(r)),
            round_cell(r),
            *(metric_cell(r, name) for name in metrics),
            detail_cell(r),
        )
        for r in most_telling(status.replicas, limit)
    )
    return Table(columns, rows)


def status_table(status: RunStatus, *, now: float) -> Table:
    """What `atoll status` shows: all that is known about every rank; columns nobody fills are left out."""
    metrics = shown_metrics(status)
    columns = (
        Column("rank", is_right=True),
        Column("state"),
        Column("reason"),
        Column("exit", is_right=True, is_spare=True),
        Column("try", is_right=True, is_spare=True),
        Column("for", is_right=True, is_spare=True),
        Column("beat", is_right=True, is_spare=True),
        Column("id", is_right=True, is_spare=True),
        Column("round", is_right=True),
        *metric_columns(metrics),
        Column("last line", is_flexible=True),
    )
    rows = tuple(
        (
            Cell(str(r.rank), "bold"),
            state_cell(r.state),
            Cell(reason_text(r)),
            Cell("" if r.exit_code in (None, 0) else str(r.exit_code), "bad"),
            Cell(str(r.attempt) if r.attempt else "", "warn"),
            Cell(age_of(r, now)),
            beat_cell(r, now),
            Cell(one_line(r.native_id or ""), "dim"),
            round_cell(r),
            *(metric_cell(r, name) for name in metrics),
            detail_cell(r),
        )
        for r in status.replicas
    )
    return Table(columns, rows).without_empty_columns()


def top_table(status: RunStatus, *, now: float, bars: Callable[[int], str], limit: int | None) -> Table:
    """What `atoll top` redraws: like the status, with the trend of the leading metric."""
    metrics = shown_metrics(status)
    leading = metrics[:1]
    columns = (
        Column("rank", is_right=True),
        Column("state"),
        Column("reason"),
        Column("try", is_right=True, is_spare=True),
        Column("round", is_right=True),
        *metric_columns(metrics),
        *(Column(f"{name} trend", is_spare=True) for name in leading),
        Column("beat", is_right=True, is_spare=True),
        Column("last line", is_flexible=True),
    )
    rows = tuple(
        (
            Cell(str(r.rank), "bold"),
            state_cell(r.state),
            Cell(reason_text(r)),
            Cell(str(r.attempt)),
            round_cell(r),
            *(metric_cell(r, name) for name in metrics),
            *(Cell(bars(r.rank), "busy") for _ in leading),
            beat_cell(r, now),
            detail_cell(r),
        )
        for r in most_telling(status.replicas, limit)
    )
    return Table(columns, rows)


def most_telling(replicas: Sequence[ReplicaStatus], limit: int | None) -> list[ReplicaStatus]:
    """At most `limit` of them, those in trouble first chosen, shown in rank order."""
    if limit is None or len(replicas) <= limit:
        return list(replicas)
    order = {ReplicaState.FAILED: 0, ReplicaState.LOST: 0, ReplicaState.CANCELLED: 1, ReplicaState.PENDING: 2}
    chosen = sorted(replicas, key=lambda r: (order.get(r.state, 3), r.rank))[: max(0, limit)]
    return sorted(chosen, key=lambda r: r.rank)


def reason_text(replica: ReplicaStatus) -> str:
    """Empty where the state says the same."""
    return "" if replica.reason is Reason.OK or str(replica.reason) == str(replica.state) else str(replica.reason)


def round_cell(replica: ReplicaStatus) -> Cell:
    round_no = replica.progress.round_no
    return Cell("" if round_no is None else str(round_no))


def beat_cell(replica: ReplicaStatus, now: float) -> Cell:
    """The age of the last heartbeat, while it matters."""
    at = replica.progress.beat_at
    if at is None or replica.state.is_terminal:
        return Cell("")
    age_s = max(0.0, now - at)
    return Cell(units.duration_text(age_s), "bad" if age_s > SILENT_S else "dim")


def detail_cell(replica: ReplicaStatus) -> Cell:
    """Why it is not going well, in the service's words; otherwise the last line of output."""
    if replica.state not in (ReplicaState.RUNNING, ReplicaState.SUCCEEDED) and replica.message:
        return Cell(_first_line(replica.message))
    return Cell(one_line(replica.progress.last_line), "dim")


def _first_line(text: str) -> str:
    return one_line(text.partition("\n")[0])


def age_of(replica: ReplicaStatus, now: float) -> str:
    if replica.started_at is None:
        return ""
    return units.duration_text((now if replica.ended_at is None else replica.ended_at) - replica.started_at)


def result_lines(outcomes: Iterable[ReplicaOutcome], *, width: int | None = None) -> list[str]:
    """One line per rank: what it returned, as JSON. Cut to `width` for people."""
    lines = []
    for outcome in outcomes:
        value = json.dumps(outcome.result, ensure_ascii=False, default=str)
        line = f"rank {outcome.rank}: {value if outcome.state is ReplicaState.SUCCEEDED else outcome.state}"
        lines.append(line if width is None else cut(line, width))
    return lines


def verdict(result: RunResult, took_s: float | None) -> str:
    """The last line of a run that went well: how many there were, how long it took, who was restarted."""
    count = len(result.outcomes)
    took = f" in {units.duration_text(took_s)}" if took_s is not None else ""
    said = f"run `{result.run_id}` succeeded: {count} replica{'' if count == 1 else 's'}{took}"
    return "; ".join(filter(None, (said, again_text(result.outcomes))))


def next_commands(run_id: str, store: str | None = None) -> list[tuple[str, str]]:
    """How to come back to a run; `store` where the local index would not know it."""
    import shlex

    tail = shlex.quote(run_id) + (f" --store {shlex.quote(store)}" if store else "")
    return [
        ("watch", f"atoll top {tail}"),
        ("logs", f"atoll logs {tail} -f"),
        ("wait", f"atoll wait {tail}"),
        ("result", f"atoll result {tail}"),
        ("stop", f"atoll cancel {tail}"),
    ]


def status_json(run_id: str, status: RunStatus, waiting: Waiting | None = None) -> dict[str, Any]:
    """For programs. `waiting` is there when a round waits for somebody."""
    counts = {str(state): count for state, count in status.counts().items()}
    told = {} if waiting is None else {"waiting": _waiting_json(waiting)}
    return {"run_id": run_id, "counts": counts, **status.to_json(), **told}


def _waiting_json(waiting: Waiting) -> dict[str, Any]:
    outlook = waiting.outlook
    then = {} if outlook is None else {"then": "go_on" if outlook.goes_on else "give_up", "until": outlook.until}
    return {"round": waiting.round_no, "for": list(waiting.missing), **then}
