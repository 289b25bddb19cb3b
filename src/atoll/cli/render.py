"""The status and the result of a run as tables, texts and JSON. Pure: no store, no backend, no terminal."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from atoll import units
from atoll.cli.output import Cell, Column, Table, cut, one_line
from atoll.cli.waits import SILENT_S
from atoll.result import ReplicaOutcome, RunResult, again_text, ranks_text, warning_lines
from atoll.rounds.metrics import Waiting
from atoll.spec import Placement
from atoll.status import LOADING, Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.terminal_text import shown_line, shown_text

REJECTED = "updates_rejected"
ROUND_METRICS = {
    "wait_share": "wait",
    "hidden_share": "hidden",
    "bytes_up": "up",
    "bytes_down": "down",
    REJECTED: "rejected",
}
"""The metrics that rounds report by themselves, with the titles of their columns; the user's metrics come first."""
STATE_STYLES = {
    ReplicaState.PENDING: "warn",
    ReplicaState.RUNNING: "busy",
    ReplicaState.SUCCEEDED: "good",
    ReplicaState.FAILED: "bad",
    ReplicaState.CANCELLED: "warn",
    ReplicaState.LOST: "lost",
}
_HELD = frozenset(
    {Reason.CAPACITY, Reason.QUOTA, Reason.IMAGE, Reason.UNSCHEDULABLE, Reason.CONFIG, Reason.BACKEND, Reason.PREEMPTED}
)
_TOTAL_BYTES = "bytes"
_MOST_METRICS = 8
_FIXED_METRICS = 2
"""So many metrics keep their columns on a narrow terminal."""
_MOST_RESTARTS = 4
"""Restarted replicas that a line names."""
_MOST_LINKED = 4
"""Replicas whose web pages are listed."""
_MOST_ENDINGS = 8
"""Ended replicas that `atoll logs` describes one by one."""


def part_rows(placement: Placement) -> list[dict[str, Any]]:
    """The backend and the first and last rank of each part; empty if the run is on one backend."""
    found, first = list[dict[str, Any]](), 0
    for part in placement.parts:
        found.append({"backend": part.on, "ranks": [first, first + part.replicas - 1]})
        first += part.replicas
    return found


def state_cell(state: ReplicaState) -> Cell:
    return Cell(str(state), STATE_STYLES[state])


def replica_state_text(replica: ReplicaStatus) -> str:
    """The state; `loading` for a running replica whose entry point is not called yet."""
    return LOADING if is_loading(replica) else str(replica.state)


def is_loading(replica: ReplicaStatus) -> bool:
    return replica.state is ReplicaState.RUNNING and replica.progress.phase == LOADING


def counts_text(status: RunStatus) -> str:
    """Such as `1 loading, 3 running, 1 succeeded`."""
    counts = {str(state): count for state, count in status.counts().items()}
    if loading := sum(map(is_loading, status.replicas)):
        names = [name for state in counts for name in ([LOADING, state] if state == ReplicaState.RUNNING else [state])]
        counts |= {LOADING: loading, str(ReplicaState.RUNNING): counts[ReplicaState.RUNNING] - loading}
        counts = {name: counts[name] for name in names}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


class Rounds(NamedTuple):
    """How far the replicas that report are: the slowest of them decides."""

    done: int | None = None
    most_done: int | None = None
    total: int | None = None
    eta_s: float | None = None

    @classmethod
    def of(cls, status: RunStatus) -> Rounds:
        reports = [r.progress for r in reporting(status) if r.progress.round_no is not None]
        done = [p.round_no for p in reports if p.round_no is not None]
        totals = [p.rounds_total for p in reports if p.rounds_total is not None]
        etas = [p.eta_s for p in reports if p.eta_s is not None]
        return cls(min(done, default=None), max(done, default=None), max(totals, default=None), max(etas, default=None))

    def __str__(self) -> str:
        """Such as `6`, `6 of 40, about 12 min left` or `5 to 6 of 40`; empty before the first report."""
        if self.done is None:
            return ""
        count = str(self.done) if self.done == self.most_done else f"{self.done} to {self.most_done}"
        left = "" if self.eta_s is None else f", {units.rough_text(self.eta_s)} left"
        return count if self.total is None else f"{count} of {self.total}{left}"

    def to_json(self) -> dict[str, Any]:
        return {"rounds_done": self.done, "rounds_total": self.total, "eta_s": self.eta_s}


