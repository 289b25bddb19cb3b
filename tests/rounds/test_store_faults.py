from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_simulator import Simulation
from rounds_toy import FAST, Toy, commits, fault_free, run_all, update_of

from atoll.errors import AtollError, CorruptUpdate, StoreUnavailable
from atoll.rounds.chunks import MeanName
from atoll.rounds.client import RoundSteps
from atoll.rounds.contributions import Participants
from atoll.rounds.frames import digest, open_frame
from atoll.rounds.io import Create, Get, Op
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector
from atoll.rounds.quorum import Quorum, at_least, strict
from atoll.rounds.records import Offer
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer
from atoll.stores.fast import Body, BufferBody
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore

KEYS = RoundKeys("toy")


def finish(toys: list[Toy], store: FaultyStore, seed: int = 0) -> Simulation:
    rng = random.Random(seed)
    simulation = Simulation(toys[0].clock, lambda n: rng.randrange(n))
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    return simulation


def trio(**options: object) -> list[Toy]:
    clock = FakeClock()
    return [Toy(rank, 3, clock, rounds=2, seed=-rank, **options) for rank in range(3)]  # whoever starts, the same start


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_errors_before_and_after_the_effect_change_nothing(seed: int) -> None:
    rng, toys = random.Random(seed), trio()
    store = FaultyStore(MemoryStore())
    for _ in range(rng.randrange(1, 25)):
        store.fail(
            rng.choice(["get", "put", "create", "list", "delete", "*"]),
            nth=rng.randrange(1, 120),
            times=rng.randrange(1, 4),
            after_effect=rng.random() < 0.5,
        )
    assert set(finish(toys, store, seed).results().values()) == {fault_free(toys)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_spoiled_answers_change_nothing(seed: int) -> None:
    rng, toys = random.Random(seed), trio()
    store = FaultyStore(MemoryStore())
    for _ in range(rng.randrange(1, 20)):
        nth = rng.randrange(1, 120)
        if rng.random() < 0.5:
            store.flip(bit=rng.randrange(1 << 16), nth=nth)
        else:
            store.truncate(keep=rng.choice([None, 0, 1, 31, 100]), nth=nth)
    assert set(finish(toys, store, seed).results().values()) == {fault_free(toys)}


@pytest.mark.parametrize("what", ["update", "mean", "offer", "commits", "claims"])
@pytest.mark.parametrize("seed", range(12))
def test_damage_at_rest_is_healed_or_named_and_never_averaged(what: str, seed: int) -> None:
    """One object is damaged in the store for good, somewhere on the way; what comes out is right or an error."""
    rng, toys = random.Random(seed), trio()
    inner = MemoryStore()
    simulation = Simulation(toys[0].clock, lambda n: rng.randrange(n))
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), inner)
    done = False

    def damage() -> bool:
        nonlocal done
        keys = [key for key in inner.list("") if f"/{what}/" in key]
        if not done and len(keys) > rng.randrange(1, 6):
            key = rng.choice(keys)
            data = bytearray(inner.get(key))
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            inner.put(key, bytes(data))
            done = True
        return done

    simulation.run(until=damage)
    simulation.run()
    assert done
    wanted = fault_free(toys)
    for task in simulation.tasks.values():
        assert task.is_over
        assert isinstance(task.error, AtollError) or task.value == wanted, task.error


def test_a_chunk_that_went_bad_in_the_store_is_healed_by_the_one_who_wrote_it() -> None:
    toys = trio()
    inner = MemoryStore()
    simulation = Simulation(toys[0].clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), inner)
    bad = KEYS.update(1, 1, 0, 0)
    simulation.run(until=lambda: bad in list(inner.list(bad)))
    inner.put(bad, bytes(inner.get(bad))[:-1] + b"\0")
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}


