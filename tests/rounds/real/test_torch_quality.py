"""Four replicas that meet every 20 steps learn a text better than one alone, and say truly what that cost."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from offspring import Nursery

COUNT, ROUNDS, STEPS = 4, 20, 20


@pytest.mark.slow
def test_four_replicas_learn_more_than_one_and_count_their_bytes_right(tmp_path: Path, nursery: Nursery) -> None:
    text = Path(argparse.__file__).read_text()
    common = {"uri": (tmp_path / "store").as_uri(), "text": text, "shares": COUNT}
    entry = "torch_replica:learn_text"
    alone = nursery.start(
        entry, **common, run_id="alone", rank=0, world_size=1, rounds=1, inner_steps=ROUNDS * STEPS
    ).wait()
    together = [
        nursery.start(entry, **common, run_id="together", rank=rank, world_size=COUNT, rounds=ROUNDS, inner_steps=STEPS)
        for rank in range(COUNT)
    ]
    found = [child.wait().value for child in together]
    assert len({one["digest"] for one in found}) == 1
    assert found[0]["loss"] < 0.97 * alone.value["loss"], (found[0]["loss"], alone.value["loss"])
    for one in found:
        assert one["counted"] == one["said"], "requests, bytes up, bytes down"
        assert one["counted"][1] < 3 * ROUNDS * one["model_bytes"]
    print(f"loss {found[0]['loss']:.3f} together, {alone.value['loss']:.3f} alone; {found[0]['counted']}")