def problems_text(status: RunStatus) -> str:
    """Such as `disk full: /scratch (rank 2)`, without ranks if it concerns all that run; empty without a problem."""
    going = sum(not r.state.is_terminal for r in status.replicas)
    return "; ".join(
        text if len(ranks) == going else f"{text} ({ranks_text(ranks)})" for text, ranks in status.problems().items()
    )


def held_ranks(replicas: Iterable[ReplicaStatus]) -> dict[Reason, list[int]]:
    """The ranks that wait for what may take long or never come, by reason."""
    held: dict[Reason, list[int]] = {}
    for replica in replicas:
        if replica.state is ReplicaState.PENDING and replica.reason in _HELD:
            held.setdefault(replica.reason, []).append(replica.rank)
    return held


def held_text(replicas: Sequence[ReplicaStatus]) -> str:
    """Such as `image: ErrImagePull: … (ranks 0-1)`, with the message of the first rank; empty if no rank is held."""
    messages = {replica.rank: one_line(replica.message) for replica in replicas}
    return "; ".join(
        f"{reason}: {messages[ranks[0]]} ({ranks_text(ranks)})" for reason, ranks in held_ranks(replicas).items()
    )


def progress_line(status: RunStatus) -> str:
    """The run in one line: counts, rounds, and the mean of the first metric, over the replicas that still report."""
    parts = [counts_text(status)]
    reports = [replica.progress for replica in reporting(status)]
    rounds = Rounds.of(status)
    if text := str(rounds):
        parts.append(f"round {text}" if rounds.done == rounds.most_done else f"rounds {text}")
    for name in metric_names(status)[:1]:
        values = [progress.metrics[name] for progress in reports if name in progress.metrics]
        if values:
            parts.append(f"{name} {metric_text(name, sum(values) / len(values))}")
    notes = restarts_text(status), rejected_text(status), problems_text(status)
    return ", ".join([*parts, *filter(None, notes)])


def restarts_text(status: RunStatus) -> str:
    """Such as `restarted: rank 1 (attempt 0 ended: killed by SIGKILL)`; empty if no running replica was restarted."""
    again = [r for r in status.replicas if r.attempt and not r.state.is_terminal]
    named = (f"rank {r.rank} ({_first_line(r.message) or f'attempt {r.attempt}'})" for r in again[:_MOST_RESTARTS])
    ranks = ", ".join(named)
    more = f" and {len(again) - _MOST_RESTARTS} more" if again[_MOST_RESTARTS:] else ""
    return f"restarted: {ranks}{more}" if ranks else ""


def rejected_text(status: RunStatus) -> str:
    """Such as `updates rejected: 2 of rank 1`; empty if there are none."""
    counts = {r.rank: r.progress.metrics.get(REJECTED, 0.0) for r in status.replicas}
    return rejections_text({rank: int(count) for rank, count in counts.items() if 1 <= count < math.inf})


def rejections_text(counts: Mapping[int, int]) -> str:
    """The number of rejected updates of each rank, as text."""
    listed = ", ".join(f"{count} of rank {rank}" for rank, count in sorted(counts.items()))
    return f"updates rejected: {listed}" if listed else ""


def reporting(status: RunStatus) -> list[ReplicaStatus]:
    """The running replicas with a recent heartbeat; after the end, those that succeeded, or all if none did."""
    if status.is_terminal:
        return [r for r in status.replicas if r.state is ReplicaState.SUCCEEDED] or list(status.replicas)
    running = [r for r in status.replicas if r.state is ReplicaState.RUNNING]
    # Compare heartbeats with each other: the clocks of the replicas may differ from the local clock.
    newest = max((r.progress.beat_at or 0.0 for r in running), default=0.0)
    return [r for r in running if newest - (r.progress.beat_at or newest) <= SILENT_S]


def elapsed_s(status: RunStatus, now: float) -> float | None:
    """Seconds from the first start to the end or until now; None if no replica has started."""
    starts = [r.started_at for r in status.replicas if r.started_at is not None]
    if not starts:
        return None
    ends = [r.ended_at for r in status.replicas if r.ended_at is not None]
    end = max(ends) if status.is_terminal and ends else now
    return max(0.0, end - min(starts))


Field = tuple[Column, Callable[[ReplicaStatus], Cell]]
"""A column of a table of replicas, and its cell for one of them."""


