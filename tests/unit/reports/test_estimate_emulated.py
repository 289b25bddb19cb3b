"""The model against the protocol itself: real replicas, request by request, on an emulated network in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from link_emulator import Emulator

from atoll.reports.estimate import Exchange, Setting, planned_exchange
from atoll.rounds.client import RoundSteps
from atoll.rounds.context import Tuning
from atoll.rounds.io import Counters, Sleep
from atoll.rounds.layout import ArrayVector, Layout

LATENCY_S, BYTES_S = 0.1, 0.5e6
SIZE, CHUNK = 300 << 10, 10 << 10
ROUNDS, EVERY_S = 3, 100.0


@dataclass
class Seen:
    """What the last round took one replica."""

    seconds: float
    used: Counters


@cache
def emulated(
    replicas: int, codec: str, *, size: int = SIZE, mean_codec: str | None = None, bytes_s: float = BYTES_S
) -> list[Seen]:
    """The last of a few rounds, rank by rank; all replicas arrive at the same time."""
    emulator = Emulator(LATENCY_S, bytes_s)
    tuning = Tuning(latency_s=LATENCY_S, bandwidth_bytes_s=bytes_s, connections=32, patience_s=600.0)
    layout = Layout.of([("w", [size], "float32")])
    zeros = np.zeros(size, np.float32).tobytes()

    def train(rank: int):
        protocol = RoundSteps(
            "run", rank, replicas, layouts=[layout], codec_name=codec, mean_codec=mean_codec, chunk=CHUNK,
            tuning=tuning, clock=emulator, rng=random.Random(rank),
        )  # fmt: skip
        yield from protocol.join([zeros])
        update = np.random.default_rng(rank).standard_normal(size).astype(np.float32)
        outcome = None
        for round_no in range(ROUNDS):
            yield Sleep(EVERY_S * (1 + round_no) - emulator.now)  # inner steps: everyone comes at the same time
            outcome = yield from protocol.exchange(
                round_no, ArrayVector([update]), ArrayVector([np.empty_like(update)]), weight=1.0
            )
        assert outcome is not None
        return Seen(outcome.seconds, outcome.counters)

    found = emulator.run({f"r{rank}": train(rank) for rank in range(replicas)})
    return [found[f"r{rank}"] for rank in range(replicas)]


def planned(replicas: int, codec: str, *, size: int = SIZE, mean_codec: str | None = None) -> Exchange:
    return planned_exchange(
        Setting(size, replicas, bandwidth_bytes_s=BYTES_S, latency_s=LATENCY_S, codec=codec, mean_codec=mean_codec,
                chunk=CHUNK)
    )  # fmt: skip


CASES = [(2, "fp32", None), (4, "fp32", None), (8, "int8", None), (16, "int8", None), (4, "int8", "bf16")]


@pytest.mark.parametrize(("replicas", "codec", "mean_codec"), CASES)
def test_seconds_lie_between_all_overlapped_and_phase_after_phase(replicas, codec, mean_codec):
    seen, model = emulated(replicas, codec, mean_codec=mean_codec), planned(replicas, codec, mean_codec=mean_codec)
    slowest = max(each.seconds for each in seen)
    assert 0.95 * model.pipelined_s <= slowest <= 1.6 * model.pipelined_s
    assert slowest <= 1.05 * model.phased_s


@pytest.mark.parametrize(("replicas", "codec", "mean_codec"), CASES)
def test_bytes_and_requests_are_those_of_the_model(replicas, codec, mean_codec):
    seen, model = emulated(replicas, codec, mean_codec=mean_codec), planned(replicas, codec, mean_codec=mean_codec)
    everyone = range(replicas)
    for amount, wanted in (("bytes_up", model.bytes_up), ("bytes_down", model.bytes_down)):
        mean = sum(getattr(seen[rank].used, amount) for rank in everyone) / replicas
        assert mean == pytest.approx(wanted, rel=0.06), amount  # headers of chunks are not in the model
    wrote = [seen[rank].used.requests["put"] + seen[rank].used.requests["create"] for rank in everyone]
    assert sum(wrote) / replicas == pytest.approx(model.bulk_puts + model.record_puts, abs=3)
    read = [seen[rank].used.requests["get"] - seen[rank].used.misses for rank in everyone]
    assert sum(read) / replicas == pytest.approx(model.bulk_gets + model.record_gets, abs=5)
    listed = sum(seen[rank].used.requests["list"] for rank in everyone) / replicas
    assert listed <= model.record_lists + 2


def test_small_updates_travel_inside_their_offers():
    (first, *_), model = emulated(4, "int8", size=4096), planned(4, "int8", size=4096)
    assert (model.mode, model.bulk_puts, model.bulk_gets) == ("whole", 0, 0)
    assert first.used.requests["put"] + first.used.requests["create"] <= 4
    assert first.seconds <= 3 * model.pipelined_s, "a commit more, and a look too early"


def test_twice_the_network_is_half_the_time_above_the_trips():
    slow, fast = (max(s.seconds for s in emulated(4, "fp32", bytes_s=rate)) for rate in (BYTES_S / 2, BYTES_S))
    assert 1.6 < slow / fast < 2.1
