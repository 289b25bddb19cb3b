"""The result of a run: one outcome for each rank, and the text that explains a failure. Pure.

The text groups ranks that failed in the same way. Ranks that failed by themselves come before ranks that ended because
of others. A long traceback or message is shortened in the middle: it begins where the error was raised and ends with
the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from atoll import errors
from atoll.errors import RunFailed
from atoll.status import ON_REQUEST, Reason, ReplicaState, ReplicaStatus, RunStatus

RESTARTS = "`--max-restarts N`"
_LAST_LINE_CHARS = 2000
"""A progress bar can turn a whole log into one line."""
_MOST_WAYS = 8
_FIRST_LINES, _LAST_LINES = 10, 20
_MESSAGE_LINES = 5
"""Lines of each end of a message below a traceback, so that the frame that raised it stays visible."""
_LINE_CHARS = 2000
"""A message can be one line as long as a log."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a replica, as text."""

    type: str
    message: str
    traceback: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that caused it: their update failed a check or did not arrive."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ErrorReport:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known | {"ranks": tuple(data.get("ranks", ()))})


@dataclass(frozen=True)
class ReplicaOutcome:
    """How one rank ended; from its own record if it wrote one."""

    rank: int
    attempt: int
    state: ReplicaState
    reason: Reason
    message: str = ""
    exit_code: int | None = None
    error: ErrorReport | None = None
    result: Any = None
    round_no: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    started_at: float | None = None
    ended_at: float | None = None
    host: str | None = None
    last_lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Parts of the returned value that are not JSON, so that `result` has their `repr`."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, result=None)), "result": self.result}  # `asdict` would copy the result

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaOutcome:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}  # a later version may have more fields
        known |= {"state": ReplicaState(data["state"]), "reason": Reason(data["reason"])}
        known["error"] = ErrorReport.from_json(data["error"]) if data.get("error") else None
        known |= {name: tuple(data.get(name, ())) for name in ("last_lines", "warnings")}
        return cls(**known)