def test_an_offer_that_went_bad_in_the_store_is_written_again_by_its_owner() -> None:
    toys = trio()
    inner = MemoryStore()
    simulation = Simulation(toys[0].clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), inner)
    bad = KEYS.offer(1, 2, 0)
    simulation.run(until=lambda: bad in list(inner.list(bad)))
    inner.put(bad, b"?" + bytes(inner.get(bad))[1:])
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}


def test_offers_that_went_bad_before_anyone_read_them_are_written_again() -> None:
    toys = trio()
    inner = MemoryStore()
    simulation = Simulation(toys[0].clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), inner)
    looks = KEYS.offers_prefix(1)
    simulation.before = lambda _, __, op: "pause" if isinstance(op, Get) and op.key.startswith(looks) else None
    simulation.run()
    assert len(simulation.paused) == 3
    for rank in (1, 2):
        inner.put(KEYS.offer(1, rank, 0), b"gone")
    simulation.before, simulation.paused = None, set()
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}


def test_a_snapshot_that_cannot_be_read_gives_way_to_the_one_before() -> None:
    clock, inner = FakeClock(), MemoryStore()
    toy = Toy(0, 1, clock, rounds=12, snapshot_every=5)
    simulation = Simulation(clock)
    simulation.start("r0", toy.train(), inner)
    simulation.run()
    final = simulation.results()["r0"]
    for key in inner.list(KEYS.blobs_prefix()):
        if KEYS.parse_blob(key)[0] == 10:
            inner.put(key, b"gone")
    again = toy.again(attempt=1)
    simulation.start("r0", again.train(), inner)
    simulation.run()
    assert simulation.results()["r0"] == final
    assert len(again.history) == 12 - 5, "from the snapshot of round 5"


def test_without_any_readable_snapshot_a_newcomer_replays_the_rounds_that_are_there() -> None:
    clock, inner = FakeClock(), MemoryStore()
    toy = Toy(0, 1, clock, rounds=12, snapshot_every=5)
    final = run_all([toy], inner)["r0"]
    for key in inner.list(KEYS.blobs_prefix()):
        if KEYS.parse_blob(key)[0] > 0:
            inner.put(key, b"gone")
    again = toy.again(attempt=1)
    assert run_all([again], inner)["r0"] == final
    assert len(again.history) == 12


def test_damage_nobody_can_heal_is_an_error_that_names_the_rank() -> None:
    clock = FakeClock()
    toys = [Toy(rank, 2, clock, rounds=1) for rank in range(2)]
    inner = MemoryStore()
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), inner)
    bad = KEYS.update(0, 1, 0, 2)
    simulation.run(until=lambda: bad in list(inner.list(bad)))
    inner.put(bad, b"not an update")
    simulation.run()
    error = simulation.tasks["r0"].error
    assert isinstance(error, CorruptUpdate)
    assert bad in str(error)


def test_a_store_that_stays_away_is_an_error_in_its_time() -> None:
    toys = trio()
    store = FaultyStore(MemoryStore(), clock=toys[0].clock)
    store.fail("put", "*/update/*", times=None)
    simulation = finish(toys, store)
    for task in simulation.tasks.values():
        assert isinstance(task.error, StoreUnavailable)
    assert toys[0].clock.monotonic() < 90.0


def test_objects_of_another_run_or_round_under_our_names_are_refused() -> None:
    toys = [toy.again(tuning=replace(FAST, skip_upload=False)) for toy in trio()]
    inner = MemoryStore()
    simulation = finish(toys, FaultyStore(inner))
    assert simulation.results()
    stray = bytes(inner.get(KEYS.update(0, 1, 0, 0)))
    inner.put(KEYS.update(1, 1, 0, 0), stray)
    inner.delete(KEYS.mean(1, Participants.of_commit(commits(inner)[1]).id, 0))
    late = Simulation(toys[0].clock)
    late.start("late", toys[2].again(attempt=1).train(), inner)
    late.run()
    error = late.tasks["late"].error
    assert isinstance(error, CorruptUpdate)
    assert (error.rank, error.check) == (1, "identity")


