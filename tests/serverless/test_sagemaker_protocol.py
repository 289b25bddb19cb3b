"""What only the SageMaker facade does; `test_protocol.py` has what all facades share."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from atoll import serverless
from atoll.errors import InvalidSpec, Unsupported
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.serverless import SageMakerExecutor
from services.sagemaker.bench import HASTE, SETTINGS


@pytest.fixture
def executor(peer):
    return SageMakerExecutor.over(SageMakerTrainingExecutor(**SETTINGS, **HASTE))


def asked(store: str, fn: str, **kwargs: object) -> dict[str, object]:
    return {"rendezvous_uri": store, "trainer_module": "jobs", "trainer_fn": fn, "trainer_kwargs": kwargs}


def test_the_constructor_has_these_arguments_by_name():
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
        "store": None,
        "idempotency_key": None,
        "command": (),
    }
    assert {name: p.default for name, p in parameters.items() if name != "self"} == wanted
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "self")


def test_the_request_has_the_limit_and_the_variables_of_the_replica(executor, store, peer):
    peer.engine.admits.clear()
    handles = executor.launch_replicas(2, "jobs:echo", asked(store, "echo"), timeout=600)
    names = [handle.metadata["training_job_name"] for handle in handles]
    assert names == sorted(peer.engine.jobs)
    sent = peer.engine.jobs[names[1]].request
    assert sent["StoppingCondition"]["MaxRuntimeInSeconds"] == 600
    assert (sent["Environment"]["REPLICA_RANK"], sent["Environment"]["WORLD_SIZE"]) == ("1", "2")
    assert sent["Environment"]["RENDEZVOUS_URI"] == store
    for handle in handles:
        executor.cancel(handle)


@pytest.mark.parametrize(
    ("gpu", "instance_type"),
    [
        ("ml.p4d.24xlarge", "ml.p4d.24xlarge"),
        ("ml.c5.4xlarge", "ml.c5.4xlarge"),
        ("L4", "ml.g6.xlarge"),
        (None, "ml.m5.xlarge"),
    ],
)
def test_gpus_and_instance_types(executor, store, peer, gpu, instance_type):
    peer.engine.admits.clear()
    handles = executor.launch_replicas(1, "jobs:echo", asked(store, "echo"), gpu=gpu)
    sent = next(iter(peer.engine.jobs.values())).request
    assert sent["ResourceConfig"]["InstanceType"] == instance_type
    executor.cancel(handles[0])


def test_one_gpu_of_eight_warns_with_the_price(executor, store, peer):
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


@pytest.mark.process
def test_importing_the_protocol_needs_no_boto3():
    code = (
        "import sys, atoll.serverless; print([n for n in sys.modules if n in ('boto3', 'atoll.serverless.sagemaker')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="Nobody"):
        serverless.NobodyExecutor  # noqa: B018
