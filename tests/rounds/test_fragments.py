"""Rounds that exchange a part of the model at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from rounds_training import QUICK, RULE

from atoll.errors import CorruptUpdate
from atoll.rounds.client import RoundClient
from atoll.rounds.codecs.bf16 import from_bf16_bits, to_bf16_bits
from atoll.rounds.layout import Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.quorum import Quorum
from atoll.rounds.verify import verify
from atoll.stores.memory import MemoryStore

FRAGMENTS = [
    Layout.of([("a", [30, 100], "float32")]),
    Layout.of([("b", [5000], "bfloat16"), ("c", [3], "float16")]),
    Layout.of([("d", [], "float64")]),
]
SIZES = [layout.size for layout in FRAGMENTS]
TAIL_RULE = OuterRule(lr=1.0, momentum=0.0)


def initial(rank: int) -> list[bytes]:
    rng = np.random.default_rng(rank)
    b = to_bf16_bits(rng.standard_normal(5000).astype(np.float32))
    return [
        rng.standard_normal(3000).astype("<f4").tobytes(), b.tobytes(),
        rng.standard_normal(3).astype("<f2").tobytes(), rng.standard_normal(1).astype("<f8").tobytes(),
    ]  # fmt: skip


def as_values(buffers: list[Any]) -> np.ndarray:
    a, b, c, d = (bytes(buffer) for buffer in buffers)
    parts = [
        np.frombuffer(a, "<f4"),
        from_bf16_bits(np.frombuffer(b, "<u2")),
        np.frombuffer(c, "<f2"),
        np.frombuffer(d, "<f8"),
    ]
    return np.concatenate([part.astype(np.float32) for part in parts])


def train(store: MemoryStore, rank: int, count: int, rounds: int) -> bytes:
    settings = {"outer": RULE.to_json()}
    with RoundClient(
        store, "run", rank, count, layouts=FRAGMENTS, codec_name="bf16", mean_codec="fp32", chunk=1024,
        quorum=Quorum(deadline_s=60.0), tuning=QUICK, settings=settings,
    ) as client:  # fmt: skip
        values = as_values(client.join(initial(rank)))
        momentum = np.zeros_like(values)
        ends = np.cumsum(SIZES)
        for round_no in range(rounds):
            which = round_no % 3
            span = slice(ends[which] - SIZES[which], ends[which])
            noise = np.random.default_rng([rank, round_no]).standard_normal(SIZES[which])
            update = (values[span] * np.float32(0.1) + noise * 0.01).astype(np.float32)
            done = client.exchange(round_no, update, weight=1.0, base=state_digest(values, momentum))
            assert done.outcome.fragment == which
            outer_step(RULE, values[span], momentum[span], done.mean, is_first=round_no < 3)
            if round_no == 4:
                buffers = {"values": values.data.cast("B"), "momentum": momentum.data.cast("B")}
                client.write_snapshot(5, buffers, {"started": [True] * 3})
        return values.tobytes()


@pytest.mark.parametrize("count", [1, 3])
def test_fragments_take_turns_and_the_run_verifies(count: int) -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(count) as pool:
        finals = list(pool.map(lambda rank: train(store, rank, count, 8), range(count)))
    assert len(set(finals)) == 1
    report = verify(store, "run")
    assert report.difference is None
    assert (report.rounds, report.states) == (8, 8 + 1)


def test_a_tail_that_is_only_averaged_verifies() -> None:
    store, layout = MemoryStore(), Layout.of([("w", [3000], "float32"), ("running_mean", [50], "float32")])
    settings = {"outer": RULE.to_json(), "averaged_from": 3000}
    with RoundClient(
        store, "run", 0, 1, layouts=[layout], codec_name="fp32", settings=settings, tuning=QUICK
    ) as client:
        rng = np.random.default_rng(0)
        values = rng.standard_normal(3050).astype(np.float32)
        client.join([values[:3000].tobytes(), values[3000:].tobytes()])
        momentum = np.zeros_like(values)
        for round_no in range(3):
            update = (rng.standard_normal(3050) * 0.01).astype(np.float32)
            done = client.exchange(round_no, update, weight=1.0, base=state_digest(values, momentum))
            assert done.mean is not None
            is_first = round_no == 0
            outer_step(RULE, values[:3000], momentum[:3000], done.mean[:3000], is_first=is_first)
            outer_step(TAIL_RULE, values[3000:], None, done.mean[3000:], is_first=is_first)
    report = verify(store, "run")
    assert (report.difference, report.states) == (None, 3)


def test_an_update_of_another_size_is_withdrawn_and_named() -> None:
    store, layout = MemoryStore(), Layout.of([("w", [3000], "float32")])
    quorum = Quorum(deadline_s=5.0, on_rejected="stop")
    with RoundClient(store, "run", 0, 1, layouts=[layout], tuning=QUICK, quorum=quorum) as client:
        client.join([bytes(12000)])
        with pytest.raises(CorruptUpdate, match="2999") as caught:
            client.exchange(0, np.zeros(2999, np.float32), weight=1.0)
        assert (caught.value.rank, caught.value.check) == (0, "layout")
