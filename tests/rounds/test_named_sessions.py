"""Who meets whom, in every order the store's requests can come: many processes in one thread, killed anywhere."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from rounds_simulator import Simulation

from atoll.errors import Fenced, PartsDiffer, QuorumLost
from atoll.rounds.io import Sleep, Steps, StoreIO
from atoll.rounds.named.exchange import NamedContribution, NamedProtocol
from atoll.rounds.named.keys import NamedKeys
from atoll.rounds.named.session import Rendezvous
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock

EXCHANGES = 3


class World:
    """Jobs that follow each other at one place, and everything any process of them got."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world_size, self.clock, self.store = world_size, FakeClock(), MemoryStore()
        self.simulation = Simulation(self.clock, lambda count: self.rng.randrange(count))
        self.got: dict[str, list[list[bytes]]] = {}

    def start(self, job: str, rank: int, *, exchanges: int = EXCHANGES) -> None:
        name = f"{job}{rank}"
        self.got[name] = []
        self.simulation.start(name, self._process(name, rank, exchanges), self.store)

    def start_all(self, job: str) -> None:
        for rank in self.shuffled():
            self.start(job, rank)

    def shuffled(self) -> Iterator[int]:
        return iter(self.rng.sample(range(self.world_size), self.world_size))

    def kill_all(self, job: str) -> None:
        for name in [name for name in self.simulation.tasks if name.startswith(job)]:
            self.simulation.kill(name)

    def outcome(self, name: str) -> Any:
        task = self.simulation.tasks[name]
        assert task.is_over, f"{name} is not done"
        return task.error or task.value

    def _process(self, name: str, rank: int, exchanges: int) -> Steps[str]:
        token = uuid.UUID(int=self.rng.getrandbits(128)).hex
        io = StoreIO(self.clock, self.rng, retry_s=10.0)
        place = Rendezvous(io, NamedKeys(None, self.world_size), rank, token, 0.05, lambda: [token])
        protocol = NamedProtocol(place, timeout_s=600.0)
        for i in range(exchanges):
            parts = yield from protocol.exchange("w", NamedContribution("mean", (), "", f"{name}.{i}".encode()))
            self.got[name].append([bytes(part.payload) for part in parts])
        yield from protocol.leave()
        return "done"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_a_job_sees_only_itself_wherever_the_one_before_it_died(world_size, seed):
    world = World(world_size, seed)
    came = [rank for rank in world.shuffled() if world.rng.random() < 0.8]
    for rank in came:
        world.start("a", rank)
    requests = world.rng.randrange(1, 25 * world_size)
    world.simulation.run(until=lambda: sum(world.simulation.requests.values()) >= requests)
    world.kill_all("a")
    world.start_all("b")
    world.simulation.run()
    for rank in range(world_size):
        assert world.outcome(f"b{rank}") == "done"
        assert world.got[f"b{rank}"] == [
            [f"b{other}.{i}".encode() for other in range(world_size)] for i in range(EXCHANGES)
        ]


@pytest.mark.parametrize("seed", range(60))
def test_a_process_that_is_killed_and_started_again_never_makes_ranks_disagree(seed):
    world = World(3, seed)
    world.start_all("a")
    victim, at = world.rng.randrange(3), world.rng.randrange(1, 60)
    world.simulation.run(until=lambda: sum(world.simulation.requests.values()) >= at)
    if f"a{victim}" in world.simulation.tasks and not world.simulation.tasks[f"a{victim}"].is_over:
        world.simulation.kill(f"a{victim}")
        world.start("z", victim)
    world.simulation.run()
    means: dict[bytes, set[tuple[bytes, ...]]] = {}
    for name, task in world.simulation.tasks.items():
        assert task.error is None or isinstance(task.error, QuorumLost | Fenced), f"{name}: {task.error!r}"
        for parts in world.got[name]:
            assert parts[int(name[1])].startswith(name.encode()), "our own part is in what we get"
            for part in parts:
                means.setdefault(part, set()).add(tuple(parts))
    assert all(len(combined) == 1 for combined in means.values()), "one part went into two different means"


def test_before_the_first_mean_a_restart_costs_nothing():
    world = World(3, seed=1)
    world.start("a", 0)
    world.start("a", 1)
    world.start("a", 2)
    world.simulation.before = lambda name, count, op: (
        "kill" if name == "a2" and "parts" in getattr(op, "key", "") else None
    )
    world.simulation.run()
    world.simulation.before = None
    assert world.simulation.killed == ["a2"]
    world.start("z", 2)
    world.simulation.run()
    assert world.simulation.results() == {"a0": "done", "a1": "done", "z2": "done"}
    assert world.got["a0"] == world.got["a1"] == world.got["z2"]


def test_after_a_mean_the_others_are_told_who_was_started_again():
    world = World(3, seed=2)
    world.start_all("a")
    world.simulation.run(until=lambda: all(len(got) == 1 for got in world.got.values()))
    world.simulation.kill("a1")
    world.start("z", 1)
    world.simulation.run(until=lambda: all(world.simulation.tasks[f"a{rank}"].is_over for rank in (0, 2)))
    for rank in (0, 2):
        error = world.outcome(f"a{rank}")
        assert isinstance(error, QuorumLost)
        assert error.missing == (1,)
        assert "rank 1" in error.message
        assert not error.timed_out
    assert world.clock.monotonic() < 10, "they are told long before the time limit of 600 s"


