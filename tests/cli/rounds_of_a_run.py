"""A run with rounds, made in this process: real clients over a real folder, without a backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.registry import open_store
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout
from atoll.stores.base import Store

SIZE = 4096
LAYOUT = Layout.of([("w", [SIZE], "float32")])


def store_at(folder: Path) -> Store:
    return open_store(folder.as_uri())


def hold_rounds(store: Store, run_id: str, *, ranks: int = 2, rounds: int = 3) -> None:
    """Every rank takes part in all rounds, and leaves."""

    def train(rank: int) -> None:
        with joined(store, run_id, rank, ranks) as client:
            for round_no in range(rounds):
                client.exchange(round_no, np.full(SIZE, rank, np.float32), weight=1.0)
            client.leave()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(train, range(ranks)))


def joined(store: Store, run_id: str, rank: int, ranks: int) -> RoundClient:
    client = RoundClient(store, run_id, rank, ranks, layouts=[LAYOUT], codec_name="fp32")
    client.join([np.zeros(SIZE, np.float32).tobytes()])
    return client
