"""Many races and many rounds: one winner each time, and what is kept, asked and remembered does not grow."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from offspring import Nursery, Place
from racer import RACERS, new_board
from real_replica import expected

from atoll.rounds.verify import verify

RACES = {"file": 1000, "s3": 200}
ROUNDS = {"file": 300, "s3": 40}
NO_SYNC = {"file": {"fsync": False}, "s3": {}}
"""Surviving a power cut is not what these are about."""


def test_of_many_races_for_one_commit_each_has_one_winner(
    place: Place, nursery: Nursery, run_id: str, tmp_path: Path
) -> None:
    races, board = RACES[place.kind], str(tmp_path / "board")
    new_board(board)
    common = {"uri": place.uri, "run_id": run_id, "board": board, "races": races, "options": NO_SYNC[place.kind]}
    children = [nursery.start("racer:race", **common, rank=rank) for rank in range(RACERS)]
    found = [child.wait().value for child in children]
    assert sorted(one for each in found for one in each["won"]) == list(range(races))
    assert all(each["winners"] == found[0]["winners"] for each in found)
    assert all(n in found[by]["won"] for n, by in enumerate(found[0]["winners"]))
    assert len(set(found[0]["winners"])) > 1, "they did race"


@pytest.mark.slow
def test_objects_requests_and_memory_do_not_grow_with_the_rounds(place: Place, nursery: Nursery, run_id: str) -> None:
    count, rounds, every = 2, ROUNDS[place.kind], ROUNDS[place.kind] // 10
    common = {"uri": place.uri, "run_id": run_id, "world_size": count, "rounds": rounds, "options": NO_SYNC[place.kind]}
    common |= {"snapshot_every": 4, "sample_every": every}
    children = [nursery.start("real_replica:train", **common, rank=rank) for rank in range(count)]
    found = [child.wait().value for child in children]
    assert {one["state"] for one in found} == {expected(count, rounds)}
    samples = np.array(found[0]["samples"])
    objects, resident_kib = samples[:, 1], samples[:, 2]
    # The last two snapshots, the rounds since the older of them, and a handful of records.
    per_round = count * (3 + 1) + 1
    assert objects.max() <= 8 * per_round + 30, objects
    assert objects[5:].max() <= objects[:5].max() + per_round, objects
    assert resident_kib[-1] - resident_kib[2] < 4096, resident_kib
    for one in found:
        asked = [sum(each["requests"].values()) - each["misses"] for each in one["by_round"]]
        lists = [each["requests"].get("list", 0) for each in one["by_round"]]
        assert max(asked[-10:]) <= max(asked[5:15]) + 4
        assert max(lists) <= 3
    print(place.kind, "objects", objects.tolist(), "resident KiB", resident_kib.tolist())
    assert verify(place.store, run_id).is_right
    if place.kind == "file":
        shutil.rmtree(place.store.root)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_requests_and_bytes_of_a_round_are_bounded_whatever_the_number_of_replicas(
    place: Place, nursery: Nursery, run_id: str, count: int
) -> None:
    rounds, size_bytes = 4, 4 * 2500
    common = {"uri": place.uri, "run_id": run_id, "world_size": count, "rounds": rounds, "snapshot_every": 0}
    children = [nursery.start("real_replica:train", **common, rank=rank) for rank in range(count)]
    found = [child.wait().value for child in children]
    assert {one["state"] for one in found} == {expected(count, rounds)}
    each = [turn for one in found for turn in one["by_round"]]
    useful = np.mean([sum(turn["requests"].values()) - turn["misses"] for turn in each])
    misses = np.mean([turn["misses"] for turn in each])
    up, down = (np.mean([turn[name] for turn in each]) / size_bytes for name in ("bytes_up", "bytes_down"))
    print(f"{place.kind} N={count}: {useful:.1f} requests, {misses:.1f} misses, {up:.2f} S up, {down:.2f} S down")
    assert useful <= 40 + 3 * count
    assert up < 2.5
    assert down < 4.5
