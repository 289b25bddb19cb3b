"""One round from end to end: publish, agree, average, as much of it side by side as can be.

    upload ──> offer ──> offers of the others ──> commit ──> means of the others
       └─> their chunks as they land ──> our means ──────────┘

Late replicas skip to the average of what was committed.

One replica's part in one round, as far as those who work on it side by side have to know of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from atoll.errors import CorruptUpdate, LeftBehind
from atoll.rounds.agree import agree, read_commit
from atoll.rounds.average import average
from atoll.rounds.codecs.base import F32
from atoll.rounds.context import RoundContext
from atoll.rounds.contributions import MeanTask, PrefetchedMean
from atoll.rounds.io import Counters, Gather, Steps
from atoll.rounds.join import check_rank
from atoll.rounds.layout import Room, Sink, Source, are_separate
from atoll.rounds.prefetch import prefetch
from atoll.rounds.publish import Seen, announce, draft_offer, has_announced, is_inline, upload
from atoll.rounds.records import Commit, Offer


@dataclass
class RoundState:
    """What goes in, what is expected, and what has been found out so far."""

    member: RoundContext
    round_no: int
    fragment: int
    source: Source
    sink: Sink
    weight: float
    base: str
    is_separate: bool
    """Whether the sink may be written to while the source is still needed."""
    is_over: bool = False
    """It is known who takes part, or that the round failed."""
    is_again: bool = False
    """This process has tried the round before, and may have announced another update than this one."""
    own: Offer | None = None
    offers: dict[int, Offer] = field(default_factory=dict)
    commit: Commit | None = None
    foreseen: dict[int, PrefetchedMean] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)
    """Our own chunks that have been encoded so far."""

    def __post_init__(self) -> None:
        self.is_again = self.member.memory.announced == self.round_no

    @cached_property
    def expected(self) -> dict[int, int]:
        """Rank → incarnation of those who took part last time; empty when there is no telling."""
        return self.member.memory.expected(self.member.rank, self.member.claim.incarnation)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.expected))

    @cached_property
    def mode(self) -> str:
        return self.member.exchange_mode(self.fragment, len(self.expected))

    @property
    def is_void(self) -> bool:
        """Not what was expected was committed, or nothing."""
        if not self.is_over:
            return False
        return self.commit is None or {c.rank: c.incarnation for c in self.commit.contributions} != self.expected

    def room(self, start: int, stop: int) -> F32 | None:
        """Where the mean of these elements may be made; None if it has to be made elsewhere and copied."""
        return self._has_room.room(start, stop) if self._has_room is not None else None

    @cached_property
    def _has_room(self) -> Room | None:
        return self.sink if self.is_separate and isinstance(self.sink, Room) else None

    @cached_property
    def is_inline(self) -> bool:
        return is_inline(self.member, self.fragment)

    @cached_property
    def draft(self) -> Offer:
        """Our offer before the update was looked at; it says what is held back."""
        draft = draft_offer(self.member, self.round_no, self.fragment, self.weight, self.base)
        is_holding = self.mode == "scatter" and not self.is_inline and self.member.tuning.skip_upload
        return replace(draft, expected=self.ranks) if self.ranks and is_holding else draft


@dataclass(frozen=True)
class RoundOutcome:
    """A round that is over: the mean is in the sink, and this is how it came about."""

    commit: Commit
    is_included: bool
    """Whether this replica's update is part of the mean; error feedback subtracts only then."""
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
    member: RoundContext, round_no: int, fragment: int, source: Source, weight: float, base: str, sink: Sink
) -> Steps[RoundOutcome]:
    """Contribute `source` to a round and fill `sink` with the mean of what was committed."""
    before, began = member.io.counted(), member.io.clock.monotonic()
    turn = RoundState(member, round_no, fragment, source, sink, weight, base, are_separate(source, sink))
    own_digest, _ = yield Gather([_take_part(turn), prefetch(turn)], 2)
    commit = turn.commit
    assert commit is not None
    check_belongs(member, commit)
    work = MeanTask(member, commit, sink, turn.own, own_digest, source, turn.offers, turn.foreseen)
    yield Gather([average(work), member.events.flush(member.io)], 2)
    _settle(member, commit)
    mine = commit.contribution(member.rank)
    is_included = mine is not None and mine.digest == own_digest
    return RoundOutcome(commit, is_included, member.io.counted().since(before), member.io.clock.monotonic() - began)


def _take_part(turn: RoundState) -> Steps[str]:
    """Publish and agree, or find that the round is over; the digest of our update."""
    try:
        offer = yield from _publish(turn)
        if turn.commit is None:
            turn.own = yield from announce(turn.member, offer)
            turn.commit, turn.offers = yield from agree(turn.member, turn.round_no, turn.fragment, turn.own)
        else:
            turn.member.events.add("late", turn.round_no, rank=turn.member.rank)
        turn.member.memory.is_late = turn.own is None
        return offer.digest
    finally:
        turn.is_over = True


def _publish(turn: RoundState) -> Steps[Offer]:
    """Write the update and look whether the round is still to come; for a replica that lags behind, look first."""
    member, io = turn.member, turn.member.io
    looks = [_look(turn), check_rank(io, member.keys, member.claim, turn.round_no), io.timeline.flush(io)]
    if turn.is_again:
        yield Gather(looks, 3)
        offer = yield from upload(member, turn.draft, turn.source, is_dry=True)
        # What a standing offer names must stay as it is, whatever was trained since.
        if turn.commit is not None or (yield from has_announced(member, offer)):
            return offer
    elif not member.memory.is_late:
        offer, *_ = yield Gather([upload(member, turn.draft, turn.source, seen=turn.seen), *looks], 4)
        return _as_offer(offer)
    else:
        yield Gather(looks, 3)
    return (yield from upload(member, turn.draft, turn.source, is_dry=turn.commit is not None))


def _look(turn: RoundState) -> Steps[None]:
    """Whether the round is over; also tells how long a small request takes."""
    asked = turn.member.io.clock.monotonic()
    turn.commit = yield from read_commit(turn.member, turn.round_no, is_awaited=False)
    turn.member.memory.trips.append(turn.member.io.clock.monotonic() - asked)


def _as_offer(value: object) -> Offer:
    assert isinstance(value, Offer)
    return value


def replay(member: RoundContext, round_no: int, room: Callable[[int], Sink]) -> Steps[RoundOutcome | None]:
    """Take in a round that was committed without us; None when it is not committed yet.

    `room` gives the sink for the mean of a fragment; the commit says which fragment that is.
    """
    before, began = member.io.counted(), member.io.clock.monotonic()
    commit = yield from read_commit(member, round_no)
    if commit is None:
        return None
    check_belongs(member, commit)
    yield Gather([average(MeanTask(member, commit, room(commit.fragment))), member.events.flush(member.io)], 2)
    _settle(member, commit)
    return RoundOutcome(commit, False, member.io.counted().since(before), member.io.clock.monotonic() - began)


def check_belongs(member: RoundContext, commit: Commit) -> None:
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


def _settle(member: RoundContext, commit: Commit) -> None:
    member.memory.learn(commit)
    member.previous = commit.digest
