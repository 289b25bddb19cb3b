"""Agreeing on a round: watch offers arrive, decide, and create the commit record that everybody then reads back.

The create is the whole agreement. Everything before it is one observer's guess at what the others also see.

What one observer sees of a round: offers as they arrive, and the commit once somebody has made it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import CorruptUpdate, LeftBehind, QuorumLost, RoundError, StoreError
from atoll.rounds import quorum
from atoll.rounds.checks import rejection, strays
from atoll.rounds.context import RoundContext
from atoll.rounds.events import LONG_WAIT_S
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import LatestClaim, fenced, latest_claims
from atoll.rounds.publish import repair_offer
from atoll.rounds.records import Commit, Contribution, Offer, Rejection
from atoll.stores.base import Buffer


@dataclass
class RoundView:
    """What one observer has seen of a round so far."""

    member: RoundContext
    round_no: int
    fragment: int
    began: float
    offers: dict[int, Offer] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    claims: Mapping[int, LatestClaim] = field(default_factory=dict)
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

    def learn_claims(self, found: Mapping[int, LatestClaim]) -> None:
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


def look(watch: RoundView) -> Steps[Commit | None]:
    """One look at the store: is there a commit, and which offers are new?"""
    member, round_no = watch.member, watch.round_no
    wanted = watch.missing()
    if len(wanted) >= member.tuning.list_from:
        listed = {
            member.keys.parse_offer(key)[1:] for key in (yield from member.io.list(member.keys.offers_prefix(round_no)))
        }
        wanted = [rank for rank in wanted if (rank, watch.slots.get(rank, 0)) in listed]
    children = [read_commit(member, round_no), *(_look_for(watch, rank) for rank in wanted)]
    seen: list[Commit | Offer | None] = yield Gather(children, 1 if member.is_local_store else member.connections)
    for offer in seen[1:]:
        if isinstance(offer, Offer):
            watch.take(offer)
    commit = seen[0]
    return commit if isinstance(commit, Commit) else None


def _look_for(watch: RoundView, rank: int) -> Steps[Offer | None]:
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


def read_commit(member: RoundContext, round_no: int, *, is_awaited: bool = True) -> Steps[Commit | None]:
    """The commit of a round, checked, or None while there is none."""
    key = member.keys.commit(round_no)
    data = yield from member.io.probe(key, is_awaited=is_awaited)
    if data is None:
        return None
    try:
        return _opened_commit(member, round_no, data)
    except CorruptUpdate:
        return (yield from member.io.read(key, lambda data: _opened_commit(member, round_no, data)))


def _opened_commit(member: RoundContext, round_no: int, data: Buffer) -> Commit:
    commit = Commit.open(data)
    if (commit.run_id, commit.round_no) != (member.run_id, round_no):
        raise CorruptUpdate("a commit is of another run or round", round_no=round_no, check="identity")
    if commit.fragment >= len(member.agreement.layouts):
        raise CorruptUpdate(f"a commit is of fragment {commit.fragment}", round_no=round_no, check="fragment")
    return commit


def agree(member: RoundContext, round_no: int, fragment: int, own: Offer) -> Steps[tuple[Commit, dict[int, Offer]]]:
    """Wait until the round is committed, by us or by another; also the offers seen on the way."""
    watch = RoundView(member, round_no, fragment, member.io.clock.monotonic())
    watch.take(own)
    if not member.memory.members:  # the first round here: others may have joined or left before us
        yield from refresh_claims(watch)
    elif watch.missing() and (first := member.memory.first_delay_s):
        yield from member.io.sleep(first)
    pauses = member.pauses()
    look_back_at = member.tuning.patience_s
    while True:
        # Whoever is first in line reads the claims along the way, and can commit as soon as all are there.
        looks: list[Steps[Any]] = [look(watch)]
        if member.rank == min(watch.members) and not watch.has_fresh_claims:
            looks.append(refresh_claims(watch))
        asked_at = watch.elapsed_s
        commit = (yield Gather(looks, 2))[0]
        if commit is None and watch.missing():
            watch.missed_at = asked_at
        if commit is None:
            commit = yield from _act(watch, next(pauses))
        if commit is not None:
            _learn(watch)
            return commit, watch.offers
        if watch.elapsed_s >= look_back_at:
            look_back_at = 2 * watch.elapsed_s
            yield from refresh_claims(watch)
            yield from repair_offer(member, own)
            yield from check_not_behind(member, round_no)


def refresh_claims(watch: RoundView) -> Steps[None]:
    """See who has been replaced and who has left. Raises `Fenced` when that is us."""
    member = watch.member
    began = member.io.clock.monotonic()
    found = dict((yield from latest_claims(member.io, member.keys)))
    held = {offer.rank: offer.incarnation for offer in watch.offers.values()}
    for rank, incarnation in (held | {member.rank: member.claim.incarnation}).items():
        if rank not in found or found[rank].incarnation <= incarnation:
            continue
        # A LIST has no checksum, so what it says against somebody is looked up.
        if (yield from member.io.probe(member.keys.claim(rank, incarnation + 1))) is None:
            found[rank] = LatestClaim(incarnation, has_left=False)
        elif rank == member.rank:
            raise fenced(member.claim, watch.round_no)
    watch.learn_claims(found)
    watch.claims_at = began


def check_not_behind(member: RoundContext, round_no: int) -> Steps[None]:
    """Raise `LeftBehind` when later rounds are committed and this one's record is gone."""
    if member.quorum.is_strict:
        return
    listed = yield from member.io.list(member.keys.commits_prefix())
    rounds = [member.keys.parse_commit(key) for key in listed]
    if rounds and round_no not in rounds and max(rounds) > round_no:
        message = f"round {round_no} is over and gone; the others are at round {max(rounds) + 1}"
        raise LeftBehind(message, round_no=round_no, latest=max(rounds))


