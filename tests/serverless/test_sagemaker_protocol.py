"""The five-method protocol on SageMaker, over real boto3 and a peer."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import serverless
from atoll.errors import ConfigError, InvalidSpec, Unsupported
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.serverless import ReplicaHandle, SageMakerExecutor, ServerlessExecutor
from services.sagemaker.bench import HASTE, SETTINGS

LIMIT_S = 60.0


@pytest.fixture
def executor(peer):
    return SageMakerExecutor.over(SageMakerTrainingExecutor(**SETTINGS, **HASTE))


@pytest.fixture
def image(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The container's image has the test entry points."""
    monkeypatch.setenv("PYTHONPATH", str(jobs), prepend=os.pathsep)
    return jobs


def asked(store: str, fn: str, **kwargs: object) -> dict[str, object]:
    return {"rendezvous_uri": store, "trainer_module": "jobs", "trainer_fn": fn, "trainer_kwargs": kwargs}


def test_it_is_the_protocol_to_the_letter(executor):
    assert isinstance(executor, ServerlessExecutor)
    parameters = inspect.signature(SageMakerExecutor.__init__).parameters
    wanted = {
        "role_arn": inspect.Parameter.empty,
        "image_uri": inspect.Parameter.empty,
        "output_s3_path": inspect.Parameter.empty,
        "instance_type": "ml.g5.2xlarge",
        "cpu_instance_type": "ml.m5.xlarge",
        "volume_size_gb": 100,
        "run_id": None,
        "region": None,
        "sagemaker_client": None,
        "logs_client": None,
        "store_is_mounted": False,
    }
    assert {name: p.default for name, p in parameters.items() if name != "self"} == wanted
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "self")
    assert executor.backend_name == "sagemaker"
    assert executor.supports_inter_replica_network is False


def test_replicas_run_and_results_and_native_ids_come_back(executor, image, store, peer):
    handles = executor.launch_replicas(2, "jobs:echo", asked(store, "echo", x=[1, {"y": "é"}]), timeout=600)
    assert [handle.rank for handle in handles] == [0, 1]
    rows = executor.collect(handles, timeout=LIMIT_S)
    assert [(row["rank"], row["status"], row["exit_code"], row["error"]) for row in rows] == [
        (0, "succeeded", 0, None),
        (1, "succeeded", 0, None),
    ]
    assert [row["result"]["args"] for row in rows] == [{"x": [1, {"y": "é"}]}] * 2
    assert [row["training_job_name"] for row in rows] == sorted(peer.engine.jobs)
    assert all(row["billable_seconds"] >= 1 for row in rows)
    assert executor.stream_logs(handles[1]) == "rank 1 of 2\n"
    sent = peer.engine.jobs[rows[1]["training_job_name"]].request
    assert sent["StoppingCondition"]["MaxRuntimeInSeconds"] == 600
    assert (sent["Environment"]["REPLICA_RANK"], sent["Environment"]["WORLD_SIZE"]) == ("1", "2")
    assert sent["Environment"]["RENDEZVOUS_URI"] == store


def test_with_the_plain_constructor_and_clients_of_ones_own(image, store, peer):
    import boto3

    clients = {"sagemaker_client": boto3.client("sagemaker"), "logs_client": boto3.client("logs")}
    plain = SageMakerExecutor(
        **{n: v for n, v in SETTINGS.items() if n != "region"}, **clients, run_id="mine", store_is_mounted=True
    )
    handles = plain.launch_replicas(1, "atoll.replica", asked(store, "echo"))
    assert handles[0].metadata["run_id"] == "mine"
    assert [row["status"] for row in plain.collect(handles, timeout=LIMIT_S)] == ["succeeded"]