def test_a_mean_that_others_have_taken_is_not_replaced_for_one_bad_read() -> None:
    """Rank 0 is late with its means, the others go on without its parts, and then it reads one of theirs badly."""
    clock, inner = FakeClock(), MemoryStore()
    stores = [FaultyStore(inner) for _ in range(3)]
    few = replace(FAST, connections=2)  # too few to average ahead of the commit
    toys = [Toy(rank, 3, clock, rounds=2, quorum=at_least(2), tuning=few) for rank in range(3)]
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), stores[toy.rank])
    is_mean = lambda op: isinstance(op, Create) and "/0000000001/mean/" in op.key  # noqa: E731
    simulation.before = lambda name, _, op: "pause" if name == "r0" and is_mean(op) else None
    simulation.run(until=lambda: all(len(toy.history) == 2 for toy in toys[1:]))
    assert simulation.paused == {"r0"}
    stores[0].flip("*/0000000001/mean/*", bit=9000)
    simulation.paused, simulation.before = set(), None
    simulation.run()
    assert len(set(simulation.results().values())) == 1


def test_a_mean_made_of_other_updates_than_the_committed_ones_is_not_taken() -> None:
    toys = [toy.again(tuning=replace(FAST, skip_upload=False)) for toy in trio()]
    inner = MemoryStore()
    final = finish(toys, FaultyStore(inner)).results()["r0"]
    commit, grid = commits(inner)[1], Grid(toys[0].layout.size, toys[0].chunk)
    party = Participants.of_commit(commit).id
    name = MeanName("toy", 1, 0, party, toys[0].layout.hash, "fp32", grid, 0)
    forged = np.zeros(grid.count(0), np.float32)
    inner.put(KEYS.mean(1, party, 0), name.seal(["0" * 16] * 3, [forged.data.cast("B")]))
    late = Simulation(toys[0].clock)
    late.start("late", toys[2].again(attempt=1).train(), inner)
    late.run()
    assert late.results()["late"] == final


@dataclass
class InPlace(Toy):
    """The mean takes the place of the update."""

    def advance(self, protocol: RoundSteps, round_no: int) -> Generator[Op, Any, int]:
        update, weight = update_of(self.rank, round_no, self.state)
        place = ArrayVector([update])
        outcome = yield from protocol.exchange(round_no, place, place, weight=weight, base=digest(self.state.data))
        self.apply(update)
        return round_no + 1 if outcome.is_included else (yield from self.catch_up(protocol, round_no + 1))


class SpoiledFor(MemoryStore):
    """One replica's view of a store: until then, the last bytes of what matches arrive as garbage."""

    def __init__(
        self, inner: MemoryStore, clock: FakeClock, until_s: float, *, opened: str, read: str = "nothing"
    ) -> None:
        super().__init__()
        self._objects, self._clock, self._until_s = inner._objects, clock, until_s
        self._opened, self._read, self.spoiled = opened, read, 0

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        return self._spoil(super().get(key, start=start, length=length), self._read in key)

    def open(self, key: str) -> Body:
        return BufferBody(self._spoil(super().get(key), self._opened in key or self._read in key))

    def _spoil(self, data: Buffer, is_meant: bool) -> bytes:
        is_spoiled = is_meant and self._clock.monotonic() < self._until_s
        self.spoiled += is_spoiled
        return bytes(data[:-400]) + b"\xff" * 400 if is_spoiled else bytes(data)


@pytest.mark.parametrize("skip_upload", [False, True])
@pytest.mark.parametrize("quorum", [strict(deadline_s=600.0), at_least(3, grace_s=5.0, deadline_s=600.0)])
def test_a_bad_mean_in_the_place_of_our_update_is_not_written_as_our_update(quorum: Quorum, skip_upload: bool) -> None:
    """Rank 1 reads nothing right for a while: neither the means, which lie over its update, nor its own chunks."""
    clock, inner = FakeClock(), MemoryStore()
    tuning = replace(FAST, skip_upload=skip_upload)
    toys = [InPlace(r, 3, clock, rounds=4, size=9000, quorum=quorum, tuning=tuning, seed=-r) for r in range(3)]
    bad = SpoiledFor(inner, clock, 25.0, opened="/0000000002/mean/", read="/0000000002/update/00001")
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), bad if toy.rank == 1 else inner)
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}
    assert bad.spoiled > 10


