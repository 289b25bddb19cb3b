"""The key of every object of the rounds of a run, built from checked parts; `atoll.keys` has the other keys of a run.

Numbers are zero-padded, so a sorted LIST is in numeric order. Objects that replicas compute with are written once,
under a key that identifies their content; only `ack` and `events` objects are rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from atoll.errors import BadKey
from atoll.keys import RunKeys, checked_digest, number

_CLAIM = re.compile(r"(\d{5,})\.(\d{5,})\.(json|left)\Z")
_OFFER = re.compile(r"(\d{10,})/offer/(\d{5,})\.(\d{3,})\Z")
_BLOB = re.compile(r"(\d{10,})-([0-9a-f]{8,128})/\d{6,}\Z")
_SEGMENT = re.compile(r"(\d{5,})\.(\d{5,})\.(\d{6,})\.jsonl\Z")


@dataclass(frozen=True)
class RoundKeys:
    """The keys of the rounds of one run.

    `rounds/R/…` holds the objects that are deleted when round R is retired. Records that one cheap LIST must find
    (commits, snapshots, claims, acknowledgements) have prefixes of their own.
    """

    run_id: str
    launch: int = 1
    rounds_of: int | None = None
    """The launch whose rounds this one continues; None if the launch has rounds of its own."""

    @cached_property
    def prefix(self) -> str:
        return f"{RunKeys(self.run_id, self.rounds_of or self.launch).prefix}sync/"

    @cached_property
    def run(self) -> RunKeys:
        """The keys of the records that supervisors write about their replicas."""
        return RunKeys(self.run_id, self.launch)

    # ---- before the first round
    def agreement(self) -> str:
        """The settings that all replicas share; created once."""
        return f"{self.prefix}agreement.json"

    def claims_prefix(self) -> str:
        return f"{self.prefix}claims/"

    def claim(self, rank: int, incarnation: int) -> str:
        """The process that took this rank; only the highest incarnation counts."""
        return f"{self.claims_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.json"

    def departure(self, rank: int, incarnation: int) -> str:
        """The process of this claim has left the run."""
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
        """The offer of a rank; a later slot counts only if every earlier one is void."""
        return f"{self.offers_prefix(round_no)}{number(rank, 5)}.{number(slot, 3)}"

    def parse_offer(self, key: str) -> tuple[int, int, int]:
        """(round, rank, slot) from the name of an offer."""
        found = _OFFER.match(key.removeprefix(self.rounds_prefix())) if key.startswith(self.rounds_prefix()) else None
        if found is None:
            raise BadKey(key, f"not an offer of run `{self.run_id}`")
        return int(found[1]), int(found[2]), int(found[3])

    def update(self, round_no: int, rank: int, incarnation: int, chunk: int) -> str:
        """One chunk of the update of a rank."""
        name = f"{number(rank, 5)}.{number(incarnation, 5)}"
        return f"{self.round_prefix(round_no)}update/{name}/{number(chunk, 6)}"

    def mean(self, round_no: int, participants: str, chunk: int) -> str:
        """One chunk of the mean of the participants' updates; created once."""
        return f"{self.round_prefix(round_no)}mean/{checked_digest(participants)}/{number(chunk, 6)}"

    def commits_prefix(self) -> str:
        return f"{self.prefix}commits/"

    def commit(self, round_no: int) -> str:
        """The decision of a round; created once."""
        return f"{self.commits_prefix()}{number(round_no, 10)}.json"

    def parse_commit(self, key: str) -> int:
        return self._one_number(key, self.commits_prefix(), ".json")

    # ---- catching up and retention
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
        """The prefix of the blob of a snapshot, or of the initial weights (round 0)."""
        return f"{self.blobs_prefix()}{number(round_no, 10)}-{checked_digest(digest)}/"

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
        """The rounds that this rank no longer needs; rewritten."""
        return f"{self.acks_prefix()}{number(rank, 5)}.json"

    def events_prefix(self) -> str:
        return f"{self.prefix}events/"

    def events_of(self, rank: int) -> str:
        """The prefix of one rank's events."""
        return f"{self.events_prefix()}{number(rank, 5)}."

    def events(self, rank: int, incarnation: int, segment: int) -> str:
        """Events of one process as JSON lines; rewritten as the segment grows."""
        return f"{self.events_prefix()}{number(rank, 5)}.{number(incarnation, 5)}.{number(segment, 6)}.jsonl"

    def parse_events(self, key: str) -> tuple[int, int, int]:
        """(rank, incarnation, segment): the inverse of `events`."""
        return self._segment(key, self.events_prefix())

    def metrics_prefix(self) -> str:
        return f"{self.prefix}metrics/"

    def metrics(self, rank: int, incarnation: int, segment: int) -> str:
        """Round records of one process as JSON lines; written once."""
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
