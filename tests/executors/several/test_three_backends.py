"""One run on this machine, a Kubernetes cluster and SageMaker: the replicas meet only in S3."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.errors import SubmitError
from atoll.executors.local.executor import LocalExecutor
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.runs import config
from atoll.testing.bench import Call, Fault
from services.kubernetes.scenario import LIMIT_S, Scenario
from services.sagemaker.bench import HASTE, SETTINGS, SageMakerBench
from services.sagemaker.server import Peer

ARGS = {"rounds": 2, "lr": 0.01}
ENTRY = "diloco_trainer:train"


@pytest.fixture
def bucket(peer: Peer) -> str:
    import boto3

    boto3.client("s3", aws_access_key_id="admin-key", aws_secret_access_key="-").create_bucket(Bucket="meeting")
    return "s3://meeting/several"


@pytest.fixture
def three_parts(scenario: Scenario, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parts of a run on the three backends, with what each of them needs to reach the bucket."""
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(Path(__file__).parents[1] / "diloco_trainer.py", code)
    monkeypatch.chdir(code)
    variables = peer.environment()
    scenario.namespace.make("secrets", {"metadata": {"name": "bucket"}, "stringData": dict(variables)})
    secrets = {name: f"kubernetes:bucket/{name}" for name in variables}
    parts = [
        (LocalExecutor(root=tmp_path / "spools"), 1),
        (scenario.executor(image="atoll-test"), 1),
        (SageMakerTrainingExecutor(**{**SETTINGS, **HASTE}), 1),
    ]
    return {"on": parts, "settings": {"kubernetes.secrets": secrets}, "workspace": ".", "args": ARGS}


@pytest.mark.slow
def test_a_run_on_three_backends_ends_with_the_weights_of_a_local_run(
    three_parts: dict[str, Any], bucket: str, store: str
) -> None:
    local = atoll.launch(ENTRY, replicas=3, on="local", store=store, args=ARGS)
    run = atoll.launch(ENTRY, **three_parts, store=bucket, timeout_s=300)
    status = run.wait(4 * LIMIT_S)
    assert [replica.backend for replica in status.replicas] == ["local", "kubernetes", "sagemaker"]
    found = run.result().raise_for_failures().values
    local.wait(4 * LIMIT_S)
    wanted = local.result().raise_for_failures().values
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert [value["first"] for value in found] == [value["first"] for value in wanted]
    for rank in range(3):
        assert list(run.logs(rank)) == [f"rank {rank}: {found[rank]['first']:.4f} -> {found[rank]['last']:.4f}"]
    again = atoll.attach(str(run.handle), store=bucket, settings=config.load().executor_settings("several"))
    assert again.spec == run.spec
    run.cancel()


@pytest.mark.slow
def test_a_part_that_cannot_be_launched_leaves_nothing(
    three_parts: dict[str, Any], bucket: str, scenario: Scenario, peer: Peer, tmp_path: Path
) -> None:
    faults = SageMakerBench.below(tmp_path, peer).need_faults(Call.CREATE)
    faults.fail(Call.CREATE, Fault.FORBIDDEN)
    with pytest.raises(SubmitError) as caught:
        atoll.launch(ENTRY, **three_parts, store=bucket, run_id="half", timeout_s=300)
    assert caught.value.left_running == ()
    assert peer.engine.jobs == {}
    assert scenario.namespace.api.get(scenario.namespace.path("jobs"))["items"] == []
    (local, _), *_ = three_parts["on"]
    assert local.strays() == []
