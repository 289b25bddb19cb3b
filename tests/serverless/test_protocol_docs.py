"""The code of `docs/replica-protocol.md` runs, and its tables name what exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from atoll import serverless
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "replica-protocol.md").read_text()
SIGNATURES, TRAINER, *SCRIPTS, FACADE, SUITE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


ON_KUBERNETES = [script for script in SCRIPTS if "EKSExecutor" in script]


@pytest.mark.process
@pytest.mark.parametrize("number", range(len(SCRIPTS) - len(ON_KUBERNETES)))
def test_the_examples_run(number, peer, tmp_path, monkeypatch):
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    monkeypatch.setenv("PYTHONPATH", path)  # the peer's containers have it too: it is the code of the image
    done = run_example([script for script in SCRIPTS if script not in ON_KUBERNETES][number], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", range(len(ON_KUBERNETES)))
def test_the_examples_on_kubernetes_run(number, peer, namespace, tmp_path, monkeypatch):
    from services.kubernetes.facade_bench import add_image

    image = add_image(namespace, {"PYTHONPATH": str(tmp_path), **peer.environment()})
    namespace.make("serviceaccounts", {"metadata": {"name": "trainer"}})
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    script = ON_KUBERNETES[number].replace("registry.example/train:1", image).replace("team-a", namespace.name)
    done = run_example(script, tmp_path)
    assert done.returncode == 0, done.stderr


def run_example(script, tmp_path):
    import boto3

    boto3.client("s3").create_bucket(Bucket="bucket")
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "example.py").write_text(script)
    command = [sys.executable, "example.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_facade_of_the_page_passes_the_suite(tmp_path):
    """A part of the suite: the rest runs over the facades of the package."""
    (tmp_path / "my_replicas.py").write_text(FACADE)
    (tmp_path / "test_mine.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "p05 or p08 or p15 or p16"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "failed" in done.stdout) == (0, False), done.stdout


def test_every_facade_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.M)
    assert {name: place.partition(":")[2] for name, place in serverless.FACADES.items()} == {
        backend: facade for facade, backend in rows
    }


def test_the_signatures_are_those_of_the_protocol():
    names: dict[str, object] = {}
    exec(SIGNATURES, names)
    shown = names["ServerlessExecutor"]
    assert isinstance(shown, type)
    for name in ("launch_replicas", "poll", "stream_logs", "cancel", "collect"):
        wanted = vars(serverless.ServerlessExecutor)[name].__code__
        assert vars(shown)[name].__code__.co_varnames == wanted.co_varnames
