"""A toy model that trains by rounds: cheap, deterministic, and different for every rank, round and state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rounds_simulator import Simulation

from atoll.errors import LeftBehind
from atoll.rounds.catch_up import LoadedSnapshot
from atoll.rounds.client import RoundSteps
from atoll.rounds.context import Tuning
from atoll.rounds.frames import digest
from atoll.rounds.io import Op
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Commit
from atoll.testing.fakes import FakeClock

CHUNK = 1024
FAST = Tuning(
    inline_bytes=0, patience_s=5.0, init_patience_s=1.0, bandwidth_bytes_s=1.0, latency_s=0.0, retry_s=30.0,
    connections=6,
)  # fmt: skip
"""Small updates that behave like big ones: never inline, always scattered from three ranks on."""


@dataclass
class Toy:
    """How one replica of the toy is built."""

    rank: int
    world_size: int
    clock: FakeClock
    run_id: str = "toy"
    size: int = 2500
    rounds: int = 3
    attempt: int = 0
    launch: int = 1
    rounds_of: int | None = None
    codec: str = "fp32"
    quorum: Quorum = field(default_factory=lambda: Quorum(deadline_s=600.0))
    tuning: Tuning = FAST
    seed: int = 0
    snapshot_every: int = 0
    is_retiring: bool = False
    chunk: int = CHUNK
    lease_s: float = 900.0
    is_exact: bool = False
    """Train committed rounds again, as a replica with checkpoints does, instead of taking in their means."""
    state: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.float32))
    history: list[str] = field(default_factory=list)
    """Digest of the state after every round."""
    settings: dict[str, Any] = field(default_factory=lambda: {"inner_steps": 3})
    spoil: Callable[[int, np.ndarray[Any, Any]], np.ndarray[Any, Any]] = lambda _, update: update
    """Changes what is contributed in a round: for updates that must be refused."""

    def again(self, **changes: Any) -> Toy:
        return replace(self, history=[], **changes)

    @property
    def layout(self) -> Layout:
        return Layout.of([("w", [self.size - 7], "float32"), ("b", [7], "float32")])

    def protocol(self) -> RoundSteps:
        return RoundSteps(
            self.run_id, self.rank, self.world_size,
            layouts=[self.layout], attempt=self.attempt, launch=self.launch, rounds_of=self.rounds_of,
            codec_name=self.codec, chunk=self.chunk, quorum=self.quorum, tuning=self.tuning, clock=self.clock,
            settings=self.settings, lease_s=self.lease_s,
            rng=random.Random(f"{self.seed}.{self.rank}.{self.attempt}"),
        )  # fmt: skip

    def initial(self) -> list[bytes]:
        values = np.random.default_rng(self.seed + self.rank).standard_normal(self.size).astype(np.float32)
        return [values[:-7].tobytes(), values[-7:].tobytes()]

    def train(self) -> Generator[Op, Any, bytes]:
        """Join, catch up, train to the end; the final state."""
        protocol = self.protocol()
        buffers = yield from protocol.join(self.initial())
        self.state = np.frombuffer(b"".join(bytes(b) for b in buffers), dtype=np.float32).copy()
        round_no = yield from (self.jump(protocol) if self.is_exact else self.catch_up(protocol, 0))
        while round_no < self.rounds:
            try:
                round_no = yield from self.advance(protocol, round_no)
            except LeftBehind:
                round_no = yield from self.catch_up(protocol, round_no)
        return self.state.tobytes()

    def jump(self, protocol: RoundSteps) -> Generator[Op, Any, int]:
        """To the newest snapshot."""
        loaded = yield from protocol.load_snapshot()
        if loaded is None:
            return 0
        self.state = np.frombuffer(loaded.buffers["state"], dtype=np.float32).copy()
        return loaded.round_no

    def catch_up(self, protocol: RoundSteps, round_no: int) -> Generator[Op, Any, int]:
        mean = np.empty_like(self.state)

        def load(snapshot: LoadedSnapshot) -> None:
            self.state = np.frombuffer(snapshot.buffers["state"], dtype=np.float32).copy()

        return (yield from protocol.catch_up(round_no, lambda _: ArrayVector([mean]), lambda _: self.apply(mean), load))

    def advance(self, protocol: RoundSteps, round_no: int) -> Generator[Op, Any, int]:
        update, weight = update_of(self.rank, round_no, self.state)
        mean = np.empty_like(self.state)
        outcome = yield from protocol.exchange(
            round_no,
            ArrayVector([self.spoil(round_no, update)]),
            ArrayVector([mean]),
            weight=weight,
            base=digest(self.state.data),
        )
        self.apply(mean)
        round_no += 1
        if self.snapshot_every and round_no % self.snapshot_every == 0:
            yield from protocol.acknowledge(round_no)
            yield from protocol.write_snapshot(round_no, {"state": self.state.data.cast("B")})
            if self.is_retiring:
                yield from protocol.retire()
        return round_no if outcome.is_included else (yield from self.catch_up(protocol, round_no))

    def apply(self, mean: np.ndarray[Any, Any]) -> None:
        self.state = self.state - mean
        self.history.append(digest(self.state.data))


def update_of(rank: int, round_no: int, state: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    """What a rank contributes: depends on everything, so any mistake shows in the bits."""
    noise = np.random.default_rng([rank, round_no]).standard_normal(state.size).astype(np.float32)
    return (state * np.float32(0.1) + noise * np.float32(0.01)).astype(np.float32), float(1000 + 17 * rank)


def fault_free(toys: list[Toy]) -> bytes:
    """The final state of a strict run, computed without any of the code under test but the formula of the mean."""
    buffers = toys[0].initial()
    state = np.frombuffer(b"".join(buffers), dtype=np.float32).copy()
    for round_no in range(toys[0].rounds):
        updates = [update_of(toy.rank, round_no, state) for toy in toys]
        total = float(sum(weight for _, weight in updates))
        mean = np.zeros_like(state)
        for i, (update, weight) in enumerate(updates):
            part = update * np.float32(weight / total)
            mean = part if i == 0 else mean + part
        state = state - mean
    return state.tobytes()


def run_all(toys: list[Toy], store: Any, choose: Any = None) -> dict[str, bytes]:
    """Every toy to its end, without faults of its own."""
    simulation = Simulation(toys[0].clock, choose)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    return simulation.results()


def commits(store: Any, run_id: str = "toy") -> list[Commit]:
    """Every commit record in the store."""
    return [Commit.open(store.get(key)) for key in store.list(RoundKeys(run_id).commits_prefix())]


def events(store: Any, run_id: str = "toy") -> list[dict[str, Any]]:
    """Every event in the store."""
    keys = list(store.list(RoundKeys(run_id).events_prefix()))
    return [json.loads(line) for key in keys for line in bytes(store.get(key)).splitlines()]