def test_handles_survive_json_and_another_process(executor, image, store):
    handles = executor.launch_replicas(2, "jobs.hang", asked(store, "hang"))
    text = json.dumps([dataclasses.asdict(handle) for handle in handles])
    code = (
        "import json, sys\nfrom atoll.serverless import *\n"
        "handles = [ReplicaHandle(**h) for h in json.loads(sys.argv[1])]\n"
        "there = SageMakerExecutor(**json.loads(sys.argv[2]))\n"
        "there.cancel(handles[0]); there.cancel(handles[1])\n"
        "print([there.poll(h) for h in handles])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, text, json.dumps({**SETTINGS, "store_is_mounted": True})],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['cancelled', 'cancelled']\n"
    assert [row["status"] for row in executor.collect(handles, timeout=LIMIT_S)] == ["cancelled", "cancelled"]


def test_failures_carry_exit_code_and_traceback(executor, image, store):
    (row,) = executor.collect(executor.launch_replicas(1, "jobs:fail", asked(store, "fail")), timeout=LIMIT_S)
    assert (row["status"], row["exit_code"]) == ("failed", 1)
    assert "ValueError: boom" in row["error"]


def test_what_is_missing_is_said_at_once(executor):
    with pytest.raises(ConfigError) as caught:
        executor.launch_replicas(1, "jobs:echo", {"lr": 1})
    for name in ("`rendezvous_uri`", "`trainer_module`", "`trainer_fn`", "`lr`"):
        assert name in caught.value.message
    with pytest.raises(ConfigError, match="rendezvous_uri"):
        executor.launch_replicas(1, "jobs:echo", None)


def test_an_entry_point_that_says_otherwise_is_refused_and_not_dropped(executor, store):
    with pytest.raises(ConfigError, match=r"`jobs:other`.*`jobs:echo`"):
        executor.launch_replicas(1, "jobs:other", asked(store, "echo"))
    with pytest.raises(ConfigError) as caught:
        executor.launch_replicas(1, lambda: 1, asked(store, "echo"))
    assert caught.value.reason == "callable"


@pytest.mark.parametrize(
    ("gpu", "instance_type"),
    [
        ("ml.p4d.24xlarge", "ml.p4d.24xlarge"),
        ("ml.c5.4xlarge", "ml.c5.4xlarge"),
        ("L4", "ml.g6.xlarge"),
        (None, "ml.m5.xlarge"),
    ],
)
def test_gpus_and_instance_types(executor, image, store, peer, gpu, instance_type):
    peer.engine.admits.clear()
    handles = executor.launch_replicas(1, "jobs:echo", asked(store, "echo"), gpu=gpu)
    sent = next(iter(peer.engine.jobs.values())).request
    assert sent["ResourceConfig"]["InstanceType"] == instance_type
    executor.cancel(handles[0])


def test_one_gpu_of_eight_warns_with_the_price(executor, image, store, peer):
    peer.engine.admits.clear()
    with pytest.warns(UserWarning, match=r"8 × A100.*\$25\.25/h"):
        handles = executor.launch_replicas(1, "jobs:echo", asked(store, "echo"), gpu="A100")
    executor.cancel(handles[0])


def test_unknown_gpus_are_refused(executor, store, peer):
    with pytest.raises(InvalidSpec, match="A1000"):
        executor.launch_replicas(1, "jobs:echo", asked(store, "echo"), gpu="A1000")
    with pytest.raises(Unsupported, match="MI300X"):
        executor.launch_replicas(1, "jobs:echo", asked(store, "echo"), gpu="MI300X")
    assert peer.engine.jobs == {}


def test_a_foreign_handle_is_refused(executor):
    with pytest.raises(ConfigError, match="`local`"):
        executor.poll(ReplicaHandle(0, "local", {}))


@pytest.mark.process
def test_importing_the_protocol_needs_no_boto3():
    code = (
        "import sys, atoll.serverless; print([n for n in sys.modules if n in ('boto3', 'atoll.serverless.sagemaker')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="Nobody"):
        serverless.NobodyExecutor  # noqa: B018