def test_a_bad_mean_does_not_take_the_place_of_the_only_copy_of_our_update() -> None:
    """Others have made a mean without what rank 1 kept; it comes back and reads that mean wrong for a while."""
    clock, inner = FakeClock(), MemoryStore()
    quorum = at_least(2, grace_s=5.0, deadline_s=300.0)
    few = replace(FAST, connections=2)
    toys = [InPlace(r, 3, clock, rounds=4, size=9000, quorum=quorum, tuning=few) for r in range(3)]
    bad = SpoiledFor(inner, clock, 80.0, opened="/0000000002/mean/")
    simulation = Simulation(clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), bad if toy.rank == 1 else inner)

    def is_mean(op: Op) -> bool:
        return isinstance(op, Create) and "/0000000002/mean/" in op.key and len(commits(inner)) > 2

    simulation.before = lambda name, _, op: "pause" if name == "r1" and is_mean(op) else None
    simulation.run(until=lambda: len(toys[0].history) > 2 and len(toys[2].history) > 2)
    assert simulation.paused == {"r1"}
    simulation.paused, simulation.before = set(), None
    simulation.run()
    assert len(set(simulation.results().values())) == 1
    assert bad.spoiled > 10
    assert clock.monotonic() < 200.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([(2500, 1024), (300_000, 1 << 18)]), st.sampled_from(["fp32", "bf16"]))
def test_reads_that_break_off_between_pieces_change_nothing(seed: int, sizes: tuple[int, int], codec: str) -> None:
    """An opened object may stop at any piece: in its front, before its payload, or in the middle of it."""
    rng, broken = random.Random(seed), []
    options = {"size": sizes[0], "chunk": sizes[1], "codec": codec}

    def before_piece(name: str) -> None:
        if len(broken) < 12 and rng.random() < 0.3:
            broken.append(name)
            raise StoreUnavailable("the connection was cut")

    toys, store = trio(**options), MemoryStore()
    simulation = Simulation(toys[0].clock, lambda n: rng.randrange(n))
    simulation.before_piece = before_piece
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    quiet = trio(**options)
    run_all(quiet, MemoryStore())
    assert {tuple(toy.history) for toy in toys} == {tuple(quiet[0].history)}
    assert broken


class SpoilsUpdatesOnce(MemoryStore):
    """The first reader of each chunk of the second round's updates gets its last byte wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.spoiled: set[str] = set()
        self.means: list[bytes] = []

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        found = bytearray(super().get(key, start=start, length=length))
        if key.startswith(KEYS.round_prefix(1) + "update/") and key not in self.spoiled:
            self.spoiled.add(key)
            found[-1] ^= 1
        return bytes(found)

    def create(self, key: str, data: Any) -> None:
        super().create(key, data)
        if key.startswith(KEYS.round_prefix(1) + "mean/"):
            self.means.append(bytes(super().get(key)))


def test_a_mean_of_a_part_that_came_damaged_is_never_published() -> None:
    toys, store = trio(), SpoilsUpdatesOnce()
    simulation = Simulation(toys[0].clock)
    for toy in toys:
        simulation.start(f"r{toy.rank}", toy.train(), store)
    simulation.run()
    assert set(simulation.results().values()) == {fault_free(toys)}
    assert store.spoiled
    offers = [
        Offer.open(store.get(KEYS.offer(1, rank, 0)), run_id="toy", round_no=1, rank=rank, slot=0) for rank in range(3)
    ]
    announced = {check for offer in offers for check in offer.chunks}
    assert store.means
    for mean in store.means:
        assert set(open_frame(mean, kind="mean").header["parts"]) <= announced
