"""Four jobs that meet only in a real S3 server end with the very weights of four local processes."""

from __future__ import annotations

import os
import shutil

import pytest

import atoll
from repository import TESTS

ARGS = {"rounds": 3, "lr": 0.01}
TRAINER = TESTS / "executors" / "diloco_trainer.py"
"""All backends run it."""


@pytest.mark.slow
def test_four_replicas_through_s3_end_with_the_local_executors_weights(
    executor, seaweed, store, hub, tmp_path, monkeypatch
):
    shutil.copy(TRAINER, tmp_path)
    monkeypatch.chdir(tmp_path)
    local = atoll.launch("diloco_trainer:train", replicas=4, on="local", store=store, args=ARGS)
    local.wait(180)
    wanted = local.result().raise_for_failures().values
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # the image has the trainer
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    hub_executor = executor(secrets=list(seaweed.environment))
    bucket = seaweed.uri(seaweed.new_place())
    run = atoll.launch("diloco_trainer:train", replicas=4, on=hub_executor, store=bucket, args=ARGS, timeout_s=300)
    run.wait(180)
    found = run.result().raise_for_failures().values
    assert len({value["weights"] for value in found}) == 1, "replicas do not agree"
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert [value["first"] for value in found] == [value["first"] for value in wanted]
    assert list(run.logs(2)) == [f"rank 2: {found[2]['first']:.4f} -> {found[2]['last']:.4f}"]
    assert len(hub.jobs) == 4
    assert "atoll-secret" not in str([job.info() for job in hub.jobs.values()])
