"""GPUs and machines: never another GPU than asked, and the price of a machine with more of them."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import Unsupported
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.machines import GPUS, MACHINES, Machine, chosen_machine, has_local_disks
from atoll.executors.sagemaker.prices import DATE, PRICES
from atoll.gpu import KNOWN, Gpu
from atoll.spec import Placement
from services.sagemaker.bench import SETTINGS
from services.sagemaker.validation import service_model

CONTEXT = RunContext("exp", "s3://bucket/exp")


def chosen(gpu: str | None, instance_type: str = "ml.g5.2xlarge") -> Machine | str:
    return chosen_machine(
        Gpu.parse(gpu) if gpu else None, instance_type=instance_type, cpu_instance_type="ml.m5.xlarge"
    )


def test_every_machine_of_the_tables_is_one_that_sagemaker_has():
    there = set(service_model().shape_for("TrainingInstanceType").enum)
    assert set(MACHINES) <= there
    assert set(PRICES) <= there
    assert set(KNOWN) >= GPUS


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (None, "ml.m5.xlarge"),
        ("any", "ml.g5.2xlarge"),
        ("A10G", "ml.g5.2xlarge"),
        ("A10G:4", "ml.g5.12xlarge"),
        ("A10G:2", "ml.g5.12xlarge"),
        ("A100", "ml.p4d.24xlarge"),
        ("A100-80GB:8", "ml.p4de.24xlarge"),
        ("H100", "ml.p5.4xlarge"),
        ("H100:8", "ml.p5.48xlarge"),
        ("H200", "ml.p5en.48xlarge"),
        ("B200", "ml.p6-b200.48xlarge"),
        ("L40S", "ml.g6e.xlarge"),
        ("L4", "ml.g6.xlarge"),
        ("T4:4", "ml.g4dn.12xlarge"),
        ("V100", "ml.p3.2xlarge"),
    ],
)
def test_a_gpu_gets_the_smallest_machine_that_has_it(gpu, name):
    machine = chosen(gpu)
    assert isinstance(machine, Machine), machine
    assert machine.name == name


def test_what_is_not_there_is_refused_and_never_replaced():
    assert "A30" in str(chosen("A30"))
    assert "at most 8" in str(chosen("H100:16"))
    assert "has 1 × A10G" in str(chosen("any:2"))
    assert "looks like" in str(chosen("any", "g5.2xlarge"))


def test_a_machine_we_do_not_know_is_taken_at_its_word():
    assert chosen("any:3", "ml.q9.huge") == Machine("ml.q9.huge", None, 0)


def test_one_gpu_on_a_machine_of_eight_warns_with_the_price():
    notes = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="A100", timeout_s=7200)).notes
    assert any(n.startswith("warning: gpu=`A100:1`") and "8 × A100" in n and "$25.25/h" in n for n in notes), notes
    notes = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="A100:8")).notes
    assert not any(n.startswith("warning") for n in notes)


def test_the_plan_says_what_it_costs_and_how_old_that_is():
    plan = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(replicas=4, timeout_s=7200, gpu="L4"))
    assert any("4 × ml.g6.xlarge (1 × L4): $1.13/h each, $4.51/h together, at most $9.02" in n for n in plan.notes)
    assert any(DATE in note for note in plan.notes)


def test_a_price_of_ones_own_goes_first_and_no_price_is_said():
    own = SageMakerTrainingExecutor(**SETTINGS, prices={"ml.m5.xlarge": 1.0}).plan(CONTEXT, Placement(timeout_s=3600))
    assert any("$1.00/h each" in note and "your own price" in note for note in own.notes)
    none = SageMakerTrainingExecutor(**{**SETTINGS, "cpu_instance_type": "ml.r5.large"}).plan(CONTEXT, Placement())
    assert any("price unknown" in note for note in none.notes)


def test_notes_tell_what_a_person_may_not_expect():
    settings = {**SETTINGS, "keep_alive_s": 60}
    notes = SageMakerTrainingExecutor(**settings).plan(RunContext("e", "file:///x"), Placement(gpu="any")).notes
    assert any("warm pool" in note for note in notes)
    assert any("volume_size_gb" in note for note in notes)
    assert any("shared" in note for note in notes)
    assert not has_local_disks("ml.m5.xlarge")


def test_an_unknown_gpu_is_refused_with_what_there_is():
    with pytest.raises(Unsupported, match="SageMaker has A100"):
        SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="MI300X"))
