"""Machines of EKS: sizes, what fits, and prices."""

from __future__ import annotations

import pytest

from atoll.kube.machines import FIXED, MACHINES, fit_notes, machine, machines_with, price_notes, smallest_that_fits
from atoll.spec import Gpu


@pytest.mark.parametrize(("gpu", "name"), FIXED.items())
def test_the_fixed_machine_of_a_gpu_has_that_gpu(gpu, name):
    assert MACHINES[name].gpu == gpu


@pytest.mark.parametrize("name", ["g5.xlarge", "g4dn.xlarge"])
def test_four_cores_and_16_gib_never_fit_the_smallest_gpu_machines(name):
    assert MACHINES[name].usable_cpus < 4
    assert MACHINES[name].usable_gib < 16
    assert MACHINES[name].usable_cpus >= 3
    assert MACHINES[name].usable_gib >= 12


def test_every_machine_leaves_something_to_pods_and_less_than_it_has():
    for each in MACHINES.values():
        assert 0 < each.usable_cpus < each.cpus
        assert 0 < each.usable_gib < each.memory_gib


def test_hyperpod_names_are_the_same_machines():
    assert machine("ml.p5.48xlarge") is machine("p5.48xlarge")
    assert machine("q9.huge") is None


def test_an_a100_with_80_gb_is_an_a100_but_not_the_other_way_round():
    assert [m.name for m in machines_with(Gpu("A100"))] == ["p4d.24xlarge", "p4de.24xlarge"]
    assert [m.name for m in machines_with(Gpu("A100-80GB"))] == ["p4de.24xlarge"]
    assert [m.name for m in machines_with(Gpu("H100", 2))] == ["p5.48xlarge"]


def test_the_smallest_machine_that_holds_a_request():
    types = machines_with(Gpu("A10G"))
    assert smallest_that_fits(types, None, None).name == "g5.xlarge"
    assert smallest_that_fits(types, 6, 16).name == "g5.2xlarge"
    assert smallest_that_fits(types, 1000, None).name == "g5.xlarge"
    assert smallest_that_fits([], 1, 1) is None


def test_only_requests_that_can_never_fit_are_warned_of():
    one = [MACHINES["g5.xlarge"]]
    assert list(fit_notes(3, 12, one)) == []
    assert list(fit_notes(None, None, one)) == []
    assert list(fit_notes(99, 99, [])) == []
    assert [note.split("=")[0] for note in fit_notes(4, 16, one)] == ["warning: cpus", "warning: memory_gib"]
    assert list(fit_notes(100, 16, machines_with(Gpu("A10G")))) == []


def notes(name: str, gpu: Gpu | None, **more):
    given = {"is_sure": True, "replicas": 3, "limit_s": 7200, "spot": None, "own": {}, **more}
    return list(price_notes(MACHINES[name], gpu, **given))


def test_one_gpu_of_eight_is_warned_of_with_the_price():
    warning, price = notes("p5.48xlarge", Gpu("H100"))
    assert warning.startswith("warning: gpu=`H100:1`")
    assert "$55.04/h for 8 GPUs" in warning
    assert price.startswith("1 to 3 × p5.48xlarge")


def test_the_price_is_that_of_all_machines_until_the_limit():
    (price,) = notes("g5.xlarge", Gpu("A10G"), own={"g5.xlarge": 2.0})
    assert "3 × g5.xlarge" in price
    assert "$2.00/h each, at most $6.00/h together and $12.00 at the limit of 2 h (your own price)" in price


def test_an_unknown_price_is_named_as_such_and_spot_is_mentioned():
    spot, price = notes("p5e.48xlarge", Gpu("H200", 8), spot=True)
    assert spot.startswith("spot:")
    assert "price unknown" in price
