"""The key of every object of a run outside its rounds: records, outcomes, results, logs, checkpoints, code bundles.

Keys are built only here, in `rounds/keys.py` and in `rounds/named/keys.py`, from checked parts. Numbers are
zero-padded, so a sorted LIST is in numeric order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.errors import BadKey, InternalError
from atoll.names import key_name, run_id_problem

_DIGEST = re.compile(r"[0-9a-f]{8,128}\Z")
_START = re.compile(r"start/(\d{5,})\.(\d{3,})\.json\Z")
_CANCELLED = re.compile(r"cancelled/(\d{5,})\.json\Z")
_JOIN = re.compile(r"join/(\d{5,})\.json\Z")
_STOP = re.compile(r"stop/(\d{5,})\.json\Z")
_CALLS = re.compile(r"calls/(?:(sent|stop)/([0-9a-z]+)|(plan)(?:-\d{5,})?)\.json\Z")
_OUTCOME = re.compile(r"outcome/(\d{5,})\.(\d{3,})\.json\Z")
_CHECKPOINT = re.compile(r"checkpoints/(\d{5,})/(\d{10,})\Z")
_LOG_CHUNK = re.compile(r"logs/(\d{5,})/(\d{3,})/(\d{15,})-(\d+)-(\d+)\Z")


def index_prefix() -> str:
    """The prefix of all markers: one LIST names every run of the store."""
    return "index/"


def index_key(run_id: str) -> str:
    """The marker of a run, so that runs can be listed without listing their objects."""
    return index_prefix() + run_part(run_id)


def bundle(digest: str) -> str:
    """A code bundle, named by the SHA-256 of its bytes."""
    return f"bundles/{checked_digest(digest)}.tar.gz"


def run_part(run_id: str) -> str:
    """The run id as one part of a key."""
    if problem := run_id_problem(run_id):
        raise BadKey(str(run_id), problem)
    return key_name(run_id)


class LogChunk(NamedTuple):
    """The parsed key of one chunk of output."""

    rank: int
    attempt: int
    offset: int
    first_ms: int
    last_ms: int


class RankAttempt(NamedTuple):
    """One process of a run: its rank, and the number of the attempt."""

    rank: int
    attempt: int


@dataclass(frozen=True)
class RunKeys:
    """The names of one run's records, outside its rounds."""

    run_id: str
    launch: int = 1
    """The number of the launch. A launch after the first has all its records below `launch/N/`."""

    @cached_property
    def run_prefix(self) -> str:
        """The prefix of all objects of this run, and of no other."""
        return f"runs/{run_part(self.run_id)}/"

    @cached_property
    def prefix(self) -> str:
        """The prefix of what the replicas of this launch write."""
        return self.run_prefix if self.launch == 1 else self._launch_prefix

    @property
    def _launch_prefix(self) -> str:
        return f"{self.run_prefix}launch/" if self.launch == 1 else f"{self.run_prefix}launch/{number(self.launch)}/"

    def run(self) -> str:
        return f"{self.run_prefix}run.json"

    def origin(self) -> str:
        """The weights of another run that this run starts from; written before `run.json`."""
        return f"{self.run_prefix}origin.json"

    def pruned(self) -> str:
        """Created before all but the weights of the run is deleted."""
        return f"{self.run_prefix}pruned.json"

    def deleted(self) -> str:
        """Created before the run is deleted, and deleted last."""
        return f"{self.run_prefix}deleted.json"

    def intent(self) -> str:
        return f"{self._launch_prefix}intent.json"

    def resume(self) -> str:
        """Created before a launch that continues the rounds of an earlier one: what it runs, and where."""
        return f"{self._launch_prefix}resume.json"

    def joined(self) -> str:
        """Created by a launcher that continues the launch of another launcher."""
        return f"{self._launch_prefix}joined.json"

    def handle(self) -> str:
        """Decides the launch: the first write says that it was started, with the handle, or undone."""
        return f"{self._launch_prefix}handle.json"

    def start(self, rank: int, attempt: int) -> str:
        """Created in the container of this attempt; so containers count attempts where the service does not.

        Attempt 0 is the claim of the rank; see `journal.Claim`.
        """
        return f"{self.starts_prefix(rank)}{number(attempt, 3)}.json"

    def starts_prefix(self, rank: int | None = None) -> str:
        """The prefix of the attempts, of one rank or of all, that began in containers."""
        return f"{self.prefix}start/" if rank is None else f"{self.prefix}start/{number(rank, 5)}."

    def parse_start(self, key: str) -> RankAttempt:
        """The inverse of `start`."""
        return RankAttempt(*self._numbers(_START, key))

    def cancelled(self) -> str:
        return f"{self._launch_prefix}cancelled.json"

    def cancelled_ranks_prefix(self) -> str:
        return f"{self._launch_prefix}cancelled/"

    def cancelled_rank(self, rank: int) -> str:
        """The record of a cancellation that concerns only this rank."""
        return f"{self.cancelled_ranks_prefix()}{number(rank, 5)}.json"

    def parse_cancelled_rank(self, key: str) -> int:
        """The inverse of `cancelled_rank`."""
        return self._numbers(_CANCELLED, key, self._launch_prefix)[0]

    def join_parts_prefix(self) -> str:
        return f"{self._launch_prefix}join/"

    def join_part(self, first_rank: int) -> str:
        """The ranks from this one on that wait for machines; see `replica/joined.py`."""
        return f"{self.join_parts_prefix()}{number(first_rank, 5)}.json"

    def parse_join_part(self, key: str) -> int:
        """The inverse of `join_part`."""
        return self._numbers(_JOIN, key, self._launch_prefix)[0]

    def stops_prefix(self) -> str:
        return f"{self._launch_prefix}stop/"

    def stop(self, rank: int) -> str:
        """A request to stop this rank, for a supervisor that looks for it; see `journal.record_stop`."""
        return f"{self.stops_prefix()}{number(rank, 5)}.json"

    def parse_stop(self, key: str) -> int:
        """The inverse of `stop`."""
        return self._numbers(_STOP, key, self._launch_prefix)[0]

    def calls_prefix(self) -> str:
        """The prefix of what is known about the native calls of this launch, where the service has no list of them."""
        return f"{self._launch_prefix}calls/"

    def calls_plan(self, first_rank: int = 0) -> str:
        """The request of this launch; `first_rank` is that of a part of the run."""
        return f"{self.calls_prefix()}plan{f'-{number(first_rank, 5)}' if first_rank else ''}.json"

    def calls_sent(self, launcher: str) -> str:
        """The calls that one launcher sends. `launcher` is a digest that no other launcher has."""
        return f"{self.calls_prefix()}sent/{checked_digest(launcher)}.json"

    def call_stop(self, rank: int) -> str:
        return f"{self.calls_prefix()}stop/{number(rank, 5)}.json"

    def parse_calls(self, key: str) -> tuple[str, str]:
        """(`plan`, ""), or the folder below `calls/` and the name in it."""
        found = _CALLS.match(key.removeprefix(self._launch_prefix)) if key.startswith(self._launch_prefix) else None
        if found is None:
            raise BadKey(key, f"not a record of a call in run `{self.run_id}`")
        return found[1] or "plan", found[2] or ""

    def outcomes_prefix(self) -> str:
        return f"{self.prefix}outcome/"

    def outcome(self, rank: int, attempt: int) -> str:
        return f"{self.outcomes_prefix()}{number(rank, 5)}.{number(attempt, 3)}.json"

    def parse_outcome(self, key: str) -> RankAttempt:
        """The inverse of `outcome`."""
        return RankAttempt(*self._numbers(_OUTCOME, key))

    def result(self, rank: int, attempt: int) -> str:
        return f"{self.prefix}result/{number(rank, 5)}.{number(attempt, 3)}.json"

    def beats_prefix(self) -> str:
        return f"{self.prefix}beat/"

    def beat(self, rank: int) -> str:
        return f"{self.beats_prefix()}{number(rank, 5)}.json"

    def checkpoints_prefix(self, rank: int) -> str:
        return f"{self.prefix}checkpoints/{number(rank, 5)}/"

    def checkpoint(self, rank: int, round_no: int) -> str:
        """The state that one replica needs to continue before round `round_no`."""
        return f"{self.checkpoints_prefix(rank)}{number(round_no, 10)}"

    def parse_checkpoint(self, key: str) -> tuple[int, int]:
        """(rank, round): the inverse of `checkpoint`."""
        rank, round_no = self._numbers(_CHECKPOINT, key)
        return rank, round_no

    def log_prefix(self, rank: int, attempt: int | None = None) -> str:
        """The prefix of all output of a rank, or of one attempt; chunks sort by offset."""
        of_rank = f"{self.prefix}logs/{number(rank, 5)}/"
        return of_rank if attempt is None else f"{of_rank}{number(attempt, 3)}/"

    def log_chunk(self, rank: int, attempt: int, offset: int, first_ms: int, last_ms: int) -> str:
        """One chunk of output: the offset of its first byte, and the times of its first and last line."""
        span = f"{number(first_ms)}-{number(last_ms)}"
        return f"{self.log_prefix(rank, attempt)}{number(offset, 15)}-{span}"

    def parse_log_chunk(self, key: str) -> LogChunk:
        """The inverse of `log_chunk`."""
        return LogChunk(*self._numbers(_LOG_CHUNK, key))

    def _numbers(self, pattern: re.Pattern[str], key: str, prefix: str | None = None) -> tuple[int, ...]:
        prefix = self.prefix if prefix is None else prefix
        found = pattern.match(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if found is None:
            raise BadKey(key, f"not a key of this kind in run `{self.run_id}`")
        return tuple(int(part) for part in found.groups())


def number(value: int, width: int = 1) -> str:
    """A whole number from 0, zero-padded. Any other value is a bug of the caller."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InternalError(f"a part of an object name must be a whole number from 0, not {value!r}")
    return f"{value:0{width}d}"


def checked_digest(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise InternalError(f"a digest in an object name must be lower-case hex, not {digest!r}")
    return digest
