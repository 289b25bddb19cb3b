"""`atoll export`: what it writes, what it says, and what it refuses before it writes anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.rounds.client import RoundClient
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.stores.file.store import FileStore

LAYOUT = Layout.of([("w", [40, 10], "float32"), ("b", [10], "float32")])
RULE = OuterRule()


@pytest.fixture
def trained(tmp_path: Path) -> tuple[FileStore, np.ndarray]:
    """Three rounds of one replica, and the state after them."""
    made = FileStore(tmp_path / "rounds")
    settings = {"outer": RULE.to_json(), "frozen_parameters": "0" * 32}
    with RoundClient(made, "run", 0, 1, layouts=[LAYOUT], settings=settings) as client:
        start = np.arange(LAYOUT.size, dtype=np.float32)
        client.join([start[:400].tobytes(), start[400:].tobytes()])
        values, momentum = start.copy(), np.zeros(LAYOUT.size, np.float32)
        for round_no in range(3):
            update = (values * np.float32(0.01)).astype(np.float32)
            base = state_digest(values, momentum)
            client.exchange(round_no, update, weight=1.0, base=base, out=ArrayVector([update]))
            outer_step(RULE, values, momentum, update, is_first=round_no == 0)
    return made, values


def test_export_writes_the_agreed_weights_and_says_that_frozen_ones_are_missing(inside, trained):
    store, values = trained
    done = inside("export", "run", "model.safetensors", "--store", store.uri, "--json")
    assert done.code == 0, done.stderr
    assert done.data["round"] == 3
    assert done.data["tensors"] == 2
    assert done.data["bytes"] == LAYOUT.size * 4
    assert done.data["lacks_frozen"] is True
    assert "--like" in inside("export", "run", "model.safetensors", "--force", "--store", store.uri).stderr
    found = load_file(inside.folder / "model.safetensors")
    assert found["w"].tobytes() + found["b"].tobytes() == values.tobytes()
    assert found["w"].shape == (40, 10)


def test_export_of_one_round_and_of_one_that_is_not_there(inside, trained):
    store, _ = trained
    assert inside("export", "run", "zero.safetensors", "--round", 0, "--store", store.uri).code == 0
    assert load_file(inside.folder / "zero.safetensors")["b"].tolist() == list(range(400, 410))
    done = inside("export", "run", "far.safetensors", "--round", 4, "--store", store.uri, "--json")
    assert done.code == 5
    assert done.error["code"] == "RoundError"
    assert "0-3" in done.error["hint"]
    assert not (inside.folder / "far.safetensors").exists()


def test_export_refuses_before_it_reads_anything(inside, trained):
    store, _ = trained
    (inside.folder / "here").write_text("mine")
    (inside.folder / "folder").mkdir()
    for words in (["here"], ["folder"], ["out", "--like", "nowhere"], ["here", "--like", "folder", "--force"]):
        done = inside("export", "no-such-run", *words, "--store", store.uri)
        assert done.code == 2, words
    assert (inside.folder / "here").read_text() == "mine"
    assert inside("export", "run", "here", "--force", "--store", store.uri).code == 0
    assert load_file(inside.folder / "here")["b"].shape == (10,)


def test_export_of_a_run_without_a_round(inside, trained):
    store, _ = trained
    store.delete(RoundKeys("run").commit(0))
    for key in list(store.list(RoundKeys("run").commits_prefix())):
        store.delete(key)
    done = inside("export", "run", "model.safetensors", "--store", store.uri, "--json")
    assert done.code == 5
    assert done.error["code"] == "RoundError"
    assert inside("export", "no-such-run", "model.safetensors", "--store", store.uri).code == 3
