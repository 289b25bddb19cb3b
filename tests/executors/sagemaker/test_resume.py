"""A run that ended on this machine goes on as training jobs, and ends with the weights of one run here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import atoll
from atoll.errors import ConfigError

TRAINER = Path(__file__).parents[1] / "diloco_trainer.py"


@pytest.fixture
def bucket(peer) -> str:
    import boto3

    boto3.client("s3", aws_access_key_id="admin-key", aws_secret_access_key="-").create_bucket(Bucket="meeting")
    return "s3://meeting"


@pytest.mark.slow
def test_a_run_goes_on_from_this_machine_to_training_jobs(executor, bucket, store, peer, tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(TRAINER, code)
    monkeypatch.chdir(code)
    options = {"replicas": 2, "timeout_s": 3000}
    whole = atoll.launch("diloco_trainer:train", store=store, args={"rounds": 4, "lr": 0.01}, **options)
    early = atoll.launch("diloco_trainer:train", store=f"{bucket}/x", args={"rounds": 2, "lr": 0.01}, **options)
    for run in (whole, early):
        run.wait(360)
    wanted = [value["weights"] for value in whole.result().raise_for_failures().values]
    assert [value["weights"] for value in early.result().raise_for_failures().values] != wanted
    with pytest.raises(ConfigError) as caught:
        early.resume(on=executor(), args={"rounds": 4})
    assert caught.value.reason == "code"
    resumed = early.resume(on=executor(), args={"rounds": 4}, workspace=code)  # the same files: no change to accept
    assert (resumed.launch, resumed.executor.name) == (2, "sagemaker")
    resumed.wait(360)
    assert [value["weights"] for value in resumed.result().raise_for_failures().values] == wanted
    assert len(peer.engine.jobs) == 2
    assert atoll.attach(early.id, store=early.store.uri).executor.name == "sagemaker"
    assert atoll.attach(early.id, store=early.store.uri, launch=1).executor.name == "local"
