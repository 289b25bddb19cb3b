"""Processes that sleep and wake too late, twins, latecomers, and too few: each ends right or with an error's name."""

from __future__ import annotations

import signal

import pytest
from offspring import Nursery, Place
from real_replica import expected

from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Commit
from atoll.rounds.verify import verify

TRAIN = "real_replica:train"


def commits(place: Place, run_id: str) -> list[Commit]:
    return [Commit.open(place.store.get(key)) for key in place.store.list(RoundKeys(run_id).commits_prefix())]


def objects(place: Place, run_id: str) -> dict[str, bytes]:
    """Everything of a run but what its replicas tell people."""
    keys = RoundKeys(run_id)
    return {
        key: bytes(place.store.get(key))
        for key in place.store.list(keys.prefix)
        if not key.startswith((keys.events_prefix(), keys.metrics_prefix()))
    }


@pytest.mark.parametrize(
    "moment",
    [
        ["before", "put", "*/rounds/0000000001/update/*", 1],
        ["before", "create", "*/rounds/0000000001/offer/*", 1],
        ["after", "create", "*/rounds/0000000001/offer/*", 1],
    ],
    ids=["before it publishes", "between looking and offering", "after its offer"],
)
def test_a_zombie_is_fenced_and_nothing_of_it_is_read(
    place: Place, nursery: Nursery, run_id: str, moment: list
) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": 3, "rounds": 4, "snapshot_every": 0}
    others = [nursery.start(TRAIN, **common, rank=rank) for rank in (0, 2)]
    zombie = nursery.start(TRAIN, **common, rank=1, fate=["stop", *moment]).wait_stopped()
    instead = nursery.start(TRAIN, **common, rank=1, attempt=1)
    assert {child.wait().value["state"] for child in (*others, instead)} == {expected(3, 4)}
    before = objects(place, run_id)
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().error == "Fenced"
    assert "rank 1" in zombie.came["message"]
    assert {key: data for key, data in objects(place, run_id).items() if key in before} == before
    incarnations = [commit.contribution(1).incarnation for commit in commits(place, run_id)]
    assert incarnations[2:] == [1, 1], "what it offered before it was replaced may count, what came after may not"
    assert verify(place.store, run_id).is_right


def test_a_quorum_goes_on_past_its_grace_without_a_zombie_which_is_then_replaced(
    place: Place, nursery: Nursery, run_id: str
) -> None:
    quorum = {"least": 2, "grace_s": 2.5}
    common = {"uri": place.uri, "run_id": run_id, "world_size": 3, "rounds": 8, "quorum": quorum, "snapshot_every": 2}
    keys = RoundKeys(run_id)
    fate = ["stop", "before", "create", "*/rounds/0000000002/offer/*", 1]
    zombie = nursery.start(TRAIN, **common, rank=1, fate=fate)
    # The others go no further than round 5 before the zombie's successor is there.
    others = [nursery.start(TRAIN, **common, rank=rank, wait_for=[5, keys.claim(1, 1)]) for rank in (0, 2)]
    zombie.wait_stopped()
    nursery.start("real_replica:await_commit", uri=place.uri, run_id=run_id, round_no=3).wait()
    instead = nursery.start(TRAIN, **common, rank=1, attempt=1)
    states = {child.wait().value["state"] for child in (*others, instead)}
    assert len(states) == 1
    assert instead.value["joined_at"] >= 4
    before = objects(place, run_id)
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().error == "Fenced"
    assert {key: data for key, data in objects(place, run_id).items() if key in before} == before
    found = commits(place, run_id)
    assert all(1 not in commit.ranks for commit in found if commit.round_no in (2, 3))
    assert all(
        c.incarnation == 1 for commit in found for c in commit.contributions if c.rank == 1 and commit.round_no > 3
    )
    assert verify(place.store, run_id).is_right


def test_of_two_processes_with_one_rank_one_goes_on(place: Place, nursery: Nursery, run_id: str) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": 2, "rounds": 4, "snapshot_every": 0}
    other = nursery.start(TRAIN, **common, rank=0)
    twins = [nursery.start(TRAIN, **common, rank=1) for _ in range(3)]
    assert other.wait().value["state"] == expected(2, 4)
    ends = [twin.wait().came for twin in twins]
    assert {end["value"]["state"] for end in ends if "value" in end} == {expected(2, 4)}
    assert {end["error"] for end in ends if "error" in end} <= {"Fenced"}
    assert [commit.ranks for commit in commits(place, run_id)] == [(0, 1)] * 4
    assert verify(place.store, run_id).is_right


def test_a_rank_that_joins_later_takes_part(place: Place, nursery: Nursery, run_id: str) -> None:
    quorum = {"least": 2, "grace_s": 20.0}
    common = {"uri": place.uri, "run_id": run_id, "rounds": 7, "quorum": quorum, "snapshot_every": 2}
    keys = RoundKeys(run_id)
    first = [
        nursery.start(TRAIN, **common, rank=rank, world_size=2, wait_for=[4, keys.claim(2, 0)]) for rank in range(2)
    ]
    nursery.start("real_replica:await_commit", uri=place.uri, run_id=run_id, round_no=3).wait()
    joiner = nursery.start(TRAIN, **common, rank=2, world_size=3)
    states = {child.wait().value["state"] for child in (*first, joiner)}
    assert len(states) == 1
    assert joiner.value["joined_at"] >= 4
    found = {commit.round_no: commit.ranks for commit in commits(place, run_id)}
    assert found[6] == (0, 1, 2)
    assert verify(place.store, run_id).is_right


@pytest.mark.parametrize(
    ("quorum", "missing"),
    [({"deadline_s": 4.0}, [1, 3]), ({"least": 3, "grace_s": 0.1, "deadline_s": 4.0}, [1, 3])],
    ids=["every rank is needed", "three are needed"],
)
def test_too_few_is_an_error_that_names_who_is_missing(
    place: Place, nursery: Nursery, run_id: str, quorum: dict, missing: list[int]
) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": 4, "rounds": 2, "quorum": quorum}
    for child in [nursery.start(TRAIN, **common, rank=rank) for rank in (0, 2)]:
        assert child.wait().error == "QuorumLost"
        assert child.came["details"]["missing"] == missing
        assert "ranks 1, 3" in child.came["message"]
    assert not commits(place, run_id)


def test_too_few_after_one_died_is_an_error_too(place: Place, nursery: Nursery, run_id: str) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": 3, "rounds": 4, "quorum": {"deadline_s": 4.0}}
    fate = ["kill", "after", "put", "*/rounds/0000000002/update/*", 1]
    dead = nursery.start(TRAIN, **common, rank=1, fate=fate)
    others = [nursery.start(TRAIN, **common, rank=rank) for rank in (0, 2)]
    assert dead.wait().is_killed
    for child in others:
        assert child.wait().error == "QuorumLost"
        assert child.came["details"] == {"missing": [1], "round_no": 2}
    assert len(commits(place, run_id)) == 2
