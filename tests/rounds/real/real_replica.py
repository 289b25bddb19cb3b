"""A replica without torch: trains a vector by rounds. Cheap, deterministic, and different for every rank and round."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fated_store import FatedStore

from atoll.errors import LeftBehind
from atoll.registry import open_store
from atoll.rounds.catch_up import LoadedSnapshot
from atoll.rounds.client import RoundClient
from atoll.rounds.codecs.base import as_bytes
from atoll.rounds.context import Tuning
from atoll.rounds.io import Counters
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.quorum import Quorum
from atoll.stores.base import Store

SIZE, CHUNK = 2500, 1024
RULE = OuterRule()
BRISK = {
    "poll_first_s": 0.005, "poll_cap_s": 0.05, "turn_s": 0.2, "patience_s": 2.0, "inline_bytes": 0, "latency_s": 0.0,
    "bandwidth_bytes_s": 1.0, "init_patience_s": 5.0, "retry_s": 30.0,
}  # fmt: skip
"""Small updates that behave like big ones: written in chunks, averaged by their owners."""


class Replica:
    """One replica's state: the vector, its momentum, and the round it is at."""

    def __init__(self, client: RoundClient, rank: int) -> None:
        self.client, self.rank = client, rank
        (buffer,) = client.join([as_bytes(initial())])
        self.values = np.frombuffer(buffer, np.float32).copy()
        self.momentum = np.zeros_like(self.values)
        self.round_no = 0

    def catch_up(self) -> None:
        self.round_no = self.client.catch_up(self.round_no, lambda done: self.apply(done.mean), self.load)

    def jump(self) -> None:
        """To the newest snapshot; rounds since are trained again, as a replica with checkpoints does."""
        if (loaded := self.client.load_snapshot()) is not None:
            self.load(loaded)

    def load(self, snapshot: LoadedSnapshot) -> None:
        self.values = np.frombuffer(snapshot.buffers["values"], np.float32).copy()
        self.momentum = np.frombuffer(snapshot.buffers["momentum"], np.float32).copy()
        self.round_no = snapshot.round_no

    def hold_round(self) -> tuple[int, ...]:
        """The ranks that took part."""
        base = state_digest(self.values, self.momentum)
        update, weight = update_of(self.rank, self.round_no, self.values)
        try:
            done = self.client.exchange(self.round_no, update, weight=weight, base=base)
        except LeftBehind:
            self.catch_up()
            return ()
        self.apply(done.mean)
        return done.ranks

    def apply(self, mean: Any) -> None:
        outer_step(RULE, self.values, self.momentum, mean, is_first=self.round_no == 0)
        self.round_no += 1

    def tidy(self, *, is_keeper: bool) -> None:
        self.client.acknowledge(self.round_no)
        if is_keeper:
            sections = {"values": as_bytes(self.values), "momentum": as_bytes(self.momentum)}
            self.client.write_snapshot(self.round_no, sections, {"started": [True]})
            self.client.retire()


def train(
    uri: str,
    run_id: str,
    rank: int,
    world_size: int,
    rounds: int,
    *,
    attempt: int = 0,
    fate: Sequence[Any] | None = None,
    quorum: Mapping[str, Any] | None = None,
    tuning: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    snapshot_every: int = 2,
    keeper: int = 0,
    wait_for: Sequence[Any] | None = None,
    sample_every: int = 0,
) -> dict[str, Any]:
    """To the last round.

    `keeper` is the rank that snapshots and deletes; `wait_for` is (round, key to be there); with `sample_every` the
    keeper counts what is in the store and in memory.
    """
    plain = open_store(uri, **(options or {}))
    store: Store = plain if fate is None else FatedStore(plain, fate)
    client = RoundClient(
        store, run_id, rank, world_size,
        layouts=[Layout.of([("w", [SIZE], "float32")])], attempt=attempt, codec_name="fp32", chunk=CHUNK,
        quorum=Quorum(**{"deadline_s": 60.0, **(quorum or {})}), tuning=Tuning(**{**BRISK, **(tuning or {})}),
        settings={"outer": RULE.to_json()},
    )  # fmt: skip
    with client:
        replica = Replica(client, rank)
        if "least" not in (quorum or {}):
            replica.jump()
        else:
            replica.catch_up()
        joined_at = replica.round_no
        by_round, samples = [], []
        while replica.round_no < rounds:
            if wait_for is not None and replica.round_no == wait_for[0]:
                await_key(store, wait_for[1])
            before = client.counters.copy()
            replica.hold_round()
            by_round.append(counted(client.counters.since(before)))
            if snapshot_every and replica.round_no % snapshot_every == 0:
                replica.tidy(is_keeper=rank == keeper)
            if sample_every and rank == keeper and replica.round_no % sample_every == 0:
                samples.append([replica.round_no, len(list(store.list())), resident_kib()])
        return {
            "state": hashlib.sha256(replica.values.tobytes() + replica.momentum.tobytes()).hexdigest(),
            "joined_at": joined_at,
            "attempt": attempt,
            "incarnation": client._protocol.member.claim.incarnation,
            "by_round": by_round,
            "samples": samples,
            "counters": counted(client.counters),
        }


def counted(counters: Counters) -> dict[str, Any]:
    names = ("misses", "retries", "bytes_up", "bytes_down")
    return {"requests": dict(counters.requests), **{name: getattr(counters, name) for name in names}}


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def await_key(store: Store, key: str) -> None:
    while not any(found == key for found in store.list(key)):
        time.sleep(0.01)


def initial() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).standard_normal(SIZE).astype(np.float32)


def update_of(rank: int, round_no: int, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    """What a rank contributes: depends on everything, so any mistake shows in the bits."""
    noise = np.random.default_rng([rank, round_no]).standard_normal(values.size).astype(np.float32)
    return (values * np.float32(0.1) + noise * np.float32(0.01)).astype(np.float32), float(1000 + 17 * rank)


def expected(world_size: int, rounds: int) -> str:
    """The final state of a strict run, from the formula of the mean and the outer step alone."""
    values = initial()
    momentum = np.zeros_like(values)
    for round_no in range(rounds):
        updates = [update_of(rank, round_no, values) for rank in range(world_size)]
        total = float(sum(weight for _, weight in updates))
        mean = updates[0][0] * np.float32(updates[0][1] / total)
        for update, weight in updates[1:]:
            mean = mean + update * np.float32(weight / total)
        outer_step(RULE, values, momentum, mean, is_first=round_no == 0)
    return hashlib.sha256(values.tobytes() + momentum.tobytes()).hexdigest()


def await_commit(uri: str, run_id: str, round_no: int) -> None:
    """Return when the round is committed."""
    await_key(open_store(uri), RoundKeys(run_id).commit(round_no))