@dataclass(frozen=True)
class RunResult:
    """The outcome of every rank, in order."""

    run_id: str
    outcomes: tuple[ReplicaOutcome, ...]
    could_restart: bool = False
    """The run has no restarts, and the backend supports them."""
    rounds: int = 0
    """The number of committed rounds; read only if a rank did not succeed."""

    @property
    def ok(self) -> bool:
        """Whether every rank succeeded."""
        return all(outcome.state is ReplicaState.SUCCEEDED for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        """The return value of each rank, in rank order."""
        return [outcome.result for outcome in self.outcomes]

    @property
    def warnings(self) -> list[str]:
        """The warnings of all ranks, as lines of text."""
        return warning_lines(self.outcomes)

    def failures(self) -> list[ReplicaOutcome]:
        """Outcomes of the ranks that did not succeed."""
        return [outcome for outcome in self.outcomes if outcome.state is not ReplicaState.SUCCEEDED]

    def raise_for_failures(self) -> RunResult:
        """Return self, or raise `RunFailed` with ranks, reasons, last lines and the command that shows more."""
        failed = self.failures()
        if failed:
            text = failure_text(self.run_id, self.outcomes, rounds=self.rounds)
            hint = failure_hint(self.run_id, failed, could_restart=self.could_restart)
            if self.rounds and not completion_text(self.outcomes, self.rounds):
                hint += f"; `{resume_command(self.run_id)}` continues after round {self.rounds - 1}"
            raise RunFailed(text, result=self, hint=hint)
        return self

    def to_json(self) -> dict[str, Any]:
        outcomes = [outcome.to_json() for outcome in self.outcomes]
        is_complete = self.ok or bool(completion_text(self.outcomes, self.rounds))
        return {"run_id": self.run_id, "ok": self.ok, "is_complete": is_complete, "outcomes": outcomes}


def join(
    status: RunStatus,
    outcomes: Mapping[int, ReplicaOutcome],
    *,
    cancelled: str | None = None,
    over: Collection[int] = (),
    writes_outcomes: bool = True,
) -> RunStatus:
    """The backend's status, corrected by the outcomes in the store.

    The store corrects three cases: the backend has no record (LOST), it tells no exit code of a failure, and a process
    ended with exit code 0 but wrote no outcome. The last is a success if the replicas run a program that writes no
    outcomes.

    `cancelled` is the recorded reason of a cancellation: a replica that was preempted then counts as cancelled, except
    for the ranks in `over`, which had ended before it.
    """
    return status.with_replicas(
        _with_times(_join_one(r, o, None if r.rank in over else cancelled, writes_outcomes), o)
        for r, o in ((r, outcomes.get(r.rank)) for r in status.replicas)
    )


def _with_times(replica: ReplicaStatus, outcome: ReplicaOutcome | None) -> ReplicaStatus:
    """The status of a replica that has ended, with the times of its outcome if the backend does not tell its end."""
    if outcome is None or not replica.state.is_terminal or replica.ended_at is not None:
        return replica
    if outcome.attempt < replica.attempt:
        return replica
    started_at = outcome.started_at if replica.started_at is None else replica.started_at
    return replace(replica, started_at=started_at, ended_at=outcome.ended_at)


def with_cancelled_ranks(status: RunStatus, cancelled: Mapping[int, str]) -> RunStatus:
    """The status with these ranks, which were cancelled while they ran, as cancelled unless they succeeded.

    `cancelled` has the recorded reason of each.
    """
    return status.with_replicas(
        replace(r, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED, message=cancelled[r.rank])
        if r.rank in cancelled and r.state in (ReplicaState.FAILED, ReplicaState.LOST)
        else r
        for r in status.replicas
    )


def _join_one(
    replica: ReplicaStatus, outcome: ReplicaOutcome | None, cancelled: str | None, writes_outcomes: bool
) -> ReplicaStatus:
    if replica.state is ReplicaState.CANCELLED and cancelled not in (None, ON_REQUEST):
        return replace(replica, message=cancelled or "")  # the backend does not know the reason
    is_older = outcome is not None and outcome.attempt < replica.attempt
    has_failed = outcome is not None and outcome.state is ReplicaState.FAILED
    is_denied = outcome is None or is_older or has_failed
    if replica.state is ReplicaState.SUCCEEDED and is_denied and writes_outcomes:
        message = "the process ended with exit code 0 but wrote no outcome to the store"
        why = f"{message}: {replica.message}" if replica.message else message
        return replace(replica, state=ReplicaState.FAILED, reason=Reason.NO_OUTCOME, message=why)
    if outcome is None or is_older:
        if replica.state is ReplicaState.LOST and cancelled:  # the cancellation may have removed it from the backend
            return replace(replica, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED, message=cancelled)
        return replica
    if replica.state is ReplicaState.LOST:
        if cancelled and outcome.reason is Reason.PREEMPTED:
            return replace(replica, state=ReplicaState.CANCELLED, reason=Reason.CANCELLED, message=cancelled)
        return replace(
            replica,
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            exit_code=outcome.exit_code,
            attempt=outcome.attempt,
            warnings=outcome.warnings,
        )
    if replica.state is outcome.state is ReplicaState.FAILED and replica.exit_code is None:
        # A backend that tells no exit code can only guess that the user's code has failed.
        reason = outcome.reason if replica.reason is Reason.USER_ERROR else replica.reason
        replica = replace(replica, reason=reason, exit_code=outcome.exit_code)
    # Supervisors in containers restart, and backends do not count.
    return replace(replica, attempt=outcome.attempt, warnings=outcome.warnings)


def outcome_of(status: ReplicaStatus, outcome: ReplicaOutcome | None) -> ReplicaOutcome:
    """The outcome to show for a rank: its own record, with the joined state."""
    if outcome is None or outcome.attempt < status.attempt:
        return ReplicaOutcome(
            status.rank,
            status.attempt,
            status.state,
            status.reason,
            status.message,
            status.exit_code,
            started_at=status.started_at,
            ended_at=status.ended_at,
            host=status.host,
        )
    exit_code = outcome.exit_code if status.exit_code is None else status.exit_code
    # A replica does not know why it is stopped; the status has the reason (a timeout, or a failure of another rank).
    if status.state is outcome.state and status.reason not in (Reason.TIMEOUT, Reason.CANCELLED):
        return replace(outcome, exit_code=exit_code)
    message = status.message or outcome.message
    return replace(outcome, state=status.state, reason=status.reason, message=message, exit_code=exit_code)


def last_lines(lines: Callable[[], Iterable[str]], count: int = 5) -> tuple[str, ...]:
    """The last lines of a log, or a note if the log cannot be read."""
    from atoll.errors import AtollError

    try:
        return tuple(line[-_LAST_LINE_CHARS:] for line in lines())[-count:]
    except AtollError as exc:
        return (f"[no log: {exc.message}]",)


def failure_text(run_id: str, outcomes: Sequence[ReplicaOutcome], *, rounds: int = 0) -> str:
    """How many replicas did not succeed, whether training is complete, and how each of them ended, the cause first."""
    failed = [outcome for outcome in outcomes if outcome.state is not ReplicaState.SUCCEEDED]
    lines = [f"run `{run_id}`: {len(failed)} of {len(outcomes)} replicas did not succeed"]
    lines += [f"  {note}" for note in (completion_text(outcomes, rounds), again_text(outcomes)) if note]
    ways: dict[tuple[str, ...], list[int]] = {}
    for outcome in by_cause(failed):
        ways.setdefault(tuple(_way(outcome)), []).append(outcome.rank)
    for way, ranks in list(ways.items())[:_MOST_WAYS]:
        head, *rest = way
        lines += [f"  {ranks_text(ranks)}: {head}", *rest]
    hidden = [rank for ranks in list(ways.values())[_MOST_WAYS:] for rank in ranks]
    if hidden:
        lines.append(f"  … and {len(hidden)} more: {ranks_text(hidden)}")
    return "\n".join(lines)


def completion_text(outcomes: Sequence[ReplicaOutcome], rounds: int) -> str:
    """Such as `training is complete: ranks 0,2 went on to the last of its 100 rounds`; empty if it is not complete.

    A rank that returned has finished its rounds, unless it left too early: then another rank lost the quorum.
    """
    done = [outcome.rank for outcome in outcomes if outcome.state is ReplicaState.SUCCEEDED]
    is_cut_off = any(o.reason is Reason.CANCELLED or _is_of(o, errors.QuorumLost) for o in outcomes)
    if not rounds or not done or is_cut_off:
        return ""
    return f"training is complete: {ranks_text(done)} went on to the last of its {rounds} rounds"


def again_text(outcomes: Iterable[ReplicaOutcome]) -> str:
    """Such as `rank 1 was restarted twice, ranks 2-3 once`; empty without restarts."""
    counts: dict[int, list[int]] = {}
    for outcome in outcomes:
        if outcome.attempt:
            counts.setdefault(outcome.attempt, []).append(outcome.rank)
    text = ""
    for count, ranks in sorted(counts.items(), reverse=True):
        often = {1: "once", 2: "twice"}.get(count, f"{count} times")
        verb = f" {'was' if len(ranks) == 1 else 'were'} restarted" if not text else ""
        text += f"{', ' if text else ''}{ranks_text(ranks)}{verb} {often}"
    return text


def resume_command(run_id: str) -> str:
    """The command that continues a run that is over."""
    import shlex

    return f"atoll resume {shlex.quote(run_id)}"


def failure_hint(run_id: str, failed: Sequence[ReplicaOutcome], *, could_restart: bool = False) -> str:
    """The command that shows the log of the rank that failed first, and options that avoid this."""
    import shlex

    cause = by_cause(failed)[0]
    way = list(_way(cause))
    blamed = cause.error.ranks if cause.error is not None else ()
    # Ranks that failed in the same way name the same rank or none; the lowest of them is as good as any.
    rank = blamed[0] if blamed else min(outcome.rank for outcome in failed if list(_way(outcome)) == way)
    logs = f"atoll logs {shlex.quote(run_id)} --rank {rank}"
    is_passing = cause.reason in (Reason.KILLED, Reason.PREEMPTED) or _is_of(cause, errors.StoreUnavailable)
    may_help = could_restart and is_passing
    if any(_is_of(outcome, errors.QuorumLost) for outcome in failed) and not _is_of(cause, errors.RoundError):
        return f"{logs}; {better_text(could_restart=may_help)}"
    return f"{logs}; with {RESTARTS} a replica that ends like this is restarted" if may_help else logs


def better_text(*, could_restart: bool, could_go_on: bool = True) -> str:
    """Options that avoid waiting for a replica that has ended."""
    ways = [f"{RESTARTS} restarts such a replica"] if could_restart else []
    ways += ["`--fail-fast` ends the run at once"]
    ways += ["a quorum, as in `DiLoCo(quorum=N)`, continues without it"] if could_go_on else []
    return f"next time, {', '.join(ways[:-1])}{' and ' if ways[1:] else ''}{ways[-1]}"


def by_cause(failed: Iterable[ReplicaOutcome]) -> list[ReplicaOutcome]:
    """Ranks that failed by themselves first, the earliest before the others; cancelled ranks last."""
    return sorted(failed, key=lambda o: (_distance(o), o.ended_at is None, o.ended_at or 0.0, o.rank))


def _distance(outcome: ReplicaOutcome) -> int:
    """How far the end of a replica is from the cause of the failure; 0 if it failed by itself."""
    if outcome.reason is Reason.CANCELLED:
        return 3
    if _is_of(outcome, errors.RoundError):
        return 2  # it waited for other ranks, or could not use their updates
    return int(outcome.reason in (Reason.TIMEOUT, Reason.LOST))


def _is_of(outcome: ReplicaOutcome, error_class: type[errors.AtollError]) -> bool:
    """Whether an error of this Atoll class ended the replica."""
    module, _, kind = (outcome.error.type if outcome.error is not None else "").rpartition(".")
    found = getattr(errors, kind, None) if module == errors.__name__ else None
    return isinstance(found, type) and issubclass(found, error_class)


def warning_lines(ends: Iterable[ReplicaOutcome | ReplicaStatus]) -> list[str]:
    """Such as `ranks 0-3: result.model: a `Module` is not JSON; its repr is kept`: one line for equal warnings."""
    ranks: dict[str, list[int]] = {}
    for end in ends:
        for warning in end.warnings:
            ranks.setdefault(warning, []).append(end.rank)
    return [f"{ranks_text(those)}: {warning}" for warning, those in ranks.items()]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 0-3,7`, in the form that `--rank` accepts."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if listed.isdecimal() else f"ranks {listed}"


def _way(outcome: ReplicaOutcome) -> Iterator[str]:
    """How a rank ended, without its number, so that equal ends can be grouped."""
    message, *more = outcome.message.strip().splitlines() or ["no reason given"]
    yield _head(outcome, _cut(message))
    error = outcome.error
    if error is None or not error.traceback or outcome.reason in (Reason.CANCELLED, Reason.TIMEOUT):
        yield from _indented(more)
        yield from (f"    | {line}" for line in outcome.last_lines)
        return
    if error.message not in outcome.message:  # else the traceback ends with all of it
        yield from _indented(more)
    yield from _raised(error)


def _head(outcome: ReplicaOutcome, message: str) -> str:
    """State, reason, exit code and message, without repetition: `cancelled on request` has all three."""
    state, reason = str(outcome.state), str(outcome.reason)
    code = "" if outcome.exit_code is None else f", exit code {outcome.exit_code}"
    if reason != state:
        return f"{state}, {reason}{code}: {message}"
    return f"{message}{code}" if message.startswith(state) else f"{state}{code}: {message}"


def _raised(error: ErrorReport) -> Iterator[str]:
    """A traceback whose frames and message are each shortened in the middle, so that the raising frame is shown."""
    text = error.traceback.rstrip()
    before, found, after = text.rpartition(error.message.rstrip() or text)
    frames, _, head = before.rpartition("\n")
    if not frames:
        yield from _indented(text.splitlines())
        return
    message = list(_indented(f"{head}{found}{after}".splitlines(), _MESSAGE_LINES, _MESSAGE_LINES))
    yield from _indented(frames.splitlines(), _FIRST_LINES, max(_MESSAGE_LINES, _LAST_LINES - len(message)))
    yield from message


def _indented(lines: Sequence[str], first: int = _FIRST_LINES, last: int = _LAST_LINES) -> Iterator[str]:
    """The lines; of too many only the first and the last, and the number of lines left out."""
    hidden = len(lines) - first - last
    if hidden < 2:  # the note takes a line, too
        yield from (f"    {_cut(line)}" for line in lines)
        return
    yield from (f"    {_cut(line)}" for line in lines[:first])
    yield f"    … {hidden} lines left out …"
    yield from (f"    {_cut(line)}" for line in lines[-last:])


def _cut(line: str) -> str:
    half = _LINE_CHARS // 2
    return line if len(line) <= _LINE_CHARS else f"{line[:half]} … {line[-half:]}"
