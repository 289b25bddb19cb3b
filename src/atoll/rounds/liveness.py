"""Which of the ranks that a round waits for are dead, from the records that their supervisors write to the store.

A rank is dead if its newest attempt has ended and is not restarted, or if none of its records (the heartbeat above all)
has changed for `Tuning.silent_s`. A rank without records has not started: it may be queued, so it is never dead. A rank
that was cancelled is not started again: it is dead whatever its other records say, and no round waits for it.

The clocks of two machines are never compared: a replica looks whether a record changes, and measures the time between
two looks with its own clock. Time in which it could not look (the store did not answer, the process was stopped) counts
only in part, because a heartbeat could not arrive either.

Records are read only while a round waits, every few seconds. Replicas that no launcher started have no `run.json`:
nothing is known about them, and no rank is dead.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.errors import QuorumLost, StoreError
from atoll.keys import RunKeys
from atoll.result import ranks_text
from atoll.rounds.io import Gather, Steps, StoreIO
from atoll.rounds.quorum import Quorum
from atoll.rounds.tuning import Tuning
from atoll.spec import ON_DEAD_AFTER_S
from atoll.stores.base import Buffer

_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 12.0, 0.2
_FIRST_PAUSE_S = 2.0
"""Before the rule of the run is known, which may need short pauses."""
_LOOKS = 10
"""Looks in the shorter of the two times that decide, unless the pause would be too long or too short."""
_MOST_RANKS = 64
"""Missing ranks to watch, the lowest first: alive ones arrive sooner or later, and the next ones are watched."""
_WIDTH = 8


class DeadRule(NamedTuple):
    """What the replicas of this run do about a dead rank."""

    after_s: float
    max_restarts: int


@dataclass
class Liveness:
    """What one process knows about its run: the rule is read at the first long wait, and then kept."""

    io: StoreIO
    run: RunKeys
    quorum: Quorum
    tuning: Tuning
    _rule: DeadRule | None = None
    _is_read: bool = False

    def rule(self) -> Steps[DeadRule | None]:
        """None if the replicas wait for a dead rank, or if no launcher recorded the run."""
        if not self._is_read and self.quorum.on_dead != "wait":
            data = None
            if self.run.launch > 1:
                data = yield from self.io.probe(self.run.resume(), is_awaited=False)
            if data is None:
                data = yield from self.io.probe(self.run.run(), is_awaited=False)
            self._rule, self._is_read = _rule(_record(data), self.quorum), True
        return self._rule

    @property
    def pause_s(self) -> float:
        """Seconds from the begin of a wait to the first look, and between two looks."""
        if self._rule is None:
            return _LONGEST_PAUSE_S if self._is_read else _FIRST_PAUSE_S
        wanted_s = min(self._rule.after_s, self.tuning.silent_s) / _LOOKS
        return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, wanted_s))


@dataclass
class _Seen:
    """The records of one rank at the last look."""

    records: tuple[bytes, ...]
    ended: str
    """How the rank ended, if it is not restarted; empty while it runs or may be restarted."""
    is_cancelled: bool = False
    quiet_s: float = 0.0
    """How long the records have not changed, as far as this replica could look."""


class DeadWatch:
    """Watches missing ranks during one wait. Concurrent tasks of a round may share it."""

    def __init__(self, liveness: Liveness) -> None:
        self._of = liveness
        self._clock = liveness.io.clock
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}
        self._rule: DeadRule | None = None
        self._looked_at = self._clock.monotonic()
        self._next_at = self._looked_at + liveness.pause_s

    def look(self, ranks: Collection[int]) -> Steps[None]:
        """Read the records of these ranks, if it is time to. A store that refuses or fails ends nothing here."""
        with self._lock:
            now = self._clock.monotonic()
            if now < self._next_at or not ranks or self._of.quorum.on_dead == "wait":
                return
            self._next_at = now + self._of.pause_s  # before the requests, so that concurrent tasks do not repeat them
        with suppress(StoreError):
            self._rule = yield from self._of.rule()
            if self._rule is None:
                return
            watched = sorted(ranks)[:_MOST_RANKS]
            found: list[_Seen | None] = yield Gather([self._read(rank) for rank in watched], _WIDTH)
            self._compare(dict(zip(watched, found, strict=True)))

    def dead(self) -> dict[int, float]:
        """Each dead rank, with the seconds from now for which the round still waits for it; 0 if no longer."""
        if self._rule is None:
            return {}
        since_s = self._clock.monotonic() - self._looked_at
        after_s = self._rule.after_s
        left = {
            rank: 0.0 if seen.is_cancelled else after_s - seen.quiet_s
            for rank, seen in self._seen.items()
            if self._is_dead(seen)
        }
        # The wait ends only after a look that confirms the death, so until then some time is left.
        return {rank: max(left_s - since_s, _SHORTEST_PAUSE_S) if left_s > 0 else 0.0 for rank, left_s in left.items()}

    def error(self, round_no: int, dead: Sequence[int], missing: Sequence[int], more: str = "") -> QuorumLost:
        """The error of a round that needs these dead ranks."""
        if len(dead) == 1:
            how = f"is dead ({self._condition(dead[0])})"
        else:
            how = "are dead (" + "; ".join(f"rank {rank}: {self._condition(rank)}" for rank in dead) + ")"
        message = f"round {round_no} needs {ranks_text(dead)}, which {how}{more}"
        logs = f"atoll logs {shlex.quote(self._of.run.run_id)} --rank {ranks_text(dead).partition(' ')[2]}"
        restarts = "`--max-restarts N` restarts a replica that fails, "
        if all(rank in self._seen and self._seen[rank].is_cancelled for rank in dead):
            restarts = ""
        hint = (
            f"`{logs}` shows the last output; then launch again. {restarts}"
            "a quorum (`DiLoCo(quorum=N)`) continues without it, `--on-dead wait` waits for it"
        )
        return QuorumLost(message, round_no=round_no, missing=missing, timed_out=False, dead=dead, hint=hint)

    def _condition(self, rank: int) -> str:
        seen = self._seen.get(rank)  # another task may have looked since
        return (seen and seen.ended) or f"no heartbeat for {seen.quiet_s if seen else self._of.tuning.silent_s:.0f} s"

    def _is_dead(self, seen: _Seen) -> bool:
        return bool(seen.ended) or seen.quiet_s >= self._of.tuning.silent_s

    def _read(self, rank: int) -> Steps[_Seen | None]:
        """The records of the newest attempt of a rank; None if it has not started."""
        assert self._rule is not None
        io, run = self._of.io, self._of.run
        if (cancel := (yield from self._cancel(rank))) is not None:
            return _Seen((bytes(cancel),), str(_record(cancel).get("why") or "cancelled"), is_cancelled=True)
        beat = yield from io.probe(run.beat(rank), is_awaited=False)
        if beat is None and (yield from io.probe(run.start(rank, 0), is_awaited=False)) is None:
            return None
        attempt = _record(beat).get("attempt")
        attempt = attempt if type(attempt) is int and attempt >= 0 else 0
        outcome = yield from io.probe(run.outcome(rank, attempt), is_awaited=False)
        record = _record(outcome)
        ended = "" if outcome is None else _ended(record, attempt < self._rule.max_restarts)
        return _Seen((bytes(beat or b""), bytes(outcome or b"")), ended, record.get("state") == "cancelled")

    def _cancel(self, rank: int) -> Steps[Buffer | None]:
        """The record that this rank was cancelled; None if there is none, or if the store does not show it."""
        try:
            return (yield from self._of.io.probe(self._of.run.cancelled_rank(rank), is_awaited=False))
        except StoreError:  # the other records may still be readable
            return None

    def _compare(self, found: dict[int, _Seen | None]) -> None:
        """Count the time since the last look for each rank whose records are the same."""
        with self._lock:
            now = self._clock.monotonic()
            passed_s = min(now - self._looked_at, 2 * (self._of.pause_s + self._of.tuning.poll_cap_s))
            for rank, seen in found.items():
                before = self._seen.get(rank)
                if seen is not None and before is not None and before.records == seen.records:
                    seen.quiet_s = before.quiet_s + passed_s
            self._seen = {rank: seen for rank, seen in found.items() if seen is not None}
            self._looked_at = now
            waits = [left_s for left_s in self.dead().values() if left_s > 0]
            self._next_at = now + min([self._of.pause_s, *waits])


def _rule(run: dict[str, Any], quorum: Quorum) -> DeadRule | None:
    """The rule of the run, replaced by what the quorum says."""
    try:
        task, placement = run["spec"]["task"], run["spec"]["placement"]
        after_s = float(_first(quorum.on_dead_after_s, task.get("on_dead_after_s", ON_DEAD_AFTER_S)))
        does_wait = (quorum.on_dead or task.get("on_dead", "fail")) == "wait"
        return None if does_wait else DeadRule(after_s, int(placement["max_restarts"]))
    except (KeyError, TypeError, ValueError, AttributeError):  # no `run.json`, or one that this version cannot read
        return None


def _first(given: float | None, other: float) -> float:
    return other if given is None else given


def _ended(outcome: dict[str, Any], has_restarts: bool) -> str:
    """How the attempt ended; empty if the rank may be restarted."""
    state = outcome.get("state")
    if not isinstance(state, str) or (state == "failed" and has_restarts and not outcome.get("is_final")):
        return ""
    message = str(outcome.get("message") or "").strip().partition("\n")[0]
    return f"{state}: {message}" if message else state


def _record(data: Buffer | None) -> dict[str, Any]:
    """The JSON object in the data; empty if there is none."""
    try:
        found = json.loads(bytes(data or b""))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
