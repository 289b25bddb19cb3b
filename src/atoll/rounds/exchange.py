"""One round from start to end: `exchange` contributes an update and fills a sink with the mean; `replay` only reads.

    upload ──> offer ──> offers of the others ──> commit ──> means of the others
       └─> prefetch: chunks of the others ──> our means ─────┘

The two lines run concurrently. A replica that comes after the commit skips to the average of what was committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from atoll.errors import CorruptUpdate, LeftBehind
from atoll.rounds.agree import agree, read_commit
from atoll.rounds.average import average
from atoll.rounds.context import RoundContext
from atoll.rounds.contributions import MeanTask
from atoll.rounds.io import Counters, Gather, Steps
from atoll.rounds.join import check_rank
from atoll.rounds.layout import Sink, Source, are_separate
from atoll.rounds.prefetch import prefetch
from atoll.rounds.publish import ChunkSummary, announce, draft_offer, has_announced, is_inline, upload
from atoll.rounds.records import Commit, Offer

log = logging.getLogger("atoll.rounds")


@dataclass(frozen=True)
class RoundOutcome:
    """A round that is over. The mean is in the sink."""

    commit: Commit
    is_included: bool
    """Whether this replica's update is part of the mean; only then error feedback subtracts it."""
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


@dataclass
class RoundState:
    """Round state shared by its concurrent tasks: the upload and agreement, and the prefetch."""

    context: RoundContext
    round_no: int
    fragment: int
    source: Source
    sink: Sink
    weight: float
    base: str
    commit: Commit | None = None
    is_over: bool = False
    """Nothing more will be learnt about the commit: it is in `commit`, or the round failed."""
    encoded: dict[int, ChunkSummary] = field(default_factory=dict)
    """Our own chunks that have been encoded so far."""

    def __post_init__(self) -> None:
        self.is_separate = are_separate(self.source, self.sink)
        """Whether the sink can be written to while the source is still needed."""
        self.is_retry = self.context.history.announced == self.round_no
        """This process has tried the round before, and may have announced another update than this one."""

    @cached_property
    def expected(self) -> dict[int, int]:
        """Rank → incarnation of the expected participants: those of the last round. Empty when it is uncertain."""
        return self.context.history.expected_participants(self.context.claim)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The expected ranks."""
        return tuple(sorted(self.expected))

    @cached_property
    def mode(self) -> str:
        """The expected exchange mode."""
        return self.context.exchange_mode(self.fragment, len(self.expected))

    @property
    def is_unexpected(self) -> bool:
        """Whether the round failed or has other participants than expected."""
        if not self.is_over:
            return False
        return self.commit is None or {c.rank: c.incarnation for c in self.commit.contributions} != self.expected

    @cached_property
    def is_inline(self) -> bool:
        return is_inline(self.context, self.fragment)

    @cached_property
    def draft(self) -> Offer:
        """Our offer before the update is encoded. Its `expected` ranks determine which chunks we do not upload."""
        draft = draft_offer(self.context, self.round_no, self.fragment, self.weight, self.base)
        can_skip = self.mode == "scatter" and not self.is_inline and self.context.tuning.skip_upload
        return replace(draft, expected=self.ranks) if self.ranks and can_skip else draft


class _Participation(NamedTuple):
    digest: str
    """Of our update."""
    own: Offer | None
    """Our offer; None if the round was committed before we announced one."""
    offers: dict[int, Offer]
    """The offers seen while waiting for the commit."""


def exchange(
    context: RoundContext, round_no: int, fragment: int, source: Source, weight: float, base: str, sink: Sink
) -> Steps[RoundOutcome]:
    """Contribute `source` to a round and fill `sink` with the mean of what was committed."""
    before, began = context.io.counted(), context.io.clock.monotonic()
    state = RoundState(context, round_no, fragment, source, sink, weight, base)
    (digest, own, offers), prefetched = yield Gather([_participate(state), prefetch(state)], 2)
    commit = state.commit
    assert commit is not None
    check_belongs(context, commit)
    task = MeanTask(context, commit, sink, own, digest, source, offers, prefetched)
    yield Gather([average(task), context.events.flush(context.io)], 2)
    _apply_to_history(context, commit)
    mine = commit.contribution(context.rank)
    is_included = mine is not None and mine.digest == digest
    seconds = context.io.clock.monotonic() - began
    log.debug("round %d: rank %d has the mean of ranks %s after %.3f s", round_no, context.rank, commit.ranks, seconds)
    return RoundOutcome(commit, is_included, context.io.counted().since(before), seconds)


def replay(context: RoundContext, round_no: int, sink_for: Callable[[int], Sink]) -> Steps[RoundOutcome | None]:
    """Read the mean of a committed round without contributing; None when the round is not committed yet.

    `sink_for` gives the sink for the mean of a fragment; the commit says which fragment that is.
    """
    before, began = context.io.counted(), context.io.clock.monotonic()
    commit = yield from read_commit(context, round_no)
    if commit is None:
        return None
    check_belongs(context, commit)
    task = MeanTask(context, commit, sink_for(commit.fragment))
    yield Gather([average(task), context.events.flush(context.io)], 2)
    _apply_to_history(context, commit)
    log.debug("round %d: rank %d replayed it", round_no, context.rank)
    return RoundOutcome(commit, False, context.io.counted().since(before), context.io.clock.monotonic() - began)


def check_belongs(context: RoundContext, commit: Commit) -> None:
    """Raise unless the commit continues our history, accepts our state, and has no rejection that must stop us."""
    if commit.previous != context.previous:
        message = f"round {commit.round_no} does not continue what this replica has applied"
        raise LeftBehind(message, round_no=commit.round_no, latest=commit.round_no)
    diverged = next((r for r in commit.rejected if r.rank == context.rank and r.check == "base"), None)
    if diverged is not None:
        message = f"the state of rank {context.rank} differs from the others': {diverged.detail}"
        raise CorruptUpdate(message, round_no=commit.round_no, rank=context.rank, check="base")
    if commit.rejected and context.quorum.on_rejected == "stop":
        first = commit.rejected[0]
        message = f"round {commit.round_no}: rank {first.rank} failed the check `{first.check}`: {first.detail}"
        raise CorruptUpdate(message, round_no=commit.round_no, rank=first.rank, check=first.check)


def _apply_to_history(context: RoundContext, commit: Commit) -> None:
    context.history.learn(commit)
    context.previous = commit.digest


def _participate(state: RoundState) -> Steps[_Participation]:
    """Publish our update and wait for the commit; or find that the round is committed already."""
    context, own = state.context, None
    offers: dict[int, Offer] = {}
    try:
        offer = yield from _publish(state)
        if state.commit is None:
            own = yield from announce(context, offer)
            state.commit, offers = yield from agree(context, state.round_no, state.fragment, own)
        else:
            context.events.add("late", state.round_no, rank=context.rank)
        context.history.is_late = own is None
        return _Participation(offer.digest, own, offers)
    finally:
        state.is_over = True


def _publish(state: RoundState) -> Steps[Offer]:
    """Upload the update and read the commit; a replica that was late in the last round reads the commit first."""
    context, io = state.context, state.context.io
    reads = [_read_commit(state), check_rank(io, context.keys, context.claim, state.round_no), io.timeline.flush(io)]
    if not state.is_retry and not context.history.is_late:
        uploading = upload(context, state.draft, state.source, encoded=state.encoded)
        offer: Offer = (yield Gather([uploading, *reads], 4))[0]
        return offer
    yield Gather(reads, 3)
    if state.is_retry:
        offer = yield from upload(context, state.draft, state.source, is_dry=True)
        # The chunks of an announced offer must not change, even if the update was computed anew.
        if state.commit is not None or (yield from has_announced(context, offer)):
            return offer
    return (yield from upload(context, state.draft, state.source, is_dry=state.commit is not None))


def _read_commit(state: RoundState) -> Steps[None]:
    """Find out whether the round is committed, and measure the latency of the store."""
    asked = state.context.io.clock.monotonic()
    state.commit = yield from read_commit(state.context, state.round_no, is_awaited=False)
    state.context.history.latencies.append(state.context.io.clock.monotonic() - asked)
