"""One replica's place in a run: who it is, what was agreed, how it talks, and what it remembers of past rounds."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll._time import backoff
from atoll.rounds.checks import Expected
from atoll.rounds.events import EventLog
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Grid, Layout
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement, Claim, Commit
from atoll.rounds.requests import Requests

AWAY_AFTER = 2
"""A rank missing from this many commits in a row is not given any grace until it shows up again."""


@dataclass(frozen=True)
class Tuning:
    """Settings of one replica that need not be equal everywhere."""

    width: int = 4
    """Chunks in work at once."""
    connections: int = 8
    """Requests in flight for one chunk."""
    poll_first_s: float = 0.02
    poll_cap_s: float = 2.0
    list_from: int = 13
    """From this many missing ranks on, one LIST is cheaper than probing each."""
    turn_s: float = 0.25
    """How long each rank lets the one before it write the commit."""
    patience_s: float = 20.0
    """How long to wait for a chunk of the mean before computing it oneself."""
    inline_bytes: int = 1 << 18
    """Updates up to this size travel inside their offer."""
    latency_s: float = 0.1
    bandwidth_bytes_s: float = 125e6
    """With the latency, what decides between exchanging whole updates and scattering the reduce."""
    outlier_factor: float | None = 10.0
    init_patience_s: float = 10.0
    """How long other ranks let rank 0 publish the initial weights."""
    retry_s: float = 120.0
    """How long an unavailable store is asked again."""


@dataclass
class Memory:
    """What past commits taught this replica. Only guides waiting and outlier limits; never needs to agree."""

    norms: dict[int, deque[float]] = field(default_factory=dict)
    """Fragment → the median norm of its recent rounds."""
    lateness: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    absences: dict[int, int] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)

    def learn(self, commit: Commit) -> None:
        """Take in a commit, once."""
        self.members = {*commit.members, *commit.ranks}
        norms = self.norms.setdefault(commit.fragment, deque(maxlen=16))
        norms.append(statistics.median(c.norm for c in commit.contributions))
        for rank in self.members:
            self.absences[rank] = 0 if rank in commit.ranks else self.absences.get(rank, 0) + 1

    @property
    def away(self) -> set[int]:
        return {rank for rank, missed in self.absences.items() if missed >= AWAY_AFTER}

    @property
    def first_delay_s(self) -> float:
        """Most of the shortest recent wait: nobody was ready sooner, so asking sooner is wasted."""
        return min(30.0, 0.7 * min(self.waits)) if len(self.waits) >= 3 else 0.0


@dataclass
class Member:
    """Everything the steps of a round need to know."""

    io: Requests
    keys: RoundKeys
    claim: Claim
    agreement: Agreement
    quorum: Quorum
    tuning: Tuning
    events: EventLog
    memory: Memory = field(default_factory=Memory)
    previous: str = ""
    """Digest of the last commit this replica applied; empty while it does not know."""

    @property
    def rank(self) -> int:
        return self.claim.rank

    @property
    def run_id(self) -> str:
        return self.agreement.run_id

    def pauses(self) -> Iterator[float]:
        """Jittered, growing pauses between looks at the store."""
        tuning = self.tuning
        return backoff(tuning.poll_first_s, factor=1.5, cap_s=tuning.poll_cap_s, jitter=0.25, rng=self.io.rng)

    def layout(self, fragment: int) -> Layout:
        return self.agreement.layouts[fragment]

    def grid(self, fragment: int) -> Grid:
        return Grid(self.layout(fragment).size, self.agreement.chunk)

    def expected(self, fragment: int) -> Expected:
        return Expected(
            fragment,
            self.layout(fragment),
            self.grid(fragment),
            self.agreement.codec,
            tuple(self.memory.norms.get(fragment, ())),
            self.tuning.outlier_factor,
        )
