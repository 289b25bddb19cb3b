from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from rounds_simulator import Simulation

from atoll.errors import CorruptUpdate, QuorumLost
from atoll.rounds import means
from atoll.rounds.codec_bf16 import from_bf16_bits, to_bf16_bits
from atoll.rounds.keys import MeanKeys
from atoll.rounds.mean_client import MeanClient
from atoll.rounds.means import Ledger, mean
from atoll.rounds.meeting import Meeting, meet
from atoll.rounds.requests import Requests
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock


def rank_program(clock: FakeClock, rank: int, count: int, calls: list[tuple[str, np.ndarray, str]], timeout_s=60.0):
    meeting = Meeting(Requests(clock, random.Random(rank)), MeanKeys("group"), rank, count, timeout_s, 1.0)
    session = yield from meet(meeting)
    ledger, results = Ledger(count), []
    for name, array, dtype in calls:
        results.append((yield from mean(meeting, session, ledger, name, array.reshape(-1), dtype, array.shape)))
    return results


def run(programs: dict[str, Any], store: MemoryStore, clock: FakeClock, choose: Callable | None = None) -> Simulation:
    simulation = Simulation(clock, choose)
    for name, program in programs.items():
        simulation.start(name, program, store)
    simulation.run()
    return simulation


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_every_rank_gets_the_mean_of_every_name_in_the_same_bits(
    count: int, is_scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_scattered:
        monkeypatch.setattr(means, "_SMALL_BYTES", 0)
        monkeypatch.setattr(means, "CHUNK", 1024)
    rng = np.random.default_rng(count)
    arrays = {
        "half": [rng.standard_normal((7, 3)).astype(np.float16) for _ in range(count)],
        "single": [rng.standard_normal(5000).astype(np.float32) for _ in range(count)],
        "double": [rng.standard_normal(11) for _ in range(count)],
        "whole": [rng.integers(-1000, 1000, (4, 4)) for _ in range(count)],
        "empty": [np.empty((0, 3), np.float32) for _ in range(count)],
        "scalar": [np.float32(rank).reshape(()) for rank in range(count)],
    }
    clock, chooser = FakeClock(), random.Random(count)
    programs = {
        f"r{rank}": rank_program(clock, rank, count, [(n, a[rank], a[rank].dtype.name) for n, a in arrays.items()] * 2)
        for rank in range(count)
    }
    results = run(programs, MemoryStore(), clock, lambda n: chooser.randrange(n)).results()
    for i, (name, each) in enumerate(arrays.items()):
        got = {result[i].tobytes() for result in results.values()}
        assert len(got) == 1, name
        wanted = np.mean(np.stack([a.astype(np.float64) for a in each]), axis=0).reshape(-1)
        tolerance = {"float16": 2e-3, "float32": 1e-6}.get(each[0].dtype.name, 1e-12)
        found = results["r0"][i].astype(np.float64)
        if name == "whole":
            wanted = np.rint(wanted)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_bfloat16_bits_are_averaged_as_numbers() -> None:
    values = [np.float32([1.0, -3.0, 0.1]), np.float32([2.0, 5.0, 0.2])]
    clock = FakeClock()
    programs = {f"r{r}": rank_program(clock, r, 2, [("w", to_bf16_bits(values[r]), "bfloat16")]) for r in range(2)}
    results = run(programs, MemoryStore(), clock).results()
    np.testing.assert_allclose(from_bf16_bits(results["r0"][0]), [1.5, 1.0, 0.15], rtol=2**-8)


def test_a_label_used_before_does_not_confuse_a_new_group() -> None:
    store, clock = MemoryStore(), FakeClock()
    for generation in range(3):
        arrays = [np.float32([10.0 * generation + rank]) for rank in range(2)]
        # Rank 1 comes first and finds only what the last group left.
        programs = {f"r{r}": rank_program(clock, r, 2, [("w", arrays[r], "float32")]) for r in (1, 0)}
        results = run(programs, store, clock).results()
        assert results["r0"][0][0] == results["r1"][0][0] == 10.0 * generation + 0.5


def test_a_group_that_died_while_meeting_does_not_confuse_the_next() -> None:
    store, clock = MemoryStore(), FakeClock()
    dead = Simulation(clock)
    dead.start("r0", rank_program(clock, 0, 3, []), store)
    dead.start("r1", rank_program(clock, 1, 3, []), store)
    dead.run(until=lambda: clock.monotonic() > 5.0)
    programs = {f"r{r}": rank_program(clock, r, 3, [("w", np.float32([r]), "float32")]) for r in (2, 1, 0)}
    results = run(programs, store, clock).results()
    assert {result[0][0] for result in results.values()} == {1.0}


def test_objects_do_not_pile_up_even_when_every_name_is_new() -> None:
    store, clock = MemoryStore(), FakeClock()
    calls = [(f"step {i}", np.zeros(3, np.float32), "float32") for i in range(200)]
    run({f"r{r}": rank_program(clock, r, 3, calls) for r in range(3)}, store, clock).results()
    assert len(list(store.list(""))) < 30


def test_a_missing_rank_is_named_in_time() -> None:
    store, clock = MemoryStore(), FakeClock()
    programs = {f"r{r}": rank_program(clock, r, 3, [], timeout_s=10.0) for r in (0, 2)}
    simulation = run(programs, store, clock)
    error = simulation.tasks["r0"].error
    assert isinstance(error, QuorumLost)
    assert error.missing == (1,)
    assert clock.monotonic() < 15.0


def test_arrays_that_differ_are_an_error_that_names_the_rank() -> None:
    store, clock = MemoryStore(), FakeClock()
    arrays = [np.zeros(3, np.float32), np.zeros(4, np.float32)]
    programs = {f"r{r}": rank_program(clock, r, 2, [("w", arrays[r], "float32")]) for r in range(2)}
    error = run(programs, store, clock).tasks["r0"].error
    assert isinstance(error, CorruptUpdate)
    assert (error.rank, error.check) == (1, "shape")
    assert "[4] at rank 1, [3] here" in str(error)


def test_threads_may_average_many_names_at_once_in_any_order() -> None:
    store = MemoryStore()
    names = [f"layer {i}" for i in range(12)]

    def rank(r: int) -> dict[str, float]:
        client = MeanClient(store, r, 3, poll_s=0.02, timeout_s=30.0)
        try:
            with ThreadPoolExecutor(12) as pool:
                order = names if r % 2 else names[::-1]
                found = pool.map(lambda n: (n, client.mean(n, np.full((2, 2), r + len(n), np.float64))), order)
                return {name: float(value[0, 0]) for name, value in found}
        finally:
            client.close()

    with ThreadPoolExecutor(3) as ranks:
        results = list(ranks.map(rank, range(3)))
    assert results[0] == results[1] == results[2] == {name: 1.0 + len(name) for name in names}
