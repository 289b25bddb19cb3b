"""Four calls that meet only in S3 end with the very weights of four local processes."""

from __future__ import annotations

import os
import shutil

import pytest

import atoll
from repository import TESTS

ARGS = {"rounds": 3, "lr": 0.01}
TRAINER = TESTS / "executors" / "diloco_trainer.py"


@pytest.fixture
def bucket(peer, modal_peer) -> str:
    """A bucket, and a secret of Modal with keys for it: containers have no other credentials."""
    import boto3

    boto3.client("s3").create_bucket(Bucket="meeting-of-calls")
    keys = {name: value for name, value in peer.environment().items() if name.startswith("AWS_")}
    modal_peer.engine.secrets["bucket-keys"] = {**keys, "AWS_ACCESS_KEY_ID": "call-key"}
    return "s3://meeting-of-calls"


@pytest.mark.slow
def test_four_replicas_through_s3_end_with_the_local_executors_weights(
    executor, bucket, store, peer, modal_peer, tmp_path, monkeypatch
):
    shutil.copy(TRAINER, tmp_path)
    monkeypatch.chdir(tmp_path)
    local = atoll.launch("diloco_trainer:train", replicas=4, on="local", store=store, args=ARGS)
    local.wait(180)
    wanted = local.result().raise_for_failures().values
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # the image has the trainer
    run = atoll.launch(
        "diloco_trainer:train",
        replicas=4,
        on=executor(secrets=["bucket-keys"]),
        store=f"{bucket}/diloco",
        args=ARGS,
        timeout_s=300,
    )
    run.wait(240)
    found = run.result().raise_for_failures().values
    assert len({value["weights"] for value in found}) == 1, "replicas do not agree"
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert [value["first"] for value in found] == [value["first"] for value in wanted]
    assert list(run.logs(2)) == [f"rank 2: {found[2]['first']:.4f} -> {found[2]['last']:.4f}"]
    assert len(modal_peer.engine.calls) == 4
    assert "s3:PutObject" in peer.callers["call-key"], "the replicas did not meet in S3"
