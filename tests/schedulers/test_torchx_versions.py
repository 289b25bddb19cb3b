"""The scheduler in TorchX as it is installed: 0.7.0 with an old Kubernetes client, and the newest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from repository import ROOT, TESTS
from services.torchx import VERSIONS, Environment, environment

pytestmark = [pytest.mark.process, pytest.mark.slow]

BUILT_IN = {
    "0.7.0": {
        "local_docker", "local_cwd", "slurm", "kubernetes", "kubernetes_mcad", "aws_batch", "aws_sagemaker",
        "gcp_batch", "ray", "lsf",
    },
    "nightly": {"local_docker", "local_cwd", "slurm", "kubernetes"},
}  # fmt: skip
FACTORIES = """
import json
from torchx.schedulers import get_default_scheduler_name, get_scheduler_factories
found = get_scheduler_factories()
made = {name: found[name]("test") for name in ("kubernetes_mcad", "appwrapper")}
print(json.dumps({
    "default": get_default_scheduler_name(),
    "names": sorted(found),
    "modules": {name: [type(each).__module__, each.backend] for name, each in made.items()},
}))
"""


@pytest.fixture(params=VERSIONS)
def torchx(request: pytest.FixtureRequest) -> Environment:
    return environment(request.param)


def schedulers(torchx: Environment, folder: Path, **variables: str) -> dict:
    result = torchx.run("-c", FACTORIES, folder=folder, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_plug_in_keeps_the_built_in_schedulers_and_the_default(torchx, tmp_path):
    found = schedulers(torchx, tmp_path)
    assert found["default"] == "local_docker"
    assert set(found["names"]) >= BUILT_IN[torchx.version] | {"kubernetes_mcad", "appwrapper"}
    module = "atoll.torchx.kubernetes_mcad_scheduler"
    assert found["modules"] == {
        "kubernetes_mcad": [module, "kubernetes_mcad"],
        "appwrapper": [module, "appwrapper"],
    }


def test_the_namespace_package_works_without_entry_points(tmp_path):
    found = schedulers(environment("nightly"), tmp_path, TORCHX_PLUGINS_SOURCE="1")
    assert set(found["names"]) == BUILT_IN["nightly"] | {"kubernetes_mcad", "appwrapper"}


def test_the_plug_in_adds_its_component_to_the_built_in_ones(torchx, tmp_path):
    result = torchx.torchx("builtins", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {"dist.ddp", "utils.echo", "atoll.diloco"} <= set(result.stdout.split())


def test_options_are_listed_in_the_form_of_torchx(torchx, tmp_path):
    result = torchx.torchx("runopts", "kubernetes_mcad", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "[namespace=NAMESPACE],[image_repo=IMAGE_REPO]" in result.stdout
    assert "priority=PRIORITY (int, None)" in result.stdout


@pytest.mark.parametrize("layout", ["jobs", "pods"])
def test_a_dry_run_prints_the_request(torchx, tmp_path, layout):
    words = ["run", "-s", "kubernetes_mcad", "-cfg", f"layout={layout}", "--workspace", "", "--dryrun"]
    result = torchx.torchx(*words, "dist.ddp", "-j", "2x1", "--script", "x.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    request = yaml.safe_load(result.stdout.partition("=== SCHEDULER REQUEST ===\n")[2])
    assert request["kind"] == "AppWrapper"
    assert request["apiVersion"].endswith("v1beta2" if layout == "jobs" else "v1beta1")


def test_requests_equal_those_of_the_original(tmp_path):
    result = environment("0.7.0").run(Path(__file__).with_name("compare_with_the_original.py"), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"different": [], "missing": [], "services": True}


def test_the_unit_tests_pass_with_torchx_0_7_0(tmp_path):
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib --noconftest", "-o", "filterwarnings="]
    words = [*options, "-o", "timeout=600", "--rootdir", str(ROOT), str(TESTS / "unit" / "torchx")]
    result = environment("0.7.0").run("-m", "pytest", "-q", *words, folder=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
