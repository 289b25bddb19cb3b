"""One replica's work on the mean of a commit: what is known of it, and what was done before the commit was there."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.rounds.chunks import MeanName
from atoll.rounds.codec import F32
from atoll.rounds.grid import Grid
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.party import Party
from atoll.rounds.records import Commit, Contribution
from atoll.rounds.vectors import Room, Sink, Source


@dataclass(frozen=True)
class Foreseen:
    """A chunk that was averaged before the commit was known: right if the commit is what was expected."""

    party: str
    mode: str
    """Means that are exchanged are rounded by their codec; means that each makes for itself are not."""
    parts: tuple[str | None, ...]
    values: F32 | None
    """None when they are in the sink already."""


@dataclass
class Averaging:
    """One replica's work on the mean of one commit."""

    member: Member
    commit: Commit
    sink: Sink
    own: Offer | None = None
    """The offer of this very process."""
    own_digest: str = ""
    """Digest of our update, whoever of our incarnations published it."""
    source: Source | None = None
    """Our own update, still in memory; spares reading it back, and heals chunks that went bad in the store."""
    offers: dict[int, Offer] = field(default_factory=dict)
    foreseen: dict[int, Foreseen] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    """Rank → when it was last seen to have written what it had held back."""
    silent: set[int] = field(default_factory=set)
    """Ranks that were waited for in vain: not again with each of their chunks."""
    told: set[int] = field(default_factory=set)
    """Ranks of which we said in the store that we wait for them."""

    def __post_init__(self) -> None:
        self.grid: Grid = self.member.grid(self.commit.fragment)
        self.party = Party.of_commit(self.commit)
        self.began = self.member.io.clock.monotonic()
        self._has_room = self.sink if isinstance(self.sink, Room) else None

    def room(self, start: int, stop: int) -> F32 | None:
        """The place of these elements in the sink, if they may be written there directly."""
        return self._has_room.room(start, stop) if self._has_room is not None else None

    @property
    def deadline_s(self) -> float:
        return self.member.quorum.deadline_s

    @property
    def time_left_s(self) -> float:
        return self.deadline_s - (self.member.io.clock.monotonic() - self.began)

    def is_ours(self, offer: Offer) -> bool:
        """Whether the values behind an offer are in our memory."""
        return self.source is not None and offer.rank == self.member.rank and offer.digest == self.own_digest

    @property
    def ours(self) -> Offer | None:
        """The committed offer of our rank, by whichever of our incarnations, if its values are in our memory."""
        named, offer = self.commit.contribution(self.member.rank), self.offers.get(self.member.rank)
        return (
            offer if named is not None and offer is not None and is_it(offer, named) and self.is_ours(offer) else None
        )

    def is_held(self, chunk: int) -> bool:
        """Whether somebody who takes part kept a part of this chunk, as far as we can tell."""
        offers = [self.offers.get(rank) for rank in self.party.ranks]
        return any(offer is None or offer.is_held(chunk) for offer in offers)

    def name(self, chunk: int) -> MeanName:
        return mean_name(self.member, self.commit.round_no, self.commit.fragment, self.party.id, chunk)

    def key(self, chunk: int) -> str:
        return self.member.keys.mean(self.commit.round_no, self.party.id, chunk)


def mean_name(member: Member, round_no: int, fragment: int, party: str, chunk: int) -> MeanName:
    agreement, layout = member.agreement, member.layout(fragment)
    grid = member.grid(fragment)
    return MeanName(member.run_id, round_no, fragment, party, layout.hash, agreement.mean_codec, grid, chunk)


def is_it(offer: Offer | None, named: Contribution) -> bool:
    """Whether this is the offer that a commit names."""
    return offer is not None and (offer.digest, offer.incarnation) == (named.digest, named.incarnation)