def _act(watch: RoundView, pause_s: float) -> Steps[Commit | None]:
    """Do what the decision says; None means look again."""
    match watch.decide():
        case quorum.GiveUp(reason, missing):
            raise _given_up(watch, reason, missing)
        case quorum.CommitDecision(ranks):
            commit = yield from _await_turn(watch, ranks)
            commit = commit or (yield from _propose(watch))
            if commit is None:
                yield from watch.member.io.sleep(pause_s)
            return commit
        case quorum.Wait(until):
            yield from _report_wait(watch, until)
            yield from watch.member.io.sleep(max(0.0, min(pause_s, until - watch.elapsed_s)))
    return None


def _report_wait(watch: RoundView, until: float) -> Steps[None]:
    """Once a wait is long, say in the store how it will end. A store that fails is no reason to stop waiting."""
    if watch.elapsed_s >= LONG_WAIT_S and watch.tell_outlook(until):
        with suppress(StoreError):
            yield from watch.member.events.flush(watch.member.io)


def _await_turn(watch: RoundView, ranks: Sequence[int]) -> Steps[Commit | None]:
    """Let lower ranks of those to be committed go first: they see the same, and one writer is enough."""
    member = watch.member
    turn = sum(rank < member.rank for rank in ranks)
    not_before = member.io.clock.monotonic() + turn * member.tuning.turn_s
    pauses = member.pauses()
    while (left := not_before - member.io.clock.monotonic()) > 0:
        yield from member.io.sleep(min(left, next(pauses)))
        if (commit := (yield from read_commit(member, watch.round_no))) is not None:
            return commit
    return None


def _propose(watch: RoundView) -> Steps[Commit | None]:
    """Decide once more with fresh claims, commit what was decided, and read back what stands; None to look again."""
    member = watch.member
    if not watch.has_fresh_claims:
        yield from refresh_claims(watch)
    for refused in strays({rank: watch.offers[rank] for rank in watch.arrived}).values():
        watch.reject(refused)
    decision = watch.decide()
    if not isinstance(decision, quorum.CommitDecision):
        return None
    proposal = _proposal(watch, decision.ranks)
    is_ours = yield from member.io.create(member.keys.commit(watch.round_no), proposal.seal())
    commit = proposal if is_ours else (yield from read_commit(member, watch.round_no))
    if commit == proposal:
        yield from _withdraw_if_stale(watch, commit)
        _announce(watch, commit)
    return commit


