"""Four pods that meet only in S3 end with the very weights of four local processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import atoll
from services.kubernetes.scenario import LIMIT_S, Scenario

ARGS = {"rounds": 3, "lr": 0.01}
ENTRY = "diloco_trainer:train"


@pytest.mark.slow
def test_four_replicas_through_s3_end_with_the_local_executors_weights(
    scenario: Scenario, seaweed, tmp_path, monkeypatch
):
    shutil.copy(Path(__file__).parents[1] / "diloco_trainer.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    local = atoll.launch(ENTRY, replicas=4, on="local", store=scenario.store, args=ARGS)
    local.wait(4 * LIMIT_S)
    wanted = local.result().raise_for_failures().values
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    scenario.namespace.make("secrets", {"metadata": {"name": "bucket"}, "stringData": dict(seaweed.environment)})
    secrets = {name: f"kubernetes:bucket/{name}" for name in seaweed.environment}
    executor = scenario.executor(image="atoll-test")
    run = atoll.launch(
        ENTRY,
        replicas=4,
        on=executor,
        store=seaweed.uri(seaweed.new_place()),
        args=ARGS,
        secrets=secrets,
        workspace=".",
    )
    run.wait(4 * LIMIT_S)
    found = run.result().raise_for_failures().values
    assert len({value["weights"] for value in found}) == 1, "replicas do not agree"
    assert [value["weights"] for value in found] == [value["weights"] for value in wanted]
    assert [value["first"] for value in found] == [value["first"] for value in wanted]
    assert all(value["last"] < value["first"] for value in found)
    assert list(run.logs(2)) == [f"rank 2: {found[2]['first']:.4f} -> {found[2]['last']:.4f}"]
    run.cancel()
