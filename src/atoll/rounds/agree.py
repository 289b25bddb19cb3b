"""Agreement on a round: a replica watches offers arrive, decides, and creates the commit record.

The atomic create of the commit is the whole agreement: the first record counts, and every replica reads it. What a
replica decides before that is only its estimate of what the others see.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import CorruptUpdate, LeftBehind, QuorumLost, RoundError, StoreError
from atoll.result import ranks_text
from atoll.rounds import quorum
from atoll.rounds.checks import diverged_offers, rejection
from atoll.rounds.context import RoundContext
from atoll.rounds.events import LONG_WAIT_S
from atoll.rounds.io import Gather, Steps
from atoll.rounds.join import LatestClaim, fenced, present_claims
from atoll.rounds.liveness import DeadWatch
from atoll.rounds.publish import repair_offer
from atoll.rounds.records import Commit, Contribution, Offer, Rejection
from atoll.stores.base import Buffer

log = logging.getLogger("atoll.rounds")

_SAME_END_S = 1.0
"""Two estimates of the end of a wait that differ by less are the same."""


def agree(context: RoundContext, round_no: int, fragment: int, own: Offer) -> Steps[tuple[Commit, dict[int, Offer]]]:
    """Wait until a replica has committed the round, possibly this one; also returns the offers seen until then."""
    view = RoundView(context, round_no, fragment)
    view.add_offer(own)
    if not context.history.members:  # the first round of this process: ranks may have joined or left before
        yield from view.refresh_claims()
    elif view.missing() and (first_s := context.history.first_delay_s):
        yield from context.io.sleep(first_s)
    pauses = context.pauses()
    recheck_at = context.tuning.patience_s
    while True:
        # The lowest rank reads the claims at the same time, so that it can commit as soon as all offers are there.
        reads: list[Steps[Any]] = [view.poll()]
        if context.rank == min(view.members) and not view.has_fresh_claims:
            reads.append(view.refresh_claims())
        asked_at = view.elapsed_s
        commit = (yield Gather(reads, 2))[0]
        if commit is None and view.missing():
            view.missed_at = asked_at
            yield from view.watch.look(view.missing())
        if commit is None:
            commit = yield from view.act(next(pauses))
        if commit is not None:
            view.update_history()
            return commit, view.offers
        if view.elapsed_s >= recheck_at:
            recheck_at = 2 * view.elapsed_s
            yield from view.refresh_claims()
            yield from repair_offer(context, own)
            yield from _check_not_behind(context, round_no)


def read_commit(context: RoundContext, round_no: int, *, is_awaited: bool = True) -> Steps[Commit | None]:
    """The commit of a round, checked, or None while there is none."""

    def opened(data: Buffer) -> Commit:
        commit = Commit.open(data)
        if (commit.run_id, commit.round_no) != (context.run_id, round_no):
            raise CorruptUpdate("a commit is of another run or round", round_no=round_no, check="identity")
        if commit.fragment >= len(context.agreement.layouts):
            raise CorruptUpdate(f"a commit is of fragment {commit.fragment}", round_no=round_no, check="fragment")
        return commit

    key = context.keys.commit(round_no)
    data = yield from context.io.probe(key, is_awaited=is_awaited)
    if data is None:
        return None
    try:
        return opened(data)
    except CorruptUpdate:
        return (yield from context.io.read(key, opened))


@dataclass
class RoundView:
    """What one replica has seen of a round that is not committed yet, and what it does about it."""

    context: RoundContext
    round_no: int
    fragment: int
    offers: dict[int, Offer] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    """Rank → seconds after which its usable offer was seen."""
    rejected: dict[int, Rejection] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    """Rank → the slot to look for its offer in; earlier slots belong to replaced processes."""
    claims: Mapping[int, LatestClaim] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    missed_at: float = 0.0
    """When an offer was last looked for and missing."""
    claims_at: float = -math.inf
    """When the claims were last read."""
    reported: tuple[float, str] | None = None
    """The end of the wait and its consequence, as in our last `waiting` event."""

    def __post_init__(self) -> None:
        self.began = self.context.io.clock.monotonic()
        self.watch = DeadWatch(self.context.liveness)

    @property
    def has_fresh_claims(self) -> bool:
        return self.context.io.clock.monotonic() - self.claims_at < self.context.tuning.claims_age_s

    @property
    def elapsed_s(self) -> float:
        return self.context.io.clock.monotonic() - self.began

    @property
    def members(self) -> set[int]:
        known = self.context.history.members
        world = set(range(self.context.agreement.world_size)) if self.context.quorum.is_strict or not known else set()
        return world | known | set(self.offers)

    def missing(self) -> list[int]:
        return sorted(self.members - set(self.offers) - set(self.rejected))

    def add_offer(self, offer: Offer) -> None:
        """Keep an offer, reject it, or skip it when a newer process has taken over its rank."""
        rank = offer.rank
        newest = self.claims.get(rank)
        if newest is not None and offer.incarnation < newest.incarnation:
            self.slots[rank] = offer.slot + 1
            return
        self.offers[rank] = offer
        if refused := rejection(offer, self.context.expected(self.fragment)):
            self.reject(refused)
        else:
            self.arrived.setdefault(rank, self.elapsed_s)
            log.debug("round %d: offer of rank %d seen after %.3f s", self.round_no, rank, self.arrived[rank])

    def reject(self, refused: Rejection) -> None:
        self.arrived.pop(refused.rank, None)
        if refused.rank not in self.rejected:
            self.rejected[refused.rank] = refused
            if refused.rank != self.context.rank:  # `announce` has written the event for our own
                self._add_event("update_rejected", rank=refused.rank, check=refused.check, detail=refused.detail)

    def decide(self) -> quorum.Decision:
        history, now_s = self.context.history, self.elapsed_s
        return quorum.decide(
            self.context.quorum,
            members=self.members,
            arrived=self.arrived,
            elapsed_s=now_s,
            rejected=self.rejected,
            failed_checks={refused.check for refused in self.rejected.values()},
            left=self._left(),
            dead={rank: now_s + left_s for rank, left_s in self.watch.dead().items()},
            absent=history.absent,
            lateness=tuple(history.lateness),
        )

    def poll(self) -> Steps[Commit | None]:
        """Read the commit, and the offers that are missing."""
        context, round_no = self.context, self.round_no
        wanted = self.missing()
        if len(wanted) >= context.tuning.list_from:
            keys = yield from context.io.list(context.keys.offers_prefix(round_no))
            listed = {context.keys.parse_offer(key)[1:] for key in keys}
            wanted = [rank for rank in wanted if (rank, self.slots.get(rank, 0)) in listed]
        children = [read_commit(context, round_no), *(self._read_offer(rank) for rank in wanted)]
        commit, *offers = yield Gather(children, context.small_width)
        for offer in offers:
            if offer is not None:
                self.add_offer(offer)
        return commit if isinstance(commit, Commit) else None

    def _read_offer(self, rank: int) -> Steps[Offer | None]:
        context, round_no, slot = self.context, self.round_no, self.slots.get(rank, 0)
        data = yield from context.io.probe(context.keys.offer(round_no, rank, slot))
        if data is None:
            return None
        try:
            return Offer.open(data, run_id=context.run_id, round_no=round_no, rank=rank, slot=slot)
        except CorruptUpdate as exc:
            # No rejection, because the store may be at fault: a later read may succeed, and the writer may repair it.
            log.debug("round %d: the offer of rank %d cannot be read: %s", round_no, rank, exc)
            self.unreadable[rank] = exc.message
            return None

    def refresh_claims(self) -> Steps[None]:
        """Read which ranks were replaced or have left, and drop offers of replaced processes. May raise `Fenced`."""
        context = self.context
        began = context.io.clock.monotonic()
        found = dict((yield from present_claims(context.io, context.keys)))
        held = {offer.rank: offer.incarnation for offer in self.offers.values()}
        for rank, incarnation in (held | {context.rank: context.claim.incarnation}).items():
            if rank not in found or found[rank].incarnation <= incarnation:
                continue
            # A LIST has no checksum, so a newer claim counts only if it can be read.
            if (yield from context.io.probe(context.keys.claim(rank, incarnation + 1))) is None:
                found[rank] = LatestClaim(incarnation, has_left=False)
            elif rank == context.rank:
                raise fenced(context.claim, self.round_no)
        self.claims, self.claims_at = found, began
        for rank, offer in list(self.offers.items()):
            if rank in found and offer.incarnation < found[rank].incarnation:
                log.debug("round %d: rank %d was replaced; its offer is dropped", self.round_no, rank)
                del self.offers[rank]
                self.arrived.pop(rank, None)
                self.rejected.pop(rank, None)
                self.slots[rank] = offer.slot + 1

    def act(self, pause_s: float) -> Steps[Commit | None]:
        """Do what the decision says; None means poll again."""
        match self.decide():
            case quorum.GiveUp() as given_up:
                raise self._error(given_up)
            case quorum.CommitDecision(ranks):
                commit = yield from self._await_lower_ranks(ranks)
                commit = commit or (yield from self._commit())
                if commit is None:
                    yield from self.context.io.sleep(pause_s)
                return commit
            case quorum.Wait(until):
                yield from self._report_wait(until)
                yield from self.context.io.sleep(max(0.0, min(pause_s, until - self.elapsed_s)))
        return None

    def _await_lower_ranks(self, ranks: Sequence[int]) -> Steps[Commit | None]:
        """Wait `turn_s` for each lower rank of the commit: they see the same offers, and one writer is enough."""
        context = self.context
        lower = sum(rank < context.rank for rank in ranks)
        not_before = context.io.clock.monotonic() + lower * context.tuning.turn_s
        pauses = context.pauses()
        while (left_s := not_before - context.io.clock.monotonic()) > 0:
            yield from context.io.sleep(min(left_s, next(pauses)))
            if (commit := (yield from read_commit(context, self.round_no))) is not None:
                return commit
        return None

    def _commit(self) -> Steps[Commit | None]:
        """Decide again with fresh claims, and create the commit. Returns the commit that counts; None: poll again."""
        context, round_no = self.context, self.round_no
        if not self.has_fresh_claims:
            yield from self.refresh_claims()
        for refused in diverged_offers({rank: self.offers[rank] for rank in self.arrived}).values():
            self.reject(refused)
        decision = self.decide()
        if not isinstance(decision, quorum.CommitDecision):
            return None
        proposal = self._proposal(decision.ranks)
        is_ours = yield from context.io.create(context.keys.commit(round_no), proposal.seal())
        commit = proposal if is_ours else (yield from read_commit(context, round_no))
        if commit != proposal:
            log.debug("round %d: another replica created the commit first", round_no)
            return commit
        yield from self._withdraw_if_stale(commit)
        self._add_event("round_committed", ranks=list(commit.ranks), mode=commit.mode)
        for rank in sorted(self.members - set(commit.ranks) - {r.rank for r in commit.rejected}):
            self._add_event("rank_late", rank=rank)
        return commit

    def _proposal(self, ranks: Sequence[int]) -> Commit:
        """The commit record of these ranks."""
        context, offers = self.context, [self.offers[rank] for rank in ranks]
        has_skipped = any(offer.expected for offer in offers)
        members = {*range(context.agreement.world_size), *self.members, *self.claims} - self._left()
        return Commit(
            run_id=context.run_id,
            round_no=self.round_no,
            fragment=self.fragment,
            previous=context.previous,
            base=max(offer.base for offer in offers),
            mode="scatter" if has_skipped else context.exchange_mode(self.fragment, len(offers)),
            contributions=tuple(
                Contribution(o.rank, o.incarnation, o.attempt, o.slot, o.digest, o.weight, o.norm) for o in offers
            ),
            rejected=tuple(self.rejected[rank] for rank in sorted(self.rejected)),
            members=tuple(sorted(members)),
            by=context.rank,
        )

    def _withdraw_if_stale(self, created: Commit) -> Steps[None]:
        """Delete our commit if it replaced one that was deleted because the run is rounds ahead."""
        context, round_no = self.context, self.round_no
        if context.quorum.is_strict:
            return
        listed = yield from context.io.list(context.keys.commits_prefix())
        latest = max((context.keys.parse_commit(key) for key in listed), default=0)
        if latest > round_no:
            after = yield from read_commit(context, round_no + 1)
            if after is not None and after.previous == created.digest:
                return  # the others have continued from this commit while we were slow
            yield from context.io.delete(context.keys.commit(round_no))
            message = f"round {round_no} was over long ago; the others are at round {latest + 1}"
            raise LeftBehind(message, round_no=round_no, latest=latest)

    def update_history(self) -> None:
        """Record how late offers came, to wait better in the next rounds."""
        history, arrivals = self.context.history, sorted(self.arrived.values())
        least = min(self.context.quorum.least or len(arrivals), len(arrivals))
        if least:
            history.lateness.extend(at - arrivals[least - 1] for at in arrivals[least:])
        history.waits.append(self.missed_at)  # the time of the last miss, without the latency of the requests after it

    def _report_wait(self, until: float) -> Steps[None]:
        """Once a wait is long, write a `waiting` event for people who watch the run; again only if its end changes."""
        if self.elapsed_s < LONG_WAIT_S:
            return
        context, least = self.context, self.context.quorum.least
        then = "go_on" if least is not None and len(self.arrived) >= least else "give_up"
        if self.reported is not None and abs(until - self.reported[0]) < _SAME_END_S and then == self.reported[1]:
            return
        self.reported = until, then
        at = round(context.io.clock.time() + until - self.elapsed_s, 3)
        self._add_event("waiting", until=at, then=then, least=least)
        with suppress(StoreError):  # the event is only information, so its failure must not end the wait
            yield from context.events.flush(context.io)

    def _error(self, given_up: quorum.GiveUp) -> RoundError:
        if given_up.is_diverged:
            return diverged(self.context, self.round_no, self.rejected)
        if self.rejected and self.context.quorum.on_rejected == "stop":
            first = self.rejected[min(self.rejected)]
            message = f"round {self.round_no}: rank {first.rank} failed the check `{first.check}`: {first.detail}"
            return CorruptUpdate(message, round_no=self.round_no, rank=first.rank, check=first.check)
        refused = [f"; rank {r.rank} failed the check `{r.check}`: {r.detail}" for r in self.rejected.values()]
        unreadable = [f"; the offer of rank {rank} cannot be read: {why}" for rank, why in self.unreadable.items()]
        if given_up.dead:
            return self.watch.error(self.round_no, given_up.dead, given_up.missing, "".join([*refused, *unreadable]))
        message = f"round {self.round_no} has no quorum: {given_up.reason}" + "".join([*refused, *unreadable])
        hint = "look at the logs of the missing ranks; a smaller quorum lets the others go on"
        timed_out = self.elapsed_s >= self.context.quorum.deadline_s
        return QuorumLost(message, round_no=self.round_no, missing=given_up.missing, timed_out=timed_out, hint=hint)

    def _left(self) -> set[int]:
        return {rank for rank, claim in self.claims.items() if claim.has_left}

    def _add_event(self, event: str, **details: object) -> None:
        self.context.events.add(event, self.round_no, **details)


def diverged(context: RoundContext, round_no: int, rejected: Mapping[int, Rejection]) -> RoundError:
    """The error of a round whose updates were all rejected because training diverged."""
    not_finite = [rank for rank, refused in rejected.items() if refused.check == "finite"]
    which = (
        f"update of {ranks_text(not_finite)} has"
        if len(not_finite) == 1
        else f"updates of {ranks_text(not_finite)} have"
    )
    others = [
        f"; that of rank {rank}: {refused.detail}" for rank, refused in rejected.items() if rank not in not_finite
    ]
    what = f"the {which} NaN or infinite values" if not_finite else "every update is far larger than in earlier rounds"
    message = f"training diverged: in round {round_no} {what}" + "".join(others)
    run = shlex.quote(context.run_id)
    hint = f"`atoll top {run}` and `atoll logs {run}` show the loss; lower the learning rate or clip the gradients"
    return RoundError(message, round_no=round_no, reason="diverged", hint=hint)


def _check_not_behind(context: RoundContext, round_no: int) -> Steps[None]:
    """Raise `LeftBehind` when later rounds are committed and the commit of this one was deleted."""
    if context.quorum.is_strict:
        return
    listed = yield from context.io.list(context.keys.commits_prefix())
    rounds = [context.keys.parse_commit(key) for key in listed]
    if rounds and round_no not in rounds and max(rounds) > round_no:
        message = f"round {round_no} is over and gone; the others are at round {max(rounds) + 1}"
        raise LeftBehind(message, round_no=round_no, latest=max(rounds))
