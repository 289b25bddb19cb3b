"""`atoll deploy modal` and `atoll doctor modal`."""

from __future__ import annotations

import pytest

import atoll
from atoll.errors import ConfigError, InvalidSpec
from atoll.executors.base import Check, Deployer, Diagnoser
from atoll.executors.modal import container
from services.modal.deploy_rpcs import DeployRpcs
from services.modal.server import FUNCTION


def found(executor) -> dict[str, Check]:
    return {check.name: check for check in executor.diagnose()}


def test_all_is_well(modal_peer, executor):
    modal_peer.engine.secrets["bucket-keys"] = {}
    assert isinstance(executor(), Diagnoser)
    checks = found(executor(secrets=["bucket-keys"]))
    assert list(checks) == ["token", "environment", "secret bucket-keys", "function", "image"]
    assert all(check.ok for check in checks.values()), checks
    assert atoll.__version__ in checks["image"].message


def test_each_thing_that_is_wrong_has_a_hint(modal_peer, executor):
    checks = found(executor(secrets=["no-such-secret"], app="elsewhere"))
    assert {name for name, check in checks.items() if not check.ok} == {"secret no-such-secret", "function"}
    assert "atoll deploy modal" in checks["function"].hint
    assert not found(executor(image="x", packages=["torch"]))["settings"].ok


def test_an_environment_that_the_workspace_lacks_is_told(modal_peer, executor, monkeypatch):
    checks = found(executor(environment="mian"))
    assert [(name, check.ok) for name, check in checks.items()] == [("token", True), ("environment", False)]
    assert "modal environment list" in checks["environment"].hint
    monkeypatch.delattr(DeployRpcs, "EnvironmentGetOrCreate")
    assert all(check.ok for check in executor().diagnose()), "a service that does not tell is no failure"


def test_an_image_that_does_not_answer_like_atoll_is_told(modal_peer, executor):
    modal_peer.engine.find("atoll", FUNCTION).module = "json"
    assert not found(executor())["image"].ok


def test_the_probe_tells_the_version():
    answer = container.run_replica({"probe": True}, None)
    assert (answer["state"], answer["atoll"]) == ("probe", atoll.__version__)


def test_deploy_leaves_a_function_that_launches_find(modal_peer, executor):
    modal_peer.engine.functions.clear()
    modal_peer.engine.secrets["bucket-keys"] = {}
    assert not found(executor())["function"].ok
    made = executor(packages=["torch"], secrets=["bucket-keys"], region="us-east")
    assert isinstance(made, Deployer)
    done = made.deploy()
    assert (done.name, done.version) == ("atoll", atoll.__version__)
    assert done.url.startswith("https://")
    deployed = modal_peer.engine.find("atoll", "replica")
    assert (deployed.module, deployed.timeout_s) == ("atoll.executors.modal.app", 86_400)
    assert any("torch" in line for image in modal_peer.engine.images for line in image)
    assert modal_peer.engine.tag == f"atoll-{atoll.__version__}"
    assert found(executor())["image"].ok


def test_deploy_takes_the_users_image(modal_peer, executor):
    executor(image="registry.invalid/team/train:1").deploy()
    assert any("registry.invalid/team/train:1" in line for image in modal_peer.engine.images for line in image)


def test_a_deployment_that_cannot_work_is_refused(modal_peer, executor):
    with pytest.raises(InvalidSpec) as caught:
        executor(image="x", packages=["torch"]).deploy()
    assert caught.value.fields == ("packages",)
    with pytest.raises(ConfigError) as missing:
        executor(secrets=["no-such-secret"]).deploy()
    assert missing.value.reason == "not_found"
    assert modal_peer.engine.tag == "", "nothing was published"
