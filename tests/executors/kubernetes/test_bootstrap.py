"""`bootstrap = "pip"` on the real control plane: an image without Atoll gets it from the ConfigMap of the run.

The image is a virtual environment with pip and the dependencies of Atoll, and without Atoll. No test needs a network.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import atoll
from atoll import journal
from atoll.context import TOO_OLD
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.runs.prepare import prepare
from atoll.status import Reason, ReplicaState

pytestmark = [pytest.mark.process, pytest.mark.server]

LIMIT_S = 120.0
NEEDED = ("pip", "click", "rich", "markdown-it-py", "mdurl", "pygments")


def environment_with(folder: Path, names: tuple[str, ...]) -> Path:
    """A virtual environment with these packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        found = distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return folder


@pytest.fixture
def image(namespace, tmp_path):
    """Makes an image with these packages and no others; returns its name."""

    def make(*names: str) -> str:
        folder = environment_with(tmp_path / "image", names)
        name = f"{namespace.name}/image"
        values = {"path": [str(folder / "bin")], "env": {"PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}}
        namespace.cluster.kubelet("add_image", name=name, values=values)
        return name

    return make


def started(namespace, store, image):
    executor = KubernetesExecutor(
        kubeconfig=str(namespace.kubeconfig), image=image, bootstrap="pip", store_is_mounted=True
    )
    return prepare(
        "atoll.testing.contract_jobs:say",
        on=executor,
        store=store,
        args={"lines": ["a"]},
    ).submit()


def test_an_image_without_atoll_runs_the_installed_version(namespace, store, image):
    run = started(namespace, store, image(*NEEDED))
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert list(run.logs(0)) == ["a"]
    (found,) = [
        each for each in namespace.api.items(namespace.path("configmaps")) if "wheel" in each["metadata"]["name"]
    ]
    assert list(found["binaryData"]) == ["wheel"]
    assert [owner["kind"] for owner in found["metadata"]["ownerReferences"]] == ["Job"]
    pods = namespace.pods(run.handle.native_id)
    assert f"atoll-{atoll.__version__}" in str(pods[0]["spec"]["containers"][0]["command"])


@pytest.mark.parametrize("names", [("pip", "click"), ("click",)], ids=["no dependency", "no pip"])
def test_an_installation_that_fails_is_a_failure_of_the_image(namespace, store, image, names):
    run = started(namespace, store, image(*names))
    (replica,) = run.wait(LIMIT_S).replicas
    assert (replica.state, replica.reason, replica.exit_code) == (ReplicaState.FAILED, Reason.IMAGE, 79)
    assert "pip" in replica.message


def test_an_image_with_an_older_atoll_is_named_so(namespace, store, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "999.0.0")
    executor = KubernetesExecutor(kubeconfig=str(namespace.kubeconfig), image="atoll-test", store_is_mounted=True)
    run = prepare("atoll.testing.contract_jobs:say", on=executor, store=store, max_restarts=3).submit()
    assert run.wait(LIMIT_S).replicas[0].reason is Reason.IMAGE
    (replica,) = executor.status(run.handle).replicas
    assert (replica.state, replica.reason, replica.exit_code) == (ReplicaState.FAILED, Reason.IMAGE, TOO_OLD)
    assert "999.0.0" in replica.message
