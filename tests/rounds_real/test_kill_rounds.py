"""SIGKILL at every step of the protocol: the replica that starts again ends with the bits of a run without deaths."""

from __future__ import annotations

import pytest
from offspring import Nursery, Place, run_with_restarts
from real_replica import expected

from atoll.rounds.verify import verify

COUNT, ROUNDS = 4, 6
MOMENTS = {
    "before publishing": ["before", "put", "*/rounds/0000000002/update/*", 1],
    "in the middle of publishing": ["after", "put", "*/rounds/0000000002/update/*", 2],
    "before its offer": ["before", "create", "*/rounds/0000000002/offer/*", 1],
    "after publishing": ["after", "create", "*/rounds/0000000002/offer/*", 1],
    "while waiting": ["before", "get", "*/commits/0000000002.json", 2],
    "before it commits": ["before", "create", "*/commits/*", 1],
    "after it committed": ["after", "create", "*/commits/*", 1],
    "in the middle of the reduce": ["before", "put", "*/rounds/0000000002/mean/*", 1],
    "after its part of the reduce": ["after", "put", "*/rounds/0000000002/mean/*", 1],
    "before it acknowledges": ["before", "put", "*/acks/*", 2],
    "before the blob of a snapshot": ["before", "put", "*/blobs/0000000004-*", 1],
    "between the blob of a snapshot and its record": ["before", "create", "*/snapshots/0000000004.json", 1],
    "after a snapshot": ["after", "create", "*/snapshots/0000000004.json", 1],
    "in the middle of deleting": ["after", "delete", "*/sync/rounds/*", 3],
    "between deleting rounds and commits": ["before", "delete", "*/sync/commits/*", 1],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_replica_killed_and_started_again_changes_nothing(
    place: Place, nursery: Nursery, run_id: str, moment: str
) -> None:
    # Rank 0 is the one that commits; rank 1 is the one that snapshots and deletes.
    victim = 0 if "it commit" in moment else 1
    replicas = [
        {"uri": place.uri, "run_id": run_id, "rank": rank, "world_size": COUNT, "rounds": ROUNDS, "keeper": 1}
        for rank in range(COUNT)
    ]
    done = run_with_restarts(nursery, "real_replica:train", replicas, {victim: [["kill", *MOMENTS[moment]]]})
    found = [child.value for child in done]
    assert [one["attempt"] for one in found] == [int(rank == victim) for rank in range(COUNT)]
    assert {one["state"] for one in found} == {expected(COUNT, ROUNDS)}
    report = verify(place.store, run_id)
    assert report.is_right, report.difference
    assert report.first_round + report.rounds == ROUNDS
