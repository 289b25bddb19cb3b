"""SIGKILL of replicas that train with DiLoCo, checkpoints included: all bits are those of a run without deaths."""

from __future__ import annotations

from typing import Any

import pytest
from offspring import Nursery, Place, run_with_restarts

from atoll.rounds.verify import verify

COUNT, ROUNDS = 4, 8
FATES = {
    0: [
        ["before", "put", "*/checkpoints/00000/0000000002", 1],  # applied, not saved
        ["after", "put", "*/checkpoints/00000/0000000004", 1],  # saved, not said
        ["before", "delete", "*/checkpoints/00000/*", 1],  # in the middle of letting old ones go
    ],
    1: [["before", "put", "*/rounds/0000000001/update/*", 1], ["before", "put", "*/acks/*", 2]],
    2: [["after", "create", "*/rounds/0000000003/offer/*", 1], ["before", "create", "*/snapshots/*", 1]],
    3: [["before", "get", "*/commits/0000000005.json", 2], ["after", "delete", "*/sync/rounds/*", 2]],
}
"""For each rank, what its first attempts die of. Ranks 1, 2 and 3 write a snapshot after round 2, 4 and 6."""


def finals(place: Place, nursery: Nursery, run_id: str, fates: dict[int, list[Any]]) -> list[dict[str, Any]]:
    common = {"uri": place.uri, "run_id": run_id, "world_size": COUNT, "rounds": ROUNDS}
    ranks = [{**common, "rank": rank} for rank in range(COUNT)]
    return [child.value for child in run_with_restarts(nursery, "torch_replica:train", ranks, fates)]


@pytest.mark.slow
def test_killed_replicas_with_checkpoints_come_back_with_the_same_bits(
    place: Place, nursery: Nursery, run_id: str
) -> None:
    fates = {rank: [["kill", *moment] for moment in moments] for rank, moments in FATES.items()}
    calm = finals(place, nursery, f"{run_id}-calm", {})
    stormy = finals(place, nursery, f"{run_id}-stormy", fates)
    attempts = [one.pop("attempt") for one in stormy]
    assert [one.pop("attempt") for one in calm] == [0] * COUNT
    assert attempts == [len(fates[rank]) for rank in range(COUNT)]
    assert stormy == calm
    assert len({one["weights"] for one in calm}) == 1
    assert len({one["moments"] for one in calm}) == COUNT
    report = verify(place.store, f"{run_id}-stormy")
    assert report.is_right, report.difference