def live_table(status: RunStatus, *, limit: int | None = None) -> Table:
    """The table of `atoll run`: rank, state, reason, round, metrics, last line."""
    return _replica_table(
        most_important(status.replicas, limit),
        [*_IDENTITY, *_backend_fields(status), _ROUND, *_metric_fields(status), _LAST_LINE],
    )


def status_table(status: RunStatus, *, now: float) -> Table:
    """The table of `atoll status`: all that is known about every rank, without empty columns."""
    fields: list[Field] = [
        *_IDENTITY,
        *_backend_fields(status),
        (_spare("exit"), lambda r: Cell("" if r.exit_code in (None, 0) else str(r.exit_code), "bad")),
        (_spare("attempt"), lambda r: Cell(str(r.attempt) if r.attempt else "", "warn")),
        (_spare("time"), lambda r: Cell(_age_text(r, now))),
        (_spare("heartbeat"), lambda r: _heartbeat_cell(r, now)),
        (_spare("id"), lambda r: Cell(one_line(r.native_id or ""), "dim")),
        _ROUND,
        *_metric_fields(status),
        _LAST_LINE,
    ]
    return _replica_table(status.replicas, fields).without_empty_columns()


def top_table(status: RunStatus, *, now: float, bars: Callable[[int], str], limit: int | None) -> Table:
    """The table of `atoll top`: like the status, with the trend of the first metric."""
    fields: list[Field] = [
        *_IDENTITY,
        *_backend_fields(status),
        (_spare("attempt"), lambda r: Cell(str(r.attempt))),
        _ROUND,
        *_metric_fields(status),
        *(
            (Column(f"{name} trend", is_spare=True), lambda r: Cell(bars(r.rank), "busy"))
            for name in shown_metrics(status)[:1]
        ),
        (_spare("heartbeat"), lambda r: _heartbeat_cell(r, now)),
        _LAST_LINE,
    ]
    return _replica_table(most_important(status.replicas, limit), fields)


def _replica_table(replicas: Sequence[ReplicaStatus], fields: Sequence[Field]) -> Table:
    rows = tuple(tuple(cell(replica) for _, cell in fields) for replica in replicas)
    return Table(tuple(column for column, _ in fields), rows)


def _backend_fields(status: RunStatus) -> list[Field]:
    """The column that says where each rank is, if the run is on several backends."""
    has_parts = any(replica.backend for replica in status.replicas)
    return [(Column("backend"), lambda r: Cell(r.backend or ""))] if has_parts else []


def _spare(title: str) -> Column:
    return Column(title, is_right=True, is_spare=True)


def _metric_fields(status: RunStatus) -> list[Field]:
    """The columns of metrics; on a narrow terminal those on the right are dropped."""
    return [
        (
            Column(ROUND_METRICS.get(name, name), is_right=True, is_spare=i >= _FIXED_METRICS),
            partial(_metric_cell, name),
        )
        for i, name in enumerate(shown_metrics(status))
    ]


def _metric_cell(name: str, replica: ReplicaStatus) -> Cell:
    value = replica.progress.metrics.get(name)
    return Cell("" if value is None else metric_text(name, value))


def _round_cell(replica: ReplicaStatus) -> Cell:
    round_no, total = replica.progress.round_no, replica.progress.rounds_total
    if round_no is None:
        return Cell("")
    return Cell(str(round_no) if total is None else f"{round_no} of {total}")


def _reason_cell(replica: ReplicaStatus) -> Cell:
    """The reason; empty if it only repeats the state."""
    is_repeated = replica.reason is Reason.OK or str(replica.reason) == str(replica.state)
    return Cell("" if is_repeated else str(replica.reason))


def most_important(replicas: Sequence[ReplicaStatus], limit: int | None) -> list[ReplicaStatus]:
    """At most `limit` replicas in rank order; those that failed, were lost or have not started are kept first."""
    if limit is None or len(replicas) <= limit:
        return list(replicas)
    order = {ReplicaState.FAILED: 0, ReplicaState.LOST: 0, ReplicaState.CANCELLED: 1, ReplicaState.PENDING: 2}
    chosen = sorted(replicas, key=lambda r: (order.get(r.state, 3), r.rank))[: max(0, limit)]
    return sorted(chosen, key=lambda r: r.rank)


