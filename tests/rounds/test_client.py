from __future__ import annotations

import subprocess
import sys
import threading
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rounds_training import LAYOUT, RULE, Trainer, client, together, train

from atoll.errors import CorruptUpdate, Fenced, InvalidSpec, KeyExists, LeftBehind
from atoll.rounds.client import RoundClient, RoundSteps
from atoll.rounds.io import Gather, Get, Put, ThreadedDriver
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector
from atoll.rounds.outer import outer_step
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Commit, Contribution
from atoll.stores.base import Store
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(str(tmp_path / "store"))


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


def test_catching_up_fills_the_sinks_of_the_caller_and_asks_for_each_committed_round_once(store: Store) -> None:
    train(store, 2, 3)
    rooms: list[np.ndarray[Any, Any]] = []
    taken: list[tuple[int, bool, bytes]] = []

    def room(fragment: int) -> ArrayVector:
        assert fragment == 0
        rooms.append(np.empty(LAYOUT.size, np.float32))
        return ArrayVector([rooms[-1]])

    def refuse(_: object) -> None:
        raise AssertionError("there is no snapshot")

    with client(store, 0, 2, attempt=1) as mine:
        Trainer(mine, 0)
        assert mine.is_committed(2)
        assert not mine.is_committed(3)

        def apply(done: Any) -> None:
            taken.append((done.round_no, done.mean is None, rooms[-1].tobytes()))

        assert mine.catch_up(0, apply, refuse, room=room) == 3
    with client(store, 1, 2, attempt=1) as other:
        Trainer(other, 1)
        means: list[bytes] = []
        other.catch_up(0, lambda done: means.append(done.mean.tobytes()), refuse)
    assert taken == [(i, True, mean) for i, mean in enumerate(means)]
    assert len(set(means)) == 3


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
        with pytest.raises(LeftBehind) as caught:
            again.replay(1)
        assert (caught.value.round_no, caught.value.latest) == (1, 1)
        again.continue_from(position)
        assert again.replay(1) is not None


def test_the_first_of_two_processes_is_told_to_stop(store: Store) -> None:
    with client(store, 0, 1) as first, client(store, 0, 1) as second:
        one, two = Trainer(first, 0), Trainer(second, 0)
        two.round()
        with pytest.raises(Fenced) as caught:
            one.round()
        assert caught.value.reason == "replaced"


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
    drive = ThreadedDriver(store, clock=None)  # type: ignore[arg-type]

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
    drive = ThreadedDriver(store, clock=None)  # type: ignore[arg-type]

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
        with pytest.raises(CorruptUpdate) as caught:
            drive(root())
        assert caught.value.check == "x"
        assert sorted(ended) == [0, 1, 2, 3]
    finally:
        drive.close()


def test_a_client_takes_a_store_and_what_the_protocol_takes() -> None:
    store, *rest = signature(RoundClient).parameters.values()
    assert store.name == "store"
    assert rest == list(signature(RoundSteps).parameters.values())
    with pytest.raises(TypeError, match="quorun"):
        RoundClient(MemoryStore(), "run", 0, 1, layouts=[LAYOUT], quorun=None)  # type: ignore[call-arg]


def test_a_quorum_that_can_never_be_had_is_refused_before_anything_is_written():
    store = MemoryStore()
    with pytest.raises(InvalidSpec, match=r"least=3: .*\b2\b"):
        RoundClient(store, "run", 0, 2, layouts=[LAYOUT], quorum=Quorum(3))
    assert list(store.list()) == []


INTERRUPTED = """
import signal, sys, threading
import numpy as np
from {module} import LAYOUT, client
from atoll.rounds.layout import ArrayVector
from atoll.stores.memory import MemoryStore

def leave(*_):
    sys.exit(143)

signal.signal(signal.SIGALRM, leave)
alone = client(MemoryStore(), 0, 2)
alone.join([np.zeros(t.size, np.float32).data.cast("B") for t in LAYOUT.tensors])
values = np.zeros(LAYOUT.size, np.float32)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    alone.exchange(0, ArrayVector([values]), weight=1.0, out=ArrayVector([values]))
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
