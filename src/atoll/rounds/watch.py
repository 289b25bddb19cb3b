"""What one observer sees of a round: offers as they arrive, and the commit once somebody has made it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import CorruptUpdate
from atoll.rounds import quorum
from atoll.rounds.checks import rejection
from atoll.rounds.claims import Standing
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.records import Commit, Rejection
from atoll.stores.base import Buffer


@dataclass
class Watch:
    """What one observer has seen of a round so far."""

    member: Member
    round_no: int
    fragment: int
    began: float
    offers: dict[int, Offer] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    claims: Mapping[int, Standing] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    missed_at: float = 0.0
    """When somebody was last asked for in vain."""
    claims_at: float = -math.inf
    """When the claims were last read."""
    told: tuple[float, str] | None = None
    """What we said of how the wait will end."""

    @property
    def has_fresh_claims(self) -> bool:
        return self.member.io.clock.monotonic() - self.claims_at < self.member.tuning.claims_age_s

    @property
    def elapsed_s(self) -> float:
        return self.member.io.clock.monotonic() - self.began

    @property
    def members(self) -> set[int]:
        known = self.member.memory.members
        world = set(range(self.member.agreement.world_size)) if self.member.quorum.is_strict or not known else set()
        return world | known | set(self.offers)

    def missing(self) -> list[int]:
        return sorted(self.members - set(self.offers) - set(self.rejected))

    def take(self, offer: Offer) -> None:
        """An offer was seen: keep it, reject it, or pass over it when its process has been replaced."""
        rank = offer.rank
        newest = self.claims.get(rank)
        if newest is not None and offer.incarnation < newest.incarnation:
            self.slots[rank] = offer.slot + 1
            return
        self.offers[rank] = offer
        if refused := rejection(offer, self.member.expected(self.fragment)):
            self.reject(refused)
        else:
            self.arrived.setdefault(rank, self.elapsed_s)

    def reject(self, refused: Rejection) -> None:
        self.arrived.pop(refused.rank, None)
        if refused.rank not in self.rejected:
            self.rejected[refused.rank] = refused
            if refused.rank != self.member.rank:  # one's own was told when it was published
                self._tell("update_rejected", rank=refused.rank, check=refused.check, detail=refused.detail)

    def learn_claims(self, found: Mapping[int, Standing]) -> None:
        """Drop what came from processes that are over."""
        self.claims = found
        for rank, offer in list(self.offers.items()):
            if rank in found and offer.incarnation < found[rank].incarnation:
                del self.offers[rank]
                self.arrived.pop(rank, None)
                self.rejected.pop(rank, None)
                self.slots[rank] = offer.slot + 1

    def decide(self) -> quorum.Decision:
        memory = self.member.memory
        return quorum.decide(
            self.member.quorum,
            members=self.members,
            arrived=self.arrived,
            elapsed_s=self.elapsed_s,
            rejected=self.rejected,
            left=[rank for rank, standing in self.claims.items() if standing.has_left],
            away=memory.away,
            lateness=tuple(memory.lateness),
        )

    def tell_outlook(self, until: float) -> bool:
        """Note how the wait will end, for people who look from outside; whether that is news."""
        least = self.member.quorum.least
        then = "go_on" if least is not None and len(self.arrived) >= least else "give_up"
        if self.told == (until, then):
            return False
        self.told = until, then
        at = round(self.member.io.clock.time() + until - self.elapsed_s, 3)
        self._tell("waiting", until=at, then=then, least=least)
        return True

    def _tell(self, event: str, **details: object) -> None:
        self.member.events.add(event, self.round_no, **details)


def look(watch: Watch) -> Steps[Commit | None]:
    """One look at the store: is there a commit, and which offers are new?"""
    member, round_no = watch.member, watch.round_no
    wanted = watch.missing()
    if len(wanted) >= member.tuning.list_from:
        listed = {
            member.keys.parse_offer(key)[1:] for key in (yield from member.io.list(member.keys.offers_prefix(round_no)))
        }
        wanted = [rank for rank in wanted if (rank, watch.slots.get(rank, 0)) in listed]
    children = [read_commit(member, round_no), *(_look_for(watch, rank) for rank in wanted)]
    seen: list[Commit | Offer | None] = yield Gather(children, 1 if member.is_near else member.connections)
    for offer in seen[1:]:
        if isinstance(offer, Offer):
            watch.take(offer)
    commit = seen[0]
    return commit if isinstance(commit, Commit) else None


def _look_for(watch: Watch, rank: int) -> Steps[Offer | None]:
    member, round_no, slot = watch.member, watch.round_no, watch.slots.get(rank, 0)
    key = member.keys.offer(round_no, rank, slot)
    data = yield from member.io.probe(key)
    if data is None:
        return None

    try:
        return Offer.open(data, run_id=member.run_id, round_no=round_no, rank=rank, slot=slot)
    except CorruptUpdate as exc:
        # Not the replica's fault, so not a rejection: another look may go better, and whoever wrote it may mend it.
        watch.unreadable[rank] = exc.message
        return None


def read_commit(member: Member, round_no: int, *, is_awaited: bool = True) -> Steps[Commit | None]:
    """The commit of a round, checked, or None while there is none."""
    key = member.keys.commit(round_no)
    data = yield from member.io.probe(key, is_awaited=is_awaited)
    if data is None:
        return None
    try:
        return _opened_commit(member, round_no, data)
    except CorruptUpdate:
        return (yield from member.io.read(key, lambda data: _opened_commit(member, round_no, data)))


def _opened_commit(member: Member, round_no: int, data: Buffer) -> Commit:
    commit = Commit.open(data)
    if (commit.run_id, commit.round_no) != (member.run_id, round_no):
        raise CorruptUpdate("a commit is of another run or round", round_no=round_no, check="identity")
    if commit.fragment >= len(member.agreement.layouts):
        raise CorruptUpdate(f"a commit is of fragment {commit.fragment}", round_no=round_no, check="fragment")
    return commit