def _heartbeat_cell(replica: ReplicaStatus, now: float) -> Cell:
    """The age of the last heartbeat; empty after the end."""
    at = replica.progress.beat_at
    if at is None or replica.state.is_terminal:
        return Cell("")
    age_s = max(0.0, now - at)
    return Cell(units.duration_text(age_s), "bad" if age_s > SILENT_S else "dim")


def _last_line_cell(replica: ReplicaStatus) -> Cell:
    """The backend's message if something is wrong, also with a replica that runs; else its last line of output."""
    is_fine = replica.state is ReplicaState.SUCCEEDED or replica.reason is Reason.OK
    if replica.message and not is_fine:
        return Cell(_first_line(replica.message))
    return Cell(one_line(replica.progress.last_line), "dim")


def _first_line(text: str) -> str:
    return one_line(text.partition("\n")[0])


def _age_text(replica: ReplicaStatus, now: float) -> str:
    """How long the replica has run, or ran."""
    if replica.started_at is None:
        return ""
    return units.duration_text((now if replica.ended_at is None else replica.ended_at) - replica.started_at)


_IDENTITY: list[Field] = [
    (Column("rank", is_right=True), lambda r: Cell(str(r.rank), "bold")),
    (Column("state"), lambda r: Cell(replica_state_text(r), STATE_STYLES[r.state])),
    (Column("reason"), _reason_cell),
]
_ROUND: Field = (Column("round", is_right=True), _round_cell)
_LAST_LINE: Field = (Column("last line", is_flexible=True), _last_line_cell)


def metric_names(status: RunStatus) -> list[str]:
    """The metrics that any rank has reported: `loss`, the user's other metrics, then those of the rounds."""
    names = {name for replica in status.replicas for name in replica.progress.metrics}
    if names & {"bytes_up", "bytes_down"}:
        names.discard(_TOTAL_BYTES)
    order = {name: place for place, name in enumerate(ROUND_METRICS)}
    return sorted(names, key=lambda name: (order.get(name, -1), name != "loss", name))


def shown_metrics(status: RunStatus) -> list[str]:
    """The metrics that get a column."""
    names = metric_names(status)
    users, ours = [n for n in names if n not in ROUND_METRICS], [n for n in names if n in ROUND_METRICS]
    return users[: max(_FIXED_METRICS, _MOST_METRICS - len(ours))] + ours


def metric_text(name: str, value: float) -> str:
    """Bytes with a unit, shares in per cent, any other metric as a number."""
    if name == _TOTAL_BYTES or name.startswith("bytes_") or name.endswith("_bytes"):
        return units.size_text(value)
    if name.endswith("_share") and 0.0 <= value <= 1.0:
        return percent(value)
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def no_output_text(ranks: Collection[int], *, is_filtered: bool) -> str:
    """Such as `rank 1 printed nothing`; with a filter, `… no matching line`."""
    return f"{ranks_text(ranks)} printed {'no matching line' if is_filtered else 'nothing'}" if ranks else ""


def ending_lines(replicas: Sequence[ReplicaStatus], run: str, now: float) -> Iterator[str]:
    """A line for each replica that ended without success; of many, the first few and a summary."""
    ended = [r for r in replicas if r.state.is_terminal and r.state is not ReplicaState.SUCCEEDED]
    yield from (ending_text(replica, now) for replica in ended[:_MOST_ENDINGS])
    if hidden := [r.rank for r in ended[_MOST_ENDINGS:]]:
        yield f"… and {len(hidden)} more: {ranks_text(hidden)}; `atoll status {run}` shows them"


def ending_text(replica: ReplicaStatus, now: float) -> str:
    """Such as `rank 1 failed at 14:08:02, after 16s: killed by SIGKILL (killed, exit code 137)`."""
    when = "" if replica.ended_at is None else f" at {_moment(replica.ended_at, now)}"
    if replica.ended_at is not None and replica.started_at is not None:
        when += f", after {units.duration_text(replica.ended_at - replica.started_at)}"
    why = _first_line(replica.message.strip())
    if why.startswith(f"{replica.state} "):
        why = why.removeprefix(f"{replica.state} ")  # `cancelled on request`
    codes = [] if str(replica.reason) == str(replica.state) else [str(replica.reason)]
    codes += [] if replica.exit_code is None else [f"exit code {replica.exit_code}"]
    tail = f" ({', '.join(codes)})" if codes else ""
    return f"rank {replica.rank} {replica.state}{when}" + (f": {why}" if why else "") + tail


