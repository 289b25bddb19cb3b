"""What past rounds teach a replica, and how long it asks a store that does not answer."""

from __future__ import annotations

import random

import pytest

from atoll.errors import StoreUnavailable
from atoll.rounds.context import AWAY_AFTER, RoundHistory
from atoll.rounds.io import Sleep, Steps, StoreIO
from atoll.rounds.records import Commit, Contribution, Rejection
from atoll.testing.fakes import FakeClock


def commit_without_rank_1(*rejected: Rejection) -> Commit:
    given = tuple(Contribution(rank, 0, 0, 0, "ab", 1.0, 2.0) for rank in (0, 2))
    return Commit("run", 3, 0, "before", "base", "scatter", given, rejected, (0, 1, 2), 0)


def test_who_is_missing_again_and_again_is_away_until_it_is_back():
    memory = RoundHistory()
    for _ in range(AWAY_AFTER):
        assert memory.away == set()
        memory.learn(commit_without_rank_1())
    assert memory.away == {1}


def test_a_rank_whose_updates_are_rejected_is_there_and_is_waited_for():
    memory = RoundHistory()
    for _ in range(2 * AWAY_AFTER):
        memory.learn(commit_without_rank_1(Rejection(1, "finite", "why")))
    assert memory.away == set()


def test_a_store_that_stays_silent_is_told_with_how_long_it_was_asked_and_what_sets_that():
    clock = FakeClock()
    asking = StoreIO(clock, random.Random(0), retry_s=30.0).get("k")
    with pytest.raises(StoreUnavailable, match=r"30 s.*`Tuning\(retry_s=…\)`"):
        never_answer(asking, clock)


def never_answer(asking: Steps[object], clock: FakeClock) -> None:
    op = next(asking)
    while True:
        if isinstance(op, Sleep):
            clock.advance(op.seconds)
            op = next(asking)
        else:
            op = asking.throw(StoreUnavailable("no answer"))
