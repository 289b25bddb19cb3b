"""Two replicas on two hosts end with the very weights of two local processes."""

from __future__ import annotations

import shutil

import pytest

import atoll
from repository import TESTS

ARGS = {"rounds": 3, "lr": 0.01}
TRAINER = TESTS / "executors" / "diloco_trainer.py"
"""All backends run it."""


@pytest.mark.slow
def test_two_replicas_on_two_hosts_end_with_the_local_executors_weights(executor, store, tmp_path, monkeypatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(TRAINER, code)
    monkeypatch.chdir(code)
    runs = [
        atoll.launch("diloco_trainer:train", replicas=2, store=f"{store}-{place}", args=ARGS, timeout_s=300, **where)
        for place, where in (("local", {"on": "local"}), ("ssh", {"on": executor(), "workspace": "."}))
    ]
    for run in runs:
        run.wait(180)
    wanted, found = (run.result().raise_for_failures().values for run in runs)
    assert len({value["weights"] for value in found}) == 1, "replicas do not agree"
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert list(runs[1].logs(1)) == [f"rank 1: {found[1]['first']:.4f} -> {found[1]['last']:.4f}"]
