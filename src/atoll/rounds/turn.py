"""One replica's part in one round, as far as those who work on it side by side have to know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from atoll.rounds.averaging import Foreseen
from atoll.rounds.codec import F32
from atoll.rounds.member import Member
from atoll.rounds.offers import Offer
from atoll.rounds.publish import Seen, draft_offer, is_inline
from atoll.rounds.records import Commit
from atoll.rounds.vectors import Room, Sink, Source


@dataclass
class Turn:
    """What goes in, what is expected, and what has been found out so far."""

    member: Member
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
    foreseen: dict[int, Foreseen] = field(default_factory=dict)
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
        is_holding = self.mode == "scatter" and not self.is_inline and self.member.tuning.hold_back
        return replace(draft, expected=self.ranks) if self.ranks and is_holding else draft
