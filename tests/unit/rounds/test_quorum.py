from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import InvalidSpec
from atoll.rounds.quorum import CommitDecision, GiveUp, Quorum, Wait, adaptive, at_least, decide, grace, strict

ranks = st.sets(st.integers(0, 9))
times = st.floats(0, 1000, allow_nan=False)


def test_strict_waits_for_every_member_until_the_deadline() -> None:
    policy = strict(60.0)
    assert decide(policy, members=[0, 1, 2], arrived={0: 0.0, 1: 3.0}, elapsed_s=59.0) == Wait(60.0)
    assert decide(policy, members=[0, 1], arrived={1: 3.0, 0: 0.0}, elapsed_s=3.0) == CommitDecision((0, 1))
    given_up = decide(policy, members=[0, 1, 2], arrived={0: 0.0}, elapsed_s=60.0)
    assert isinstance(given_up, GiveUp)
    assert given_up.missing == (1, 2)


def test_strict_does_not_wait_for_what_was_rejected_or_has_left() -> None:
    policy = strict(60.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0, rejected=[1]) == CommitDecision((0,))
    assert isinstance(decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0, left=[1]), GiveUp)
    assert isinstance(decide(policy, members=[0], arrived={}, elapsed_s=1.0, rejected=[0]), GiveUp)


def test_a_rejected_update_stops_the_round_when_the_policy_says_so() -> None:
    policy = Quorum(on_rejected="stop")
    assert isinstance(decide(policy, members=[0, 1, 2], arrived={0: 0.0, 2: 0.0}, elapsed_s=1.0, rejected=[1]), GiveUp)


def test_a_quorum_gives_stragglers_a_grace_from_the_moment_it_is_met() -> None:
    policy = at_least(2, grace_s=10.0, deadline_s=60.0)
    seen = {0: 0.0, 1: 5.0}
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=6.0) == Wait(15.0)
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=15.0) == CommitDecision((0, 1))
    assert decide(policy, members=range(3), arrived={**seen, 2: 6.0}, elapsed_s=6.0) == CommitDecision((0, 1, 2))
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=6.0, away=[2]) == CommitDecision((0, 1))
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=6.0, left=[2]) == CommitDecision((0, 1))


def test_the_deadline_cuts_the_grace_short() -> None:
    policy = at_least(1, grace_s=100.0, deadline_s=20.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0) == Wait(20.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=20.0) == CommitDecision((0,))


def test_too_few_give_up_at_the_deadline_and_at_once_when_nobody_is_left_to_come() -> None:
    policy = at_least(2, deadline_s=60.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=59.0) == Wait(60.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=59.0, away=[1]) == Wait(60.0)
    assert isinstance(decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=60.0), GiveUp)
    assert isinstance(decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0, left=[1]), GiveUp)


def test_the_adaptive_grace_is_the_median_plus_deviations_and_never_over_the_cap() -> None:
    policy = adaptive(2, spread=4.0, grace_s=30.0)
    assert grace(policy, []) == grace(policy, [1.0, 2.0]) == 30.0
    assert grace(policy, [1.0, 2.0, 3.0]) == 2.0 + 4.0 * 1.0
    assert grace(policy, [100.0, 200.0, 300.0]) == 30.0


@given(ranks, ranks, ranks, ranks, times, st.integers(1, 10) | st.none(), times)
def test_a_commit_is_of_what_arrived_and_of_enough_of_it(
    members, arrived, rejected, left, elapsed, least, grace_s
) -> None:
    policy = Quorum(least, grace_s=min(grace_s, 500.0), deadline_s=500.0)
    seen = dict.fromkeys(arrived - rejected, 0.0)
    made = decide(policy, members=members, arrived=seen, elapsed_s=elapsed, rejected=rejected, left=left)
    if isinstance(made, CommitDecision):
        assert made.ranks == tuple(sorted(seen))
        assert len(made.ranks) >= (least or 1)
        assert least is not None or members - rejected <= set(seen)
    elif isinstance(made, Wait):
        assert elapsed < made.until <= 500.0


@pytest.mark.parametrize(
    "bad", [{"least": 0}, {"grace_s": -1.0}, {"deadline_s": 0.0}, {"spread": -1.0}, {"on_rejected": "x"}]
)
def test_a_policy_that_makes_no_sense_is_refused(bad) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Quorum(**bad)
    assert caught.value.fields == tuple(bad)
