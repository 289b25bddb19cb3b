"""Flavors and prices from the hardware list of the service."""

from __future__ import annotations

import json

import pytest

from atoll.cli.main import main
from atoll.context import RunContext
from atoll.errors import Unsupported
from atoll.executors.base import Pricer
from atoll.executors.hf_jobs.machines import Machine, chosen_machine
from atoll.spec import Gpu, Placement

MACHINES = [
    Machine("cpu-basic", None, 0, 0, 0.01),
    Machine("a10g-large", "A10G", 1, 24, 1.5),
    Machine("a10g-small", "A10G", 1, 24, 1.0),
    Machine("a100-large", "A100", 1, 80, 2.5),
    Machine("h200x8", "H200", 8, 141, 40.0),
]


@pytest.mark.parametrize(
    ("gpu", "flavor", "wanted"),
    [
        (None, None, "cpu-basic"),
        (None, "h200x8", "h200x8"),
        ("A10G", None, "a10g-small"),
        ("A10G", "a10g-large", "a10g-large"),
        ("any", None, "a10g-small"),
        ("any:2", None, "h200x8"),
        ("H200:4", None, "h200x8"),
        ("A100-80GB", None, "a100-large"),
    ],
)
def test_the_cheapest_machine_that_fits(gpu, flavor, wanted):
    found = chosen_machine(Gpu.parse(gpu) if gpu else None, flavor, MACHINES)
    assert isinstance(found, Machine)
    assert found.flavor == wanted


@pytest.mark.parametrize(
    ("gpu", "flavor", "field", "meant"),
    [
        (None, "a10g-smal", "flavor", "a10g-small"),
        ("H200", "a10g-small", "flavor", "H200"),
        ("A10G:4", None, "gpu", "A10G:1"),
        ("T4", None, "gpu", "H200:8"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_suggestion(gpu, flavor, field, meant):
    found = chosen_machine(Gpu.parse(gpu) if gpu else None, flavor, MACHINES)
    assert isinstance(found, str)
    assert found.startswith(f"{field}=")
    assert meant in found


def test_a_gpu_is_looked_up_and_a_plan_without_one_asks_nobody(hub, executor):
    context = RunContext("r", "file:///x")
    assert executor().plan(context, Placement()).request["jobs"][0]["flavor"] == "cpu-basic"
    assert executor(flavor="new-flavor").plan(context, Placement()).request["jobs"][0]["flavor"] == "new-flavor"
    assert sum(hub.calls.values()) == 0
    made = executor()
    assert made.plan(context, Placement(gpu="A100")).request["jobs"][0]["flavor"] == "a100-large"
    with pytest.raises(Unsupported) as caught:
        made.plan(context, Placement(gpu="MI300X", cpus=2))
    assert caught.value.fields == ("cpus", "gpu")
    assert hub.calls == {"hardware": 1}


def test_the_price_is_the_last_note(hub, executor):
    made = executor()
    assert isinstance(made, Pricer)
    plan = made.plan(RunContext("r", "file:///x"), Placement(replicas=4, gpu="H200:2", timeout_s=7200))
    notes = made.prices(plan)
    assert notes[0].startswith("warning: gpu=`H200:2`")
    assert "$160.01/h together" in notes[-1]
    assert "$320.02" in notes[-1]


def test_plan_shows_the_price_and_goes_on_without_one(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["namespace=tester", "image=team/train:1", "flavor=a10g-small", "store_is_open=true"]
    words = [word for setting in settings for word in ("--setting", setting)]
    command = ["plan", "train:main", "--on", "hf-jobs", "--store", "s3://bucket/x", "--replicas", "4", *words]
    assert main(command) == 0
    assert "$4.01/h together" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert "$4.01/h together" in json.loads(capsys.readouterr().out)["data"]["plan"]["notes"][-1]