def _moment(at: float, now: float) -> str:
    """The local time of day, with the date if it is not today."""
    is_today = time.localtime(at)[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", time.localtime(at))


def result_lines(outcomes: Iterable[ReplicaOutcome], *, width: int | None = None) -> list[str]:
    """One line per rank: the value that it returned, as JSON, cut to `width`; or its state."""
    lines = []
    for outcome in outcomes:
        value = json.dumps(outcome.result, ensure_ascii=False, default=str)
        line = f"rank {outcome.rank}: {value if outcome.state is ReplicaState.SUCCEEDED else outcome.state}"
        lines.append(line if width is None else cut(line, width))
    return lines


def link_lines(links: Mapping[int, Mapping[str, str]], run: str) -> Iterator[str]:
    """A line for each page about a replica; of many replicas, those of the first few and a summary."""
    linked = [rank for rank, pages in links.items() if pages]
    for rank in linked[:_MOST_LINKED]:
        yield from (f"rank {rank} {name}: {address}" for name, address in links[rank].items())
    if hidden := linked[_MOST_LINKED:]:
        yield f"… and the pages of {ranks_text(hidden)}; `atoll status {run} --json` has them"


def success_text(result: RunResult, took_s: float | None) -> str:
    """The last line of a run that succeeded: the number of replicas, the time, the restarts."""
    count = len(result.outcomes)
    took = f" in {units.duration_text(took_s)}" if took_s is not None else ""
    text = f"run `{result.run_id}` succeeded: {count} replica{'' if count == 1 else 's'}{took}"
    return "; ".join(filter(None, (text, again_text(result.outcomes))))


def warnings_text(ends: Iterable[ReplicaOutcome | ReplicaStatus]) -> str:
    """The warnings about return values, one line each; empty without any."""
    return "\n".join(f"warning: {one_line(line)}" for line in warning_lines(ends))


def next_commands(run_id: str) -> list[tuple[str, str]]:
    """The commands for a run that was started."""
    run = shlex.quote(run_id)
    return [
        ("watch", f"atoll top {run}"),
        ("logs", f"atoll logs {run} -f"),
        ("wait", f"atoll wait {run}"),
        ("result", f"atoll result {run}"),
        ("stop", f"atoll cancel {run}"),
    ]


def status_json(run_id: str, status: RunStatus, waiting: Waiting | None = None) -> dict[str, Any]:
    """The status for programs; with `waiting` only if a round waits for a rank."""
    counts = {str(state): count for state, count in status.counts().items()}
    more = {} if waiting is None else {"waiting": _waiting_json(waiting)}
    known = {"counts": counts, "progress": Rounds.of(status).to_json(), "problems": list(status.problems())}
    shown = status.to_json()
    for replica in shown["replicas"]:
        replica["message"] = shown_text(replica["message"])
        replica["warnings"] = list(map(shown_text, replica["warnings"]))
        replica["progress"]["last_line"] = shown_line(replica["progress"]["last_line"])
    return {"run_id": run_id, **known, **shown, **more}


def result_json(result: RunResult) -> dict[str, Any]:
    """The result for programs: values as they were returned, and what replicas printed as a terminal shows it."""
    shown = result.to_json()
    for outcome in shown["outcomes"]:
        outcome["message"] = shown_text(outcome["message"])
        outcome["warnings"] = list(map(shown_text, outcome["warnings"]))
        outcome["last_lines"] = [shown_line(line) for line in outcome["last_lines"]]
        if outcome["error"] is not None:
            outcome["error"] |= {name: shown_text(outcome["error"][name]) for name in ("message", "traceback")}
    return shown


def _waiting_json(waiting: Waiting) -> dict[str, Any]:
    outlook = waiting.outlook
    then = {} if outlook is None else {"then": "go_on" if outlook.goes_on else "give_up", "until": outlook.until}
    return {"round": waiting.round_no, "for": list(waiting.missing), **then}


def endings_json(
    replicas: Sequence[ReplicaStatus], counts: Mapping[int, int], links: Mapping[int, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The `ranks` of `atoll logs --json`: the state and links of each rank, and how many of its lines were shown."""
    names = ("rank", "backend", "state", "reason", "message", "exit_code", "attempt", "started_at", "ended_at")
    return [
        {
            **{name: getattr(r, name) for name in names},
            "message": shown_text(r.message),
            "lines": counts.get(r.rank, 0),
            "links": links.get(r.rank, {}),
        }
        for r in replicas
    ]
