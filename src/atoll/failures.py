"""What a failed run says to a person: every way it failed once, with the ranks that failed so. Pure.

Who failed on its own comes first; those who ended because of others come after. Of a long traceback or message both
ends are shown: it begins where the trouble began, and ends with what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from atoll import errors
from atoll.status import Reason

if TYPE_CHECKING:
    from atoll.result import ErrorReport, ReplicaOutcome

_MOST_WAYS = 8
_FIRST_LINES, _LAST_LINES = 10, 20
_MESSAGE_LINES = 5
"""Of each end of a message below a traceback: the frame that raised it must stay in sight."""
_LINE_CHARS = 2000
"""A message can be a single line as long as a log."""


def failure_text(run_id: str, total: int, failed: Sequence[ReplicaOutcome]) -> str:
    """How many replicas did not succeed, and how each of them ended, the cause first."""
    lines = [f"run `{run_id}`: {len(failed)} of {total} replicas did not succeed"]
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


def failure_hint(run_id: str, failed: Sequence[ReplicaOutcome], *, could_restart: bool = False) -> str:
    """The command that shows more of the rank that began it; and what would have brought that one back."""
    import shlex

    cause = by_cause(failed)[0]
    way = list(_way(cause))
    rank = min(outcome.rank for outcome in failed if list(_way(outcome)) == way)  # alike: which was first is chance
    logs = f"atoll logs {shlex.quote(run_id)} --rank {rank}"
    if could_restart and cause.reason in (Reason.KILLED, Reason.PREEMPTED):
        return f"{logs}; with `--max-restarts N` a replica that ends so is started again"
    return logs


def by_cause(failed: Iterable[ReplicaOutcome]) -> list[ReplicaOutcome]:
    """Those who failed on their own first, the earliest before the others; last those who were cancelled."""
    return sorted(failed, key=lambda o: (_distance(o), o.ended_at is None, o.ended_at or 0.0, o.rank))


def _distance(outcome: ReplicaOutcome) -> int:
    """How far a replica's end is from the cause of it all; 0 for one that failed on its own."""
    if outcome.reason is Reason.CANCELLED:
        return 3
    if outcome.error is not None and _is_of_a_round(outcome.error.type):
        return 2  # it waited for others, or could not use what they gave
    return int(outcome.reason in (Reason.TIMEOUT, Reason.LOST))


def _is_of_a_round(name: str) -> bool:
    """Whether this is the name of an error in which others have a part."""
    module, _, kind = name.rpartition(".")
    found = getattr(errors, kind, None) if module == errors.__name__ else None
    return isinstance(found, type) and issubclass(found, errors.RoundError)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 0-3,7`: what `--rank` takes."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if listed.isdecimal() else f"ranks {listed}"


def _raised(error: ErrorReport) -> Iterator[str]:
    """A traceback, its frames and its message each cut in the middle: where it was raised is just between the two."""
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
    """The lines; of too many the first and the last, and how many are missing between them."""
    hidden = len(lines) - first - last
    if hidden < 2:  # saying so takes a line, too
        yield from (f"    {_cut(line)}" for line in lines)
        return
    yield from (f"    {_cut(line)}" for line in lines[:first])
    yield f"    … {hidden} lines left out …"
    yield from (f"    {_cut(line)}" for line in lines[-last:])


def _cut(line: str) -> str:
    half = _LINE_CHARS // 2
    return line if len(line) <= _LINE_CHARS else f"{line[:half]} … {line[-half:]}"


def _head(outcome: ReplicaOutcome, message: str) -> str:
    """State, reason, exit code and message, each said once: `cancelled on request` is all three."""
    state, reason = str(outcome.state), str(outcome.reason)
    code = "" if outcome.exit_code is None else f", exit code {outcome.exit_code}"
    if reason != state:
        return f"{state}, {reason}{code}: {message}"
    return f"{message}{code}" if message.startswith(state) else f"{state}{code}: {message}"


def _way(outcome: ReplicaOutcome) -> Iterator[str]:
    """How a rank ended, in words that do not say which rank it is."""
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
