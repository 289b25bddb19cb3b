"""What the steps of a round share: `RoundContext` for one process in one run, and its `RoundHistory` of past rounds."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from atoll._time import backoff
from atoll.rounds.checks import Expected
from atoll.rounds.codecs.base import codec
from atoll.rounds.events import EventLog
from atoll.rounds.io import StoreIO
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.liveness import Liveness
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement, Claim, Commit
from atoll.rounds.tuning import IN_PROCESS_S, LOCAL_S, Grid, good_connections
from atoll.rounds.tuning import Tuning as Tuning

ABSENT_AFTER = 2
"""A rank missing from this many commits in a row gets no grace until it contributes again."""


@dataclass
class RoundHistory:
    """What this process learnt from past rounds. Replicas may differ in it: it guides only waits and outlier limits."""

    norms: dict[int, deque[float]] = field(default_factory=dict)
    """Fragment → the median norm of its recent rounds."""
    lateness: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds by which recent offers came after the quorum was there."""
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Seconds after which offers were still missing, for each recent round."""
    absences: dict[int, int] = field(default_factory=dict)
    """Rank → the number of last commits in a row without it."""
    members: set[int] = field(default_factory=set)
    """The ranks of the last commit, present or not."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """Rank → incarnation of the contributions to the last commit."""
    rejections: Counter[int] = field(default_factory=Counter)
    """Rank → how many of its updates were rejected, in the rounds that this process applied."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds that small requests took."""
    is_late: bool = True
    """The last round was committed before we uploaded, or there was none: read the commit before uploading."""
    announced: int | None = None
    """The last round that this process announced an offer for: its uploaded chunks must not be replaced."""

    def learn(self, commit: Commit) -> None:
        """Add a commit. Call it once for each."""
        self.members = {*commit.members, *commit.ranks}
        self.incarnations = {c.rank: c.incarnation for c in commit.contributions}
        norms = self.norms.setdefault(commit.fragment, deque(maxlen=16))
        norms.append(statistics.median(c.norm for c in commit.contributions))
        self.rejections.update(refused.rank for refused in commit.rejected)
        present = {*commit.ranks, *(refused.rank for refused in commit.rejected)}
        for rank in self.members:
            self.absences[rank] = 0 if rank in present else self.absences.get(rank, 0) + 1

    def expected_participants(self, claim: Claim) -> dict[int, int]:
        """Rank → incarnation of the last commit, if it had all members and this process; else empty."""
        known = self.incarnations
        is_complete = self.members == set(known) and known.get(claim.rank) == claim.incarnation
        return known if is_complete and not self.is_late else {}

    @property
    def absent(self) -> set[int]:
        return {rank for rank, missed in self.absences.items() if missed >= ABSENT_AFTER}

    @property
    def first_delay_s(self) -> float:
        """70 % of the shortest recent wait: an earlier look at the store would find offers missing."""
        return min(30.0, 0.7 * min(self.waits)) if len(self.waits) >= 3 else 0.0


@dataclass
class RoundContext:
    """What every step of a round needs: the claim of this process, the agreement, the settings and the store."""

    io: StoreIO
    keys: RoundKeys
    claim: Claim
    agreement: Agreement
    quorum: Quorum
    tuning: Tuning
    events: EventLog
    history: RoundHistory = field(default_factory=RoundHistory)
    previous: str = ""
    """Digest of the last commit that this replica applied; of the agreement before the first round."""

    @cached_property
    def liveness(self) -> Liveness:
        """What this process knows about the death of other ranks."""
        return Liveness(self.io, self.keys.run, self.quorum, self.tuning)

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
        return good_connections(min(self.history.latencies, default=IN_PROCESS_S), len(self.history.members))

    @property
    def is_local_store(self) -> bool:
        """Whether the store answers faster than a thread can be woken: small requests then go one after the other."""
        return bool(self.history.latencies) and min(self.history.latencies) < LOCAL_S

    @property
    def small_width(self) -> int:
        """Small requests in flight at once."""
        return 1 if self.is_local_store else self.connections

    def chunk_width(self, participants: int) -> int:
        """Chunks to average at once, each with one request for each participant."""
        width = self.connections // 2 if self.is_local_store else self.connections  # a local store uses our own cores
        return max(1, width // max(1, participants))

    def exchange_mode(self, fragment: int, count: int) -> str:
        """`whole` if downloading every update takes less time than two more requests in a row, else `scatter`."""
        if count <= 2:
            return "whole"
        size = codec(self.agreement.codec).encoded_bytes(self.layout(fragment).size)
        saved_bytes = size * (count - 1) * (1 - 2 / count)
        return "whole" if saved_bytes / self.tuning.bandwidth_bytes_s <= 2 * self.tuning.latency_s else "scatter"

    def pauses(self) -> Iterator[float]:
        """Jittered, growing pauses between requests for an object that is not there yet."""
        tuning = self.tuning
        # The replicas that share a local store share the machine: when they are few, they finish soon.
        first_s = tuning.poll_first_s * (min(1.0, (len(self.history.members) or 8) / 8) if self.is_local_store else 1.0)
        return backoff(first_s, factor=1.5, cap_s=tuning.poll_cap_s, jitter=0.25, rng=self.io.rng)

    def layout(self, fragment: int) -> Layout:
        return self.agreement.layouts[fragment]

    def grid(self, fragment: int) -> Grid:
        return _grid(self.layout(fragment).size, self.agreement.chunk)

    def expected(self, fragment: int) -> Expected:
        """What every update of this fragment must match."""
        return Expected(
            fragment,
            self.layout(fragment),
            self.grid(fragment),
            self.agreement.codec,
            tuple(self.history.norms.get(fragment, ())),
            self.tuning.outlier_factor,
        )


@lru_cache(maxsize=64)
def _grid(size: int, chunk: int) -> Grid:
    return Grid(size, chunk)
