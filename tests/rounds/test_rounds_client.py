from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import CorruptUpdate, Fenced, InvalidSpec, KeyExists, LeftBehind
from atoll.rounds.client import RoundClient
from atoll.rounds.drive import Driver
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.member import Tuning
from atoll.rounds.ops import Gather, Get, Put
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Commit, Contribution
from atoll.rounds.vectors import Parts
from atoll.stores.base import Store
from atoll.stores.file import FileStore
from atoll.stores.memory import MemoryStore

LAYOUT = Layout.of([("w", [300, 100], "float32"), ("b", [77], "float32")])
RULE = OuterRule()
QUICK = Tuning(inline_bytes=0, bandwidth_bytes_s=1.0, latency_s=0.0, turn_s=0.02, poll_cap_s=0.05, retry_s=5.0)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(str(tmp_path / "store"))


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
        self.client.exchange(self.round_no, update, weight=100.0 + self.rank, base=base, out=Parts([update]))
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


@pytest.mark.parametrize("count", [1, 2, 4])
def test_threads_and_real_stores_give_every_replica_the_same_bits(store: Store, count: int) -> None:
    assert len(set(train(store, count, 3))) == 1


def test_a_newcomer_catches_up_by_snapshot_and_replay(store: Store) -> None:
    finals = train(store, 2, 5, snapshot_every=3)
    with client(store, 0, 2, attempt=1) as mine:
        trainer = Trainer(mine, 0)

        def load(snapshot: Any) -> None:
            trainer.values = np.frombuffer(snapshot.buffers["values"], np.float32).copy()
            trainer.momentum = np.frombuffer(snapshot.buffers["momentum"], np.float32).copy()

        def apply(done: Any) -> None:
            is_first = done.round_no == 0
            outer_step(RULE, trainer.values, trainer.momentum, done.mean, is_first=is_first)

        assert mine.catch_up(0, apply, load) == 5
        assert mine.latest().next_round == 5
        assert trainer.values.tobytes() == finals[0]


def test_a_checkpoint_of_ones_own_goes_on_where_it_was(store: Store) -> None:
    with client(store, 0, 1) as mine:
        trainer = Trainer(mine, 0)
        trainer.round()
        position, values, momentum = mine.position, trainer.values.copy(), trainer.momentum.copy()
        trainer.round()
    with client(store, 0, 1, attempt=1) as again:
        restarted = Trainer(again, 0)
        again.continue_from(position)
        restarted.values, restarted.momentum, restarted.round_no = values, momentum, 1
        restarted.round()  # was committed before the crash: taken in, not made anew
        assert restarted.values.tobytes() == trainer.values.tobytes()
        restarted.round()
    assert len(list(store.list(RoundKeys("run").commits_prefix()))) == 3


def test_a_replica_with_another_history_is_told_so(store: Store) -> None:
    with client(store, 0, 1) as mine:
        trainer = Trainer(mine, 0)
        trainer.round()
        position = mine.position
        trainer.round()
    with client(store, 0, 1, attempt=1) as again:
        Trainer(again, 0)
        again.continue_from("f" * 32)
        with pytest.raises(LeftBehind, match="does not continue"):
            again.replay(1)
        again.continue_from(position)
        assert again.replay(1) is not None


def test_the_first_of_two_processes_is_told_to_stop(store: Store) -> None:
    with client(store, 0, 1) as first, client(store, 0, 1) as second:
        one, two = Trainer(first, 0), Trainer(second, 0)
        two.round()
        with pytest.raises(Fenced, match="another process"):
            one.round()


def test_counters_tell_requests_bytes_and_phases(store: Store) -> None:
    with client(store, 0, 1) as mine:
        Trainer(mine, 0)
        update = np.ones(LAYOUT.size, np.float32)
        done = mine.exchange(0, update, weight=1.0)
        counters = done.outcome.counters
        assert counters.requests["put"] == 8 + 1  # chunks, and the event
        assert counters.bytes_up > 2 * LAYOUT.size
        assert {"encode", "put", "get"} <= set(counters.seconds)
        assert done.mean is not None
        assert done.mean.tobytes() == update.tobytes()


def test_one_commit_record_survives_a_thousand_races() -> None:
    """Every racer adopts the same winner, whichever it is."""
    store = MemoryStore()
    racers, winners = 4, set()
    barrier = threading.Barrier(racers)

    def race(rank: int) -> list[str]:
        seen = []
        for round_no in range(1000):
            mine = Commit("run", round_no, 0, "p", "", "whole", (Contribution(rank, 0, 0, 0, "ab", 1.0, 1.0),), by=rank)
            key = RoundKeys("run").commit(round_no)
            barrier.wait(timeout=30)
            try:
                store.create(key, mine.seal())
            except KeyExists:
                pass
            seen.append(Commit.open(store.get(key)).digest)
            winners.add(Commit.open(store.get(key)).by)
        return seen

    results = together(racers, race)
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) == 1000


def test_the_driver_gathers_within_a_gather_and_keeps_the_order() -> None:
    store = MemoryStore()
    drive = Driver(store, clock=None)  # type: ignore[arg-type]

    def leaf(i: int, j: int):
        yield Put(f"k/{i}/{j}", f"{i}{j}".encode())
        return bytes((yield Get(f"k/{i}/{j}")))

    def branch(i: int):
        return (yield Gather([leaf(i, j) for j in range(5)], 3))

    def root():
        return (yield Gather([branch(i) for i in range(6)], 4))

    try:
        assert drive(root()) == [[f"{i}{j}".encode() for j in range(5)] for i in range(6)]
    finally:
        drive.close()


def test_the_driver_raises_the_first_error_after_every_child_has_ended() -> None:
    store, ended = MemoryStore(), []
    drive = Driver(store, clock=None)  # type: ignore[arg-type]

    all_began = threading.Barrier(4)

    def child(i: int):
        all_began.wait(30)
        yield Put(f"k/{i}", b"")
        ended.append(i)
        if i == 2:
            raise CorruptUpdate("two", check="x")

    def root():
        yield Gather([child(i) for i in range(4)], 4)

    try:
        with pytest.raises(CorruptUpdate, match="two"):
            drive(root())
        assert sorted(ended) == [0, 1, 2, 3]
    finally:
        drive.close()


def test_a_quorum_that_can_never_be_had_is_refused_before_anything_is_written():
    store = MemoryStore()
    with pytest.raises(InvalidSpec, match=r"least=3: at most 2, the number of replicas"):
        RoundClient(store, "run", 0, 2, layouts=[LAYOUT], quorum=Quorum(3))
    assert list(store.list()) == []


INTERRUPTED = """
import signal, sys, threading
import numpy as np
from {module} import LAYOUT, client
from atoll.rounds.vectors import Parts
from atoll.stores.memory import MemoryStore

def leave(*_):
    sys.exit(143)

signal.signal(signal.SIGALRM, leave)
alone = client(MemoryStore(), 0, 2)
alone.join([np.zeros(t.size, np.float32).data.cast("B") for t in LAYOUT.tensors])
values = np.zeros(LAYOUT.size, np.float32)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    alone.exchange(0, Parts([values]), weight=1.0, out=Parts([values]))
finally:
    alone.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("atoll-round")]
"""


@pytest.mark.process
@pytest.mark.parametrize("turn", range(3))
def test_who_is_interrupted_while_waiting_for_others_can_end(turn: int) -> None:
    here = Path(__file__)
    code = INTERRUPTED.format(module=here.stem)
    done = subprocess.run([sys.executable, "-c", code], cwd=here.parent, timeout=30, check=False)
    assert done.returncode == 143
