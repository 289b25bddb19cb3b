"""Four training jobs that meet only in S3 end with the very weights of four local processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import atoll

ARGS = {"rounds": 3, "lr": 0.01}


@pytest.fixture
def bucket(peer) -> str:
    import boto3

    boto3.client("s3", aws_access_key_id="admin-key", aws_secret_access_key="-").create_bucket(Bucket="meeting")
    return "s3://meeting"


@pytest.mark.slow
def test_four_replicas_through_s3_end_with_the_local_executors_weights(executor, bucket, store, peer, monkeypatch):
    here = Path(__file__).parents[1]
    monkeypatch.chdir(here)
    local = atoll.launch("diloco_trainer:train", replicas=4, on="local", store=store, args=ARGS)
    local.wait(360)
    wanted = local.result().raise_for_failures().values
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(here), prepend=os.pathsep)  # the image has the trainer
    run = atoll.launch(
        "diloco_trainer:train", replicas=4, on=executor(), store=f"{bucket}/diloco", args=ARGS, timeout_s=300
    )
    run.wait(360)
    found = run.result().raise_for_failures().values
    assert len({value["weights"] for value in found}) == 1, "replicas do not agree"
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert [value["first"] for value in found] == [value["first"] for value in wanted]
    assert all(value["last"] < value["first"] for value in found)
    assert list(run.logs(2)) == [f"rank 2: {found[2]['first']:.4f} -> {found[2]['last']:.4f}"]
    assert len(peer.engine.jobs) == 4
    assert "s3:PutObject" in peer.callers["role-key"], "the replicas did not meet in S3"
