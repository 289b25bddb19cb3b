"""`atoll verify` over a run that trained, honest and tampered with."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from atoll.rounds.client import RoundClient
from atoll.rounds.context import Tuning
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.stores.file.store import FileStore

LAYOUT = Layout.of([("w", [40, 10], "float32")])
RULE = OuterRule()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Three rounds of one replica."""
    made = FileStore(tmp_path / "rounds")
    settings = {"outer": RULE.to_json()}
    with RoundClient(made, "run", 0, 1, layouts=[LAYOUT], tuning=Tuning(inline_bytes=0), settings=settings) as client:
        start = np.arange(LAYOUT.size, dtype=np.float32)
        (buffer,) = client.join([start.data.cast("B")])
        values, momentum = np.frombuffer(buffer, np.float32).copy(), np.zeros(LAYOUT.size, np.float32)
        for round_no in range(3):
            update = (values * np.float32(0.01)).astype(np.float32)
            base = state_digest(values, momentum)
            client.exchange(round_no, update, weight=1.0, base=base, out=ArrayVector([update]))
            outer_step(RULE, values, momentum, update, is_first=round_no == 0)
    return made


def test_verify_says_what_was_recomputed(cli, store):
    done = cli("verify", "run", "--store", store.uri)
    assert done.code == 0, done.stderr
    assert re.match(r"run run: rounds 0 to 2 .*\b3 updates, 3 states, ", done.stdout)
    found = cli("verify", "run", "--store", store.uri, "--json").data
    counted = ("rounds", "updates", "states", "means", "rejected", "difference")
    assert [found[name] for name in counted] == [3, 3, 3, 0, {}, None]


def test_verify_finds_an_update_that_was_changed(inside, store):
    key = RoundKeys("run").update(1, 0, 0, 0)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, data)
    done = inside("verify", "run", "--store", store.uri, "--json")
    assert done.code == 5
    assert done.error["code"] == "CorruptUpdate"
    assert done.data["rounds"] == 1
    assert done.data["difference"]


def test_verify_counts_the_updates_that_were_rejected(inside, tmp_path):
    made = FileStore(tmp_path / "rounds")

    def train(rank: int) -> None:
        with RoundClient(made, "run", rank, 2, layouts=[LAYOUT]) as client:
            client.join([np.zeros(LAYOUT.size, np.float32).tobytes()])
            for round_no in range(3):
                update = np.full(LAYOUT.size, np.nan if rank == 1 and round_no > 0 else 1.0, np.float32)
                client.exchange(round_no, update, weight=1.0)
            assert client.rejections == (2 if rank == 1 else 0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    done = inside("verify", "run", "--store", made.uri)
    assert done.code == 0, done.stderr
    assert "2 of rank 1" in done.stdout
    assert inside("verify", "run", "--store", made.uri, "--json").data["rejected"] == {"1": 2}


def test_verify_of_a_run_whose_store_recycles_says_what_is_gone_and_how_to_name_the_store(inside, tmp_path):
    """A chunk that everybody has read is let go; without `recycle=1` nothing says that this is as it should be."""
    made = FileStore(tmp_path / "rounds", recycle=True)
    scattered = Tuning(inline_bytes=0, latency_s=0.0, bandwidth_bytes_s=1.0, skip_upload=False)

    def train(rank: int) -> None:
        with RoundClient(made, "run", rank, 3, layouts=[LAYOUT], tuning=scattered) as client:
            client.join([np.zeros(LAYOUT.size, np.float32).tobytes()])
            for round_no in range(3):
                client.exchange(round_no, np.full(LAYOUT.size, 1.0, np.float32), weight=1.0)
            if rank == 0:
                client.write_snapshot(3, {}, {})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))
    done = inside("verify", "run", "--store", made.uri, "--json")
    assert done.code == 0, done.stderr
    assert done.data["trusted"] == 3
    done = inside("verify", "run", "--store", str(made.root), "--json")
    assert done.code == 5
    assert (done.data["rounds"], done.data["partial"]) == (0, 3)
    assert f"--store '{made.uri}'" in done.error["hint"]


def test_verify_of_a_run_without_rounds_says_so(finished, inside):
    done = inside.at(finished.cli)("verify", finished.ok)
    assert done.code == 5
    assert f"`{finished.ok}`" in done.stderr


def test_before_the_first_round_verify_and_trace_end_alike_and_top_shows_what_there_is(finished, inside, tmp_path):
    store = FileStore(tmp_path / "rounds")
    with RoundClient(store, "early", 0, 1, layouts=[LAYOUT], settings={}) as client:
        client.join([np.zeros(LAYOUT.size, np.float32).data.cast("B")])
        for command in ("verify", "trace"):
            done = inside(command, "early", "--store", store.uri, "--json")
            assert done.code == 5
            assert done.error["code"] == "RoundError"
            assert "`early`" in done.error["message"]
    assert inside.at(finished.cli)("top", finished.ok).code == 0