def test_of_two_processes_with_one_rank_one_is_left_out_and_the_mean_has_one_part_of_that_rank():
    for seed in range(20):
        world = World(2, seed)
        for name in ("a0", "a1", "z1"):
            world.start(name[0], int(name[1]))
        world.simulation.run()
        ends = {name: world.outcome(name) for name in ("a0", "a1", "z1")}
        assert ends["a0"] == "done" or isinstance(ends["a0"], QuorumLost | Fenced)
        assert sum(end == "done" for name, end in ends.items() if name != "a0") <= 1
        for parts in world.got["a0"]:
            assert parts[1][:2] in (b"a1", b"z1")


def test_one_who_took_a_seat_beside_the_dead_follows_the_living():
    world = World(3, seed=6)
    world.start("a", 0)
    world.simulation.run(until=lambda: len(list(world.store.list())) == 1)
    world.kill_all("a")
    for rank in (1, 0, 2):  # 1 sits down beside the dead 0; the living 0 opens a new session; 2 goes straight there
        wanted = len(list(world.store.list())) + 1
        world.start("b", rank)
        world.simulation.run(until=lambda wanted=wanted: len(list(world.store.list())) == wanted)
    assert [key.split("/")[-1] for key in world.store.list()] == [
        "000000.00000.json", "000000.00001.json", "000001.00000.json", "000001.00002.json",
    ]  # fmt: skip
    world.simulation.run()
    assert world.simulation.results() == {"b0": "done", "b1": "done", "b2": "done"}


MARK = ["allreduce/_/00003/seats/000001.floor"]


def test_a_process_may_be_in_two_sessions_and_late_in_one_of_them():
    world = World(2, seed=7)

    def process(rank: int) -> Steps[list[bytes]]:
        tokens = [f"{rank}{which}" * 16 for which in (0, 1)]
        io = StoreIO(world.clock, world.rng)
        places = [Rendezvous(io, NamedKeys(None, 2), rank, token, 0.05, lambda: tokens) for token in tokens]
        ends = [NamedProtocol(place, 600.0) for place in places]
        found = []
        for turn in range(2):
            for which, end in enumerate(ends):
                if rank == 1 and turn == 1:
                    yield Sleep(60.0)  # the other one asks whether this one is still there, and finds it elsewhere
                parts = yield from end.exchange("w", NamedContribution("mean", (), "", f"{rank}{which}{turn}".encode()))
                found.append(b" ".join(bytes(part.payload) for part in parts))
        return found

    for rank in range(2):
        world.simulation.start(f"r{rank}", process(rank), world.store)
    world.simulation.run()
    assert list(world.simulation.results().values()) == [[b"000 100", b"010 110", b"001 101", b"011 111"]] * 2


def test_only_a_mark_is_left_after_everybody_said_goodbye():
    world = World(3, seed=3)
    world.start_all("a")
    world.simulation.run()
    assert list(world.store.list()) == MARK


@pytest.mark.parametrize("seed", range(40))
def test_whoever_tidies_up_late_deletes_nothing_of_the_next_job(seed):
    world = World(3, seed)
    world.start_all("a")

    def stop_one_who_deletes(name: str, count: int, op: Any) -> str | None:
        is_deleting = type(op).__name__ == "Delete" and len(world.got[name]) == EXCHANGES and "seats" in op.key
        return "pause" if is_deleting and not world.simulation.paused else None

    world.simulation.before = stop_one_who_deletes
    world.simulation.run()
    (late,) = world.simulation.paused
    world.simulation.before = None
    world.start_all("b")
    others = world.rng.randrange(1, 120)
    began = sum(world.simulation.requests.values())
    world.simulation.run(until=lambda: sum(world.simulation.requests.values()) - began >= others)
    world.simulation.paused.clear()
    world.simulation.run()
    assert world.outcome(late) == "done"
    assert [world.outcome(f"b{rank}") for rank in range(3)] == ["done"] * 3
    assert world.got["b0"] == world.got["b1"] == world.got["b2"]


def test_what_a_dead_job_left_goes_with_the_next_one():
    world = World(3, seed=4)
    world.start_all("a")
    world.simulation.run(until=lambda: all(len(got) == 2 for got in world.got.values()))
    world.kill_all("a")
    assert len(list(world.store.list())) > 6
    world.start_all("b")
    world.simulation.run()
    assert list(world.store.list()) == ["allreduce/_/00003/seats/000002.floor"]


def test_a_long_session_holds_a_bounded_number_of_objects():
    world = World(3, seed=5)
    most = 0
    for rank in range(3):
        world.start("a", rank, exchanges=100)

    def look() -> bool:
        nonlocal most
        most = max(most, len(list(world.store.list("allreduce/_/00003/parts/"))))
        return False

    world.simulation.run(until=look, max_steps=100_000)
    assert len(world.got["a0"]) == 100
    assert 3 <= most <= 9


def test_parts_that_cannot_be_combined_are_named_on_every_rank():
    clock, store = FakeClock(), MemoryStore()
    simulation = Simulation(clock)

    def process(rank: int) -> Steps[Any]:
        io = StoreIO(clock, random.Random(rank))
        place = Rendezvous(io, NamedKeys(None, 3), rank, f"{rank:032x}", 0.05, list)
        shape = (4,) if rank == 1 else (3,)
        return (
            yield from NamedProtocol(place, 60.0).exchange(
                "w", NamedContribution("mean", [("float32", shape)], "", b"")
            )
        )

    for rank in range(3):
        simulation.start(f"r{rank}", process(rank), store)
    simulation.run()
    for task in simulation.tasks.values():
        assert isinstance(task.error, PartsDiffer)
        assert task.error.words[1].endswith("float32 [4]")
        assert f"rank 1: {task.error.words[1]}" in str(task.error)