def _withdraw_if_stale(watch: RoundView, made: Commit) -> Steps[None]:
    """Take back a commit created where an old one had been retired; all who took part in that one are past it."""
    member = watch.member
    if member.quorum.is_strict:
        return
    listed = yield from member.io.list(member.keys.commits_prefix())
    latest = max((member.keys.parse_commit(key) for key in listed), default=0)
    if latest > watch.round_no:
        after = yield from read_commit(member, watch.round_no + 1)
        if after is not None and after.previous == made.digest:
            return  # it is we who were slow: the others have gone on from this very commit
        yield from member.io.delete(member.keys.commit(watch.round_no))
        message = f"round {watch.round_no} was over long ago; the others are at round {latest + 1}"
        raise LeftBehind(message, round_no=watch.round_no, latest=latest)


def _proposal(watch: RoundView, ranks: Sequence[int]) -> Commit:
    """The commit record of these ranks, and of no others that have arrived."""
    member, offers = watch.member, [watch.offers[rank] for rank in ranks]
    left = {rank for rank, standing in watch.claims.items() if standing.has_left}
    is_holding = any(offer.expected for offer in offers)
    members = {*range(member.agreement.world_size), *watch.members, *watch.claims} - left
    return Commit(
        run_id=member.run_id,
        round_no=watch.round_no,
        fragment=watch.fragment,
        previous=member.previous,
        base=max(offer.base for offer in offers),
        mode="scatter" if is_holding else member.exchange_mode(watch.fragment, len(offers)),
        contributions=tuple(
            Contribution(o.rank, o.incarnation, o.attempt, o.slot, o.digest, o.weight, o.norm) for o in offers
        ),
        rejected=tuple(watch.rejected[rank] for rank in sorted(watch.rejected)),
        members=tuple(sorted(members)),
        by=member.rank,
    )


def _announce(watch: RoundView, commit: Commit) -> None:
    events = watch.member.events
    events.add("round_committed", commit.round_no, ranks=list(commit.ranks), mode=commit.mode)
    for rank in sorted(watch.members - set(commit.ranks) - {r.rank for r in commit.rejected}):
        events.add("rank_late", commit.round_no, rank=rank)


def _learn(watch: RoundView) -> None:
    """Remember how long others took, to wait better next time."""
    memory, arrivals = watch.member.memory, sorted(watch.arrived.values())
    least = min(watch.member.quorum.least or len(arrivals), len(arrivals))
    if least:
        memory.lateness.extend(at - arrivals[least - 1] for at in arrivals[least:])
    memory.waits.append(watch.missed_at)  # when it was still too early to ask; not how long the answer took


def _given_up(watch: RoundView, reason: str, missing: tuple[int, ...]) -> RoundError:
    if watch.rejected and watch.member.quorum.on_rejected == "stop":
        first = watch.rejected[min(watch.rejected)]
        message = f"round {watch.round_no}: rank {first.rank} failed the check `{first.check}`: {first.detail}"
        return CorruptUpdate(message, round_no=watch.round_no, rank=first.rank, check=first.check)
    refused = [f"; rank {r.rank} failed the check `{r.check}`: {r.detail}" for r in watch.rejected.values()]
    unreadable = [f"; the offer of rank {rank} cannot be read: {why}" for rank, why in watch.unreadable.items()]
    message = f"round {watch.round_no} has no quorum: {reason}" + "".join([*refused, *unreadable])
    hint = "look at the logs of the missing ranks; a smaller quorum lets the others go on"
    timed_out = watch.elapsed_s >= watch.member.quorum.deadline_s
    return QuorumLost(message, round_no=watch.round_no, missing=missing, timed_out=timed_out, hint=hint)
