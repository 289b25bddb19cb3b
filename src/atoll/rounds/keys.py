"""Every object name Atoll uses, built here from checked parts and nowhere else.

Names are zero-padded so that a sorted LIST is in numeric order. Keys that change (`beat`, `ack`) are the exception;
everything a replica computes with is written once under a name that says what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.errors import BadKey, InternalError
from atoll.names import key_name, run_id_problem

_DIGEST = re.compile(r"[0-9a-f]{8,128}\Z")
_OUTCOME = re.compile(r"outcome/(\d{5,})\.(\d{3,})\.json\Z")
_CLAIM = re.compile(r"(\d{5,})\.(\d{5,})\.(json|left)\Z")
_OFFER = re.compile(r"(\d{10,})/offer/(\d{5,})\.(\d{3,})\Z")
_BLOB = re.compile(r"(\d{10,})-([0-9a-f]{8,128})/\d{6,}\Z")
_CHECKPOINT = re.compile(r"checkpoints/(\d{5,})/(\d{10,})\Z")
_SEGMENT = re.compile(r"(\d{5,})\.(\d{5,})\.(\d{6,})\.jsonl\Z")
_LOG_CHUNK = re.compile(r"logs/(\d{5,})/(\d{3,})/(\d{15,})-(\d+)-(\d+)\Z")


def index_prefix() -> str:
    """Every marker lies under this; one LIST names every run of the store."""
    return "index/"


def index_key(run_id: str) -> str:
    """The marker that lets runs be listed without walking their objects."""
    return index_prefix() + run_part(run_id)


def bundle(digest: str) -> str:
    """A code bundle, named by the SHA-256 of its bytes."""
    return f"bundles/{_checked_digest(digest)}.tar.gz"


def run_part(run_id: str) -> str:
    """The run id as one part of a key."""
    if problem := run_id_problem(run_id):
        raise BadKey(str(run_id), problem)
    return key_name(run_id)


class LogChunk(NamedTuple):
    """What the name of a sealed piece of output says."""

    rank: int
    attempt: int
    offset: int
    first_ms: int
    last_ms: int


class RankAttempt(NamedTuple):
    """One process of a run: the rank it plays, and which try of it this is."""

    rank: int
    attempt: int


@dataclass(frozen=True)
class RunKeys:
    """The names of one run's records, outside its rounds."""

    run_id: str

    @cached_property
    def prefix(self) -> str:
        """Everything of this run, and nothing of another, lies under this."""
        return f"runs/{run_part(self.run_id)}/"

    def run(self) -> str:
        return f"{self.prefix}run.json"

    def intent(self) -> str:
        return f"{self.prefix}launch/intent.json"

    def handle(self) -> str:
        return f"{self.prefix}launch/handle.json"

    def start(self, rank: int, attempt: int) -> str:
        """Taken by the container that is this attempt; the service that restarts it need not count."""
        return f"{self.prefix}start/{number(rank, 5)}.{number(attempt, 3)}.json"

    def cancelled(self) -> str:
        return f"{self.prefix}launch/cancelled.json"

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
        """Everything one replica needs to go on before round `round_no`."""
        return f"{self.checkpoints_prefix(rank)}{number(round_no, 10)}"

    def parse_checkpoint(self, key: str) -> tuple[int, int]:
        """(rank, round): the inverse of `checkpoint`."""
        rank, round_no = self._numbers(_CHECKPOINT, key)
        return rank, round_no

    def log_prefix(self, rank: int, attempt: int | None = None) -> str:
        """All output of a rank, or of one attempt of it; pieces sort by offset."""
        of_rank = f"{self.prefix}logs/{number(rank, 5)}/"
        return of_rank if attempt is None else f"{of_rank}{number(attempt, 3)}/"

    def log_chunk(self, rank: int, attempt: int, offset: int, first_ms: int, last_ms: int) -> str:
        """A sealed piece of output: its first byte's offset, and when its first and last line were written."""
        span = f"{number(first_ms)}-{number(last_ms)}"
        return f"{self.log_prefix(rank, attempt)}{number(offset, 15)}-{span}"

    def parse_log_chunk(self, key: str) -> LogChunk:
        """The inverse of `log_chunk`."""
        return LogChunk(*self._numbers(_LOG_CHUNK, key))

    def _numbers(self, pattern: re.Pattern[str], key: str) -> tuple[int, ...]:
        found = pattern.match(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        if found is None:
            raise BadKey(key, f"not one of the names of run `{self.run_id}`")
        return tuple(int(part) for part in found.groups())


@dataclass(frozen=True)
class RoundKeys:
    """The names of everything replicas agree on and average, for one run.

    `rounds/R/…` holds what goes when round R is retired; records that must be found by one cheap LIST
    (commits, snapshots, claims, acknowledgements) lie under prefixes of their own.
    """

    run_id: str

    @cached_property
    def prefix(self) -> str:
        return f"{RunKeys(self.run_id).prefix}sync/"

    # ---- before the first round
    def agreement(self) -> str:
        """What all replicas agreed on before step 1; created once."""
        return f"{self.prefix}agreement.json"

    def claims_prefix(self) -> str:
        return f"{self.prefix}claims/"

    def claim(self, rank: int, incarnation: int) -> str:
        """One process took this rank; the highest incarnation is the only one that counts."""
        return f"{self.claims_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.json"

    def departure(self, rank: int, incarnation: int) -> str:
        """That process said it will take part no more."""
        return f"{self.claims_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.left"

    def parse_claim(self, key: str) -> tuple[int, int, bool]:
        """(rank, incarnation, has it left) from the name of a claim or a departure."""
        found = _CLAIM.match(key.removeprefix(self.claims_prefix())) if key.startswith(self.claims_prefix()) else None
        if found is None:
            raise BadKey(key, f"not a claim of run `{self.run_id}`")
        return int(found[1]), int(found[2]), found[3] == "left"

    # ---- one round
    def rounds_prefix(self) -> str:
        return f"{self.prefix}rounds/"

    def round_prefix(self, round_no: int) -> str:
        return f"{self.rounds_prefix()}{number(round_no, 10)}/"

    def offers_prefix(self, round_no: int) -> str:
        return f"{self.round_prefix(round_no)}offer/"

    def offer(self, round_no: int, rank: int, slot: int) -> str:
        """A rank's announcement; a later slot counts only when every earlier one is void."""
        return f"{self.offers_prefix(round_no)}{number(rank, 5)}.{number(slot, 3)}"

    def parse_offer(self, key: str) -> tuple[int, int, int]:
        """(round, rank, slot) from the name of an offer."""
        found = _OFFER.match(key.removeprefix(self.rounds_prefix())) if key.startswith(self.rounds_prefix()) else None
        if found is None:
            raise BadKey(key, f"not an offer of run `{self.run_id}`")
        return int(found[1]), int(found[2]), int(found[3])

    def update(self, round_no: int, rank: int, incarnation: int, chunk: int) -> str:
        """One chunk of what a rank contributes."""
        who = f"{number(rank, 5)}.{number(incarnation, 5)}"
        return f"{self.round_prefix(round_no)}update/{who}/{number(chunk, 6)}"

    def mean(self, round_no: int, party: str, chunk: int) -> str:
        """One chunk of the average of a party's updates; created once."""
        return f"{self.round_prefix(round_no)}mean/{_checked_digest(party)}/{number(chunk, 6)}"

    def commits_prefix(self) -> str:
        return f"{self.prefix}commits/"

    def commit(self, round_no: int) -> str:
        """The round's agreement; created once."""
        return f"{self.commits_prefix()}{number(round_no, 10)}.json"

    def parse_commit(self, key: str) -> int:
        return self._one_number(key, self.commits_prefix(), ".json")

    # ---- catching up and letting go
    def snapshots_prefix(self) -> str:
        return f"{self.prefix}snapshots/"

    def snapshot(self, round_no: int) -> str:
        """The state before round `round_no`; created once, after its pieces."""
        return f"{self.snapshots_prefix()}{number(round_no, 10)}.json"

    def parse_snapshot(self, key: str) -> int:
        return self._one_number(key, self.snapshots_prefix(), ".json")

    def blobs_prefix(self) -> str:
        return f"{self.prefix}blobs/"

    def blob_prefix(self, round_no: int, digest: str) -> str:
        """Bulk bytes of a snapshot, or of the initial weights, which are the blob of round 0."""
        return f"{self.blobs_prefix()}{number(round_no, 10)}-{_checked_digest(digest)}/"

    def blob(self, round_no: int, digest: str, piece: int) -> str:
        return f"{self.blob_prefix(round_no, digest)}{number(piece, 6)}"

    def parse_blob(self, key: str) -> tuple[int, str]:
        """(round, digest) from the name of a piece of a blob."""
        found = _BLOB.match(key.removeprefix(self.blobs_prefix())) if key.startswith(self.blobs_prefix()) else None
        if found is None:
            raise BadKey(key, f"not a piece of a blob of run `{self.run_id}`")
        return int(found[1]), found[2]

    def acks_prefix(self) -> str:
        return f"{self.prefix}acks/"

    def ack(self, rank: int) -> str:
        """Which rounds this rank will never need again; rewritten."""
        return f"{self.acks_prefix()}{number(rank, 5)}.json"

    def events_prefix(self) -> str:
        return f"{self.prefix}events/"

    def events_of(self, rank: int) -> str:
        """The prefix of one rank's events."""
        return f"{self.events_prefix()}{number(rank, 5)}."

    def events(self, rank: int, incarnation: int, segment: int) -> str:
        """JSON lines of what one process saw; rewritten as it grows, then left alone."""
        return f"{self.events_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.{number(segment, 6)}.jsonl"

    def parse_events(self, key: str) -> tuple[int, int, int]:
        """(rank, incarnation, segment): the inverse of `events`."""
        return self._segment(key, self.events_prefix())

    def metrics_prefix(self) -> str:
        return f"{self.prefix}metrics/"

    def metrics(self, rank: int, incarnation: int, segment: int) -> str:
        """JSON lines of what some rounds of one process cost; written once."""
        return f"{self.metrics_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.{number(segment, 6)}.jsonl"

    def parse_metrics(self, key: str) -> tuple[int, int, int]:
        """(rank, incarnation, segment): the inverse of `metrics`."""
        return self._segment(key, self.metrics_prefix())

    def _segment(self, key: str, prefix: str) -> tuple[int, int, int]:
        found = _SEGMENT.match(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if found is None:
            raise BadKey(key, f"not a segment of `{prefix}`")
        return int(found[1]), int(found[2]), int(found[3])

    def _one_number(self, key: str, prefix: str, suffix: str) -> int:
        middle = key[len(prefix) : -len(suffix)]
        if not (key.startswith(prefix) and key.endswith(suffix) and middle.isascii() and middle.isdecimal()):
            raise BadKey(key, f"not `{prefix}…{suffix}`")
        return int(middle)


def number(value: int, width: int = 1) -> str:
    """A non-negative whole number, zero-padded; anything else is a bug in the caller."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InternalError(f"a part of an object name must be a whole number from 0, not {value!r}")
    return f"{value:0{width}d}"


def _checked_digest(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise InternalError(f"a digest in an object name must be lower-case hex, not {digest!r}")
    return digest
