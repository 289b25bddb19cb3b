"""One replica's place in a run: who it is, what was agreed, how it talks, and what it remembers of past rounds."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from atoll._time import backoff
from atoll.rounds.checks import Expected
from atoll.rounds.codecs.base import codec
from atoll.rounds.events import EventLog
from atoll.rounds.io import StoreIO
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement, Claim, Commit
from atoll.rounds.tuning import AT_ONCE_S, NEAR_S, Grid, good_connections
from atoll.rounds.tuning import Tuning as Tuning

AWAY_AFTER = 2
"""A rank missing from this many commits in a row is not given any grace until it shows up again."""


@dataclass
class RoundHistory:
    """What past commits taught this replica. Only guides waiting and outlier limits; never needs to agree."""

    norms: dict[int, deque[float]] = field(default_factory=dict)
    """Fragment → the median norm of its recent rounds."""
    lateness: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    absences: dict[int, int] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    incarnations: dict[int, int] = field(default_factory=dict)
    """Of those who took part in the last round."""
    rejections: Counter[int] = field(default_factory=Counter)
    """Rank → how many of its updates were rejected, in the rounds this process took in."""
    trips: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds that small requests took."""
    is_late: bool = True
    """The last round was over when we came, or there was none: better look before uploading."""

    announced: int | None = None
    """The round that an offer of ours may be in the store for; its chunks must not be touched again."""

    def learn(self, commit: Commit) -> None:
        """Take in a commit, once."""
        self.members = {*commit.members, *commit.ranks}
        self.incarnations = {c.rank: c.incarnation for c in commit.contributions}
        norms = self.norms.setdefault(commit.fragment, deque(maxlen=16))
        norms.append(statistics.median(c.norm for c in commit.contributions))
        self.rejections.update(refused.rank for refused in commit.rejected)
        present = {*commit.ranks, *(refused.rank for refused in commit.rejected)}
        for rank in self.members:
            self.absences[rank] = 0 if rank in present else self.absences.get(rank, 0) + 1

    def expected(self, rank: int, incarnation: int) -> dict[int, int]:
        """Rank → incarnation of everybody, if the last round had everybody and us among them; else empty."""
        known = self.incarnations
        return known if self.members == set(known) and known.get(rank) == incarnation and not self.is_late else {}

    @property
    def away(self) -> set[int]:
        return {rank for rank, missed in self.absences.items() if missed >= AWAY_AFTER}

    @property
    def first_delay_s(self) -> float:
        """Most of the shortest recent wait: nobody was ready sooner, so asking sooner is wasted."""
        return min(30.0, 0.7 * min(self.waits)) if len(self.waits) >= 3 else 0.0


@dataclass
class RoundContext:
    """Everything the steps of a round need to know."""

    io: StoreIO
    keys: RoundKeys
    claim: Claim
    agreement: Agreement
    quorum: Quorum
    tuning: Tuning
    events: EventLog
    memory: RoundHistory = field(default_factory=RoundHistory)
    previous: str = ""
    """Digest of the last commit this replica applied; empty while it does not know."""

    @property
    def rank(self) -> int:
        return self.claim.rank

    @property
    def run_id(self) -> str:
        return self.agreement.run_id

    @property
    def connections(self) -> int:
        """Bulk requests in flight at once."""
        if self.tuning.connections is not None:
            return self.tuning.connections
        return good_connections(min(self.memory.trips, default=AT_ONCE_S), len(self.memory.members))

    @property
    def is_local_store(self) -> bool:
        """Whether the store answers faster than a thread can be told to ask it: small things one after the other."""
        return bool(self.memory.trips) and min(self.memory.trips) < NEAR_S

    def side_by_side(self, parts: int) -> int:
        """Chunks to average at once, each with a request for each of its parts."""
        most = (
            self.connections // 2 if self.is_local_store else self.connections
        )  # more threads than cores are of no use
        return max(1, most // max(1, parts))

    def exchange_mode(self, fragment: int, count: int) -> str:
        """`whole` when fetching every update costs less time than two more trips to the store, else `scatter`."""
        if count <= 2:
            return "whole"
        size = codec(self.agreement.codec).encoded_bytes(self.layout(fragment).size)
        saved_bytes = size * (count - 1) * (1 - 2 / count)
        return "whole" if saved_bytes / self.tuning.bandwidth_bytes_s <= 2 * self.tuning.latency_s else "scatter"

    def pauses(self) -> Iterator[float]:
        """Jittered, growing pauses between looks at the store."""
        tuning = self.tuning
        # Where the store is this machine's own, so are the others, and few of them are soon done.
        first_s = tuning.poll_first_s * (min(1.0, (len(self.memory.members) or 8) / 8) if self.is_local_store else 1.0)
        return backoff(first_s, factor=1.5, cap_s=tuning.poll_cap_s, jitter=0.25, rng=self.io.rng)

    def layout(self, fragment: int) -> Layout:
        return self.agreement.layouts[fragment]

    def grid(self, fragment: int) -> Grid:
        return _grid(self.layout(fragment).size, self.agreement.chunk)

    def expected(self, fragment: int) -> Expected:
        return Expected(
            fragment,
            self.layout(fragment),
            self.grid(fragment),
            self.agreement.codec,
            tuple(self.memory.norms.get(fragment, ())),
            self.tuning.outlier_factor,
        )


@lru_cache(maxsize=64)
def _grid(size: int, chunk: int) -> Grid:
    return Grid(size, chunk)
