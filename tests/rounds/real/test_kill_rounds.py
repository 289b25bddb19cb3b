"""SIGKILL at every step of the protocol: replicas that start again end with the bits of a run without deaths."""

from __future__ import annotations

import pytest
from offspring import Nursery, Place, run_with_restarts
from real_replica import expected

from atoll.rounds.verify import verify

COUNT, ROUNDS, KEEPER = 4, 6, 1
STORMS = {
    "publishing": {
        1: [["before", "put", "*/rounds/0000000001/update/*", 1]],
        2: [["after", "put", "*/rounds/0000000002/update/*", 2]],
        3: [["before", "create", "*/rounds/0000000003/offer/*", 1], ["after", "create", "*/0000000004/offer/*", 1]],
    },
    "waiting and committing": {
        0: [["before", "create", "*/commits/*", 1], ["after", "create", "*/commits/*", 1]],  # first in turn
        2: [["before", "get", "*/commits/0000000002.json", 2]],
        3: [["after", "get", "*/commits/0000000004.json", 2]],
    },
    "reducing": {
        0: [["before", "create", "*/rounds/0000000001/mean/*", 1]],
        1: [["after", "create", "*/rounds/0000000002/mean/*", 1]],
        2: [["before", "get", "*/rounds/0000000003/mean/*", 1]],
    },
    "writing a snapshot": {
        KEEPER: [
            ["before", "put", "*/blobs/0000000002-*", 1],
            ["before", "create", "*/snapshots/0000000004.json", 1],
            ["after", "create", "*/snapshots/0000000006.json", 1],
        ],
        2: [["before", "put", "*/acks/*", 2]],
    },
    "deleting": {
        KEEPER: [["after", "delete", "*/sync/rounds/*", 3], ["before", "delete", "*/sync/commits/*", 1]],
    },
}
"""For each rank, what its first attempts die of."""


@pytest.mark.parametrize("storm", STORMS)
def test_replicas_killed_and_started_again_change_nothing(
    place: Place, nursery: Nursery, run_id: str, storm: str
) -> None:
    common = {"uri": place.uri, "run_id": run_id, "world_size": COUNT, "rounds": ROUNDS, "keeper": KEEPER}
    fates = {rank: [["kill", *moment] for moment in moments] for rank, moments in STORMS[storm].items()}
    done = run_with_restarts(nursery, "real_replica:train", [{**common, "rank": r} for r in range(COUNT)], fates)
    found = [child.value for child in done]
    assert [one["attempt"] for one in found] == [len(fates.get(rank, [])) for rank in range(COUNT)]
    assert {one["state"] for one in found} == {expected(COUNT, ROUNDS)}
    report = verify(place.store, run_id)
    assert report.is_right, report.difference
    assert report.first_round + report.rounds == ROUNDS
