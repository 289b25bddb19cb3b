"""Replicas that train over `RoundClient` with an outer state, as training code does, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from atoll.rounds.client import RoundClient
from atoll.rounds.context import Tuning
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.quorum import Quorum
from atoll.stores.base import Store

LAYOUT = Layout.of([("w", [300, 100], "float32"), ("b", [77], "float32")])
RULE = OuterRule()
QUICK = Tuning(inline_bytes=0, bandwidth_bytes_s=1.0, latency_s=0.0, turn_s=0.02, poll_cap_s=0.05, retry_s=5.0)


def client(store: Store, rank: int, count: int, **options: Any) -> RoundClient:
    options = {"codec_name": "bf16", "chunk": 4096, "tuning": QUICK, "settings": {"outer": RULE.to_json()}, **options}
    return RoundClient(
        store, "run", rank, count, layouts=[LAYOUT], quorum=Quorum(deadline_s=60.0), **options
    )  # fmt: skip


class Trainer:
    """A replica with an outer state, the way training code has it."""

    def __init__(self, client: RoundClient, rank: int) -> None:
        self.client, self.rank = client, rank
        seed = np.random.default_rng(rank)
        buffers = client.join([seed.standard_normal(t.size).astype(np.float32).data.cast("B") for t in LAYOUT.tensors])
        self.values = np.concatenate([np.frombuffer(b, np.float32) for b in buffers])
        self.momentum = np.zeros_like(self.values)
        self.round_no = 0

    def round(self) -> None:
        noise = np.random.default_rng([self.rank, self.round_no]).standard_normal(self.values.size)
        update = (self.values * np.float32(0.05) + noise * 0.01).astype(np.float32)
        base = state_digest(self.values, self.momentum)
        # The mean comes back in the arrays the update was in: nothing else as big as the model is needed.
        self.client.exchange(self.round_no, update, weight=100.0 + self.rank, base=base, out=ArrayVector([update]))
        outer_step(RULE, self.values, self.momentum, update, is_first=self.round_no == 0)
        self.round_no += 1

    def snapshot(self) -> None:
        self.client.acknowledge(self.round_no)
        buffers = {"values": self.values.data.cast("B"), "momentum": self.momentum.data.cast("B")}
        if self.client.write_snapshot(self.round_no, buffers, {"started": [True]}):
            self.client.retire()


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def train(store: Store, count: int, rounds: int, snapshot_every: int = 0, **options: Any) -> list[bytes]:
    def one(rank: int) -> bytes:
        with client(store, rank, count, **options) as mine:
            trainer = Trainer(mine, rank)
            for _ in range(rounds):
                trainer.round()
                if snapshot_every and trainer.round_no % snapshot_every == 0:
                    trainer.snapshot()
            return trainer.values.tobytes()

    return together(count, one)
