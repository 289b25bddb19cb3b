"""GPUs and machines: never another GPU than asked, and the price of a machine with more of them."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import Unsupported
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.machines import DATE, GPUS, MACHINES, PRICES, Machine, chosen_machine, has_local_disks
from atoll.spec import KNOWN, Gpu, Placement
from services.sagemaker.bench import SETTINGS
from services.sagemaker.validation import service_model

CONTEXT = RunContext("exp", "s3://bucket/exp")


def chosen(gpu: str | None, instance_type: str | None = None, cpu_instance_type: str | None = None) -> Machine | str:
    return chosen_machine(
        Gpu.parse(gpu) if gpu else None, instance_type=instance_type, cpu_instance_type=cpu_instance_type
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
    refused = [chosen("A30"), chosen("H100:16"), chosen("any:2"), chosen("any", "g5.2xlarge")]
    assert all(isinstance(problem, str) for problem in refused)
    a30, too_many, one_only, no_such_type = map(str, refused)
    assert a30.startswith("gpu=`A30:1`")
    assert too_many.startswith("gpu=`H100:16`")
    assert one_only.startswith("gpu=`any:2`")
    assert "1 × A10G" in one_only
    assert no_such_type.startswith("instance_type=`g5.2xlarge`")
    assert "`ml.g5.2xlarge`" in no_such_type


def test_a_machine_we_do_not_know_is_taken_at_its_word():
    assert chosen("any:3", "ml.q9.huge") == Machine("ml.q9.huge", None, 0)


def test_one_gpu_on_a_machine_of_eight_warns_with_the_price():
    notes = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="A100", timeout_s=7200)).notes
    assert any(n.startswith("warning: gpu=`A100:1`") and "8 × A100" in n and "$25.25/h" in n for n in notes), notes
    notes = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="A100:8")).notes
    assert not any(n.startswith("warning") for n in notes)


def test_the_plan_says_what_it_costs_and_how_old_that_is():
    plan = SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(replicas=4, timeout_s=7200, gpu="L4"))
    (cost,) = [note for note in plan.notes if note.startswith("4 × ml.g6.xlarge (1 × L4)")]
    for value in ("$1.13/h", "$4.51/h", "$9.02", DATE):
        assert value in cost


def test_a_price_of_ones_own_goes_first_and_no_price_is_said():
    own = SageMakerTrainingExecutor(**SETTINGS, prices={"ml.m5.xlarge": 1.0}).plan(CONTEXT, Placement(timeout_s=3600))
    (cost,) = [note for note in own.notes if "$1.00/h" in note]
    assert DATE not in cost
    none = SageMakerTrainingExecutor(**{**SETTINGS, "cpu_instance_type": "ml.r5.large"}).plan(CONTEXT, Placement())
    (cost,) = [note for note in none.notes if "ml.r5.large" in note]
    assert "$" not in cost
    assert "`prices`" in cost


def test_notes_tell_what_a_person_may_not_expect():
    settings = {**SETTINGS, "keep_alive_s": 60}
    notes = SageMakerTrainingExecutor(**settings).plan(CONTEXT, Placement(gpu="any")).notes
    for value in ("60 s", "volume_size_gb"):
        assert sum(value in note for note in notes) == 1, value
    assert not has_local_disks("ml.m5.xlarge")


def test_an_unknown_gpu_is_refused_with_what_there_is():
    with pytest.raises(Unsupported, match=r"gpu=`MI300X:1`.*A100.*H100"):
        SageMakerTrainingExecutor(**SETTINGS).plan(CONTEXT, Placement(gpu="MI300X"))
