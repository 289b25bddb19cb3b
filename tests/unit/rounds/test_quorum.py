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
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=6.0, absent=[2]) == CommitDecision((0, 1))
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=6.0, left=[2]) == CommitDecision((0, 1))


def test_the_deadline_cuts_the_grace_short() -> None:
    policy = at_least(1, grace_s=100.0, deadline_s=20.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0) == Wait(20.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=20.0) == CommitDecision((0,))


def test_too_few_give_up_at_the_deadline_and_at_once_when_nobody_is_left_to_come() -> None:
    policy = at_least(2, deadline_s=60.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=59.0) == Wait(60.0)
    assert decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=59.0, absent=[1]) == Wait(60.0)
    assert isinstance(decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=60.0), GiveUp)
    assert isinstance(decide(policy, members=[0, 1], arrived={0: 0.0}, elapsed_s=1.0, left=[1]), GiveUp)


def test_strict_gives_up_when_a_rank_has_been_dead_for_long_enough() -> None:
    policy, seen = strict(60.0), {0: 0.0}
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=9.0, dead={2: 10.0}) == Wait(10.0)
    assert decide(policy, members=range(3), arrived=seen, elapsed_s=9.0, dead={2: 90.0}) == Wait(60.0)
    given_up = decide(policy, members=range(3), arrived=seen, elapsed_s=10.0, dead={2: 10.0})
    assert isinstance(given_up, GiveUp)
    assert (given_up.dead, given_up.missing) == ((2,), (1, 2))
    arrived = {0: 0.0, 1: 0.0, 2: 9.0}
    assert decide(policy, members=range(3), arrived=arrived, elapsed_s=10.0, dead={2: 10.0}) == CommitDecision(
        (0, 1, 2)
    )


def test_a_quorum_gives_up_early_only_if_the_dead_ranks_make_it_unreachable() -> None:
    policy, seen = at_least(3, grace_s=10.0, deadline_s=60.0), {0: 0.0}
    assert decide(policy, members=range(4), arrived=seen, elapsed_s=20.0, dead={2: 5.0}) == Wait(60.0)
    both = {2: 5.0, 3: 30.0}
    assert decide(policy, members=range(4), arrived=seen, elapsed_s=20.0, dead=both) == Wait(30.0)
    given_up = decide(policy, members=range(4), arrived=seen, elapsed_s=30.0, dead=both)
    assert isinstance(given_up, GiveUp)
    assert given_up.dead == (2, 3)
    enough = {0: 0.0, 1: 0.0, 2: 1.0}
    assert decide(policy, members=range(4), arrived=enough, elapsed_s=5.0, dead={3: 5.0}) == Wait(11.0)
    assert decide(policy, members=range(4), arrived=enough, elapsed_s=11.0, dead={3: 5.0}) == CommitDecision((0, 1, 2))


def test_training_has_diverged_if_every_update_is_too_large_or_not_finite() -> None:
    for policy in (strict(60.0), at_least(1, deadline_s=60.0)):
        for checks, is_diverged in (
            (["finite"], True),
            (["finite", "norm"], True),
            (["norm"], True),
            (["norm", "base"], False),
        ):
            made = decide(policy, members=[0, 1], arrived={}, elapsed_s=1.0, rejected=[0, 1], failed_checks=checks)
            assert isinstance(made, GiveUp)
            assert made.is_diverged is is_diverged
        one = decide(policy, members=[0, 1], arrived={}, elapsed_s=1.0, rejected=[0], failed_checks=["finite"])
        assert one == Wait(60.0), "the other rank may be well"


def test_the_adaptive_grace_is_the_median_plus_deviations_and_never_over_the_cap() -> None:
    policy = adaptive(2, spread=4.0, grace_s=30.0)
    assert grace(policy, []) == grace(policy, [1.0, 2.0]) == 30.0
    assert grace(policy, [1.0, 2.0, 3.0]) == 2.0 + 4.0 * 1.0
    assert grace(policy, [100.0, 200.0, 300.0]) == 30.0


@given(
    ranks, ranks, ranks, ranks, st.dictionaries(st.integers(0, 9), times), times, st.integers(1, 10) | st.none(), times
)
def test_a_commit_is_of_what_arrived_and_of_enough_of_it(
    members, arrived, rejected, left, dead, elapsed, least, grace_s
) -> None:
    policy = Quorum(least, grace_s=min(grace_s, 500.0), deadline_s=500.0)
    seen = dict.fromkeys(arrived - rejected, 0.0)
    made = decide(policy, members=members, arrived=seen, elapsed_s=elapsed, rejected=rejected, left=left, dead=dead)
    if isinstance(made, CommitDecision):
        assert made.ranks == tuple(sorted(seen))
        assert len(made.ranks) >= (least or 1)
        assert least is not None or members - rejected <= set(seen)
    elif isinstance(made, Wait):
        assert elapsed < made.until <= 500.0


@pytest.mark.parametrize(
    "bad",
    [
        {"least": 0},
        {"grace_s": -1.0},
        {"deadline_s": 0.0},
        {"spread": -1.0},
        {"on_rejected": "x"},
        {"on_dead": "x"},
        {"on_dead_after_s": -1.0},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(bad) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Quorum(**bad)
    assert caught.value.fields == tuple(bad)
