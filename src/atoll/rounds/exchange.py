"""One round from end to end: publish, agree, average. Late replicas skip to the average of what was committed."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import CorruptUpdate, LeftBehind
from atoll.rounds.agree import agree
from atoll.rounds.average import Averaging, average
from atoll.rounds.claims import check_rank
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.publish import publish
from atoll.rounds.records import Commit
from atoll.rounds.requests import Counters
from atoll.rounds.vectors import Sink, Source
from atoll.rounds.watch import read_commit


@dataclass(frozen=True)
class RoundOutcome:
    """A round that is over: the mean is in the sink, and this is how it came about."""

    commit: Commit
    is_included: bool
    """Whether this process's own update is part of the mean; error feedback subtracts only then."""
    counters: Counters
    """Requests, bytes and seconds by phase of this round."""
    seconds: float

    @property
    def round_no(self) -> int:
        return self.commit.round_no

    @property
    def fragment(self) -> int:
        return self.commit.fragment

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.commit.ranks

    @property
    def weights(self) -> tuple[float, ...]:
        return self.commit.weights


def exchange(
    member: Member, round_no: int, fragment: int, source: Source, weight: float, base: str, sink: Sink
) -> Steps[RoundOutcome]:
    """Contribute `source` to a round and fill `sink` with the mean of what was committed."""
    before, began = member.io.counters.copy(), member.io.clock.monotonic()
    _, commit = yield Gather(
        [check_rank(member.io, member.keys, member.claim, round_no), read_commit(member, round_no)], 2
    )
    own: Offer | None = None
    offers: dict[int, Offer] = {}
    if commit is None:
        own = yield from publish(member, round_no, fragment, source, weight, base)
        commit, offers = yield from agree(member, round_no, fragment, own)
    else:
        member.events.add("late", round_no, rank=member.rank)
    check_belongs(member, commit)
    yield from average(Averaging(member, commit, sink, own, source, member.quorum.deadline_s, offers))
    yield from _settle(member, commit)
    mine = commit.contribution(member.rank)
    is_included = own is not None and mine is not None and mine.incarnation == own.incarnation
    counters = member.io.counters.since(before)
    return RoundOutcome(commit, is_included, counters, member.io.clock.monotonic() - began)


def replay(member: Member, round_no: int, sink: Sink) -> Steps[RoundOutcome | None]:
    """Take in a round that was committed without us; None when it is not committed yet."""
    before, began = member.io.counters.copy(), member.io.clock.monotonic()
    commit = yield from read_commit(member, round_no)
    if commit is None:
        return None
    check_belongs(member, commit)
    yield from average(Averaging(member, commit, sink, deadline_s=member.quorum.deadline_s))
    yield from _settle(member, commit)
    return RoundOutcome(commit, False, member.io.counters.since(before), member.io.clock.monotonic() - began)


def check_belongs(member: Member, commit: Commit) -> None:
    """The commit continues our own history, does not call our state a stray, and has no rejection that must stop us."""
    if commit.previous != member.previous:
        message = f"round {commit.round_no} does not continue what this replica has applied"
        raise LeftBehind(message, round_no=commit.round_no, latest=commit.round_no)
    stray = next((r for r in commit.rejected if r.rank == member.rank and r.check == "base"), None)
    if stray is not None:
        message = f"the state of rank {member.rank} differs from the others': {stray.detail}"
        raise CorruptUpdate(message, round_no=commit.round_no, rank=member.rank, check="base")
    if commit.rejected and member.quorum.on_rejected == "stop":
        first = commit.rejected[0]
        message = f"round {commit.round_no}: rank {first.rank} failed the check `{first.check}`: {first.detail}"
        raise CorruptUpdate(message, round_no=commit.round_no, rank=first.rank, check=first.check)


def _settle(member: Member, commit: Commit) -> Steps[None]:
    member.memory.learn(commit)
    member.previous = commit.digest
    yield from member.events.flush(member.io)
