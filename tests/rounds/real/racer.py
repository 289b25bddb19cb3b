"""Processes that create the same commit record at the same time, again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from atoll.errors import KeyExists
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Commit, Contribution

RACERS, LANES = 4, 50
"""Lanes run side by side: SeaweedFS lets the loser of a race wait for a second."""


def new_board(path: str) -> None:
    """A file with one counter for each racer in each lane."""
    np.zeros((LANES, RACERS), np.int64).tofile(path)


def race(
    uri: str, run_id: str, rank: int, board: str, races: int, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The races this one won, and whose record it read after each."""
    store, keys = open_store(uri, **(options or {})), RoundKeys(run_id)
    counters = np.memmap(board, dtype=np.int64, mode="r+", shape=(LANES, RACERS))
    winners: dict[int, int] = {}
    won: list[int] = []

    def run(lane: int) -> None:
        for turn, round_no in enumerate(range(lane, races, LANES), start=1):
            mine = Contribution(rank, 0, 0, 0, f"{rank:032x}", 1.0, 1.0)
            record = Commit(run_id, round_no, 0, "", "", "whole", (mine,), by=rank).seal()
            counters[lane, rank] = turn
            while counters[lane].min() < turn:
                time.sleep(0.0002)
            try:
                store.create(keys.commit(round_no), record)
                won.append(round_no)
            except KeyExists:
                pass
            winners[round_no] = Commit.open(store.get(keys.commit(round_no))).by

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(run, range(LANES)))
    return {"won": won, "winners": [winners[n] for n in range(races)]}
