"""The API server accepts every golden request as it is: no unknown field, no warning, nothing stored.

`make test-servers` runs this on the oldest release that Atoll supports, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.jobs import collection
from services.kubernetes.namespace import Namespace

pytestmark = [pytest.mark.process, pytest.mark.server]

TESTS = Path(__file__).parents[2]
GOLDEN = {
    "executor": TESTS / "golden" / "kubernetes",
    "request": TESTS / "unit" / "executors" / "kubernetes" / "golden",
    "facade": TESTS / "serverless" / "golden_eks",
}
FOREIGN = {"scheduling.x-k8s.io/v1alpha1"}
"""APIs that the cluster of the tests does not have; their objects are left out."""


def objects(folder: Path, namespace: str) -> dict[str, list[dict[str, Any]]]:
    """The Job and the other objects of each golden request, moved to another namespace."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        request = json.loads(path.read_text())["request"]
        things = [request["job"], *(each for each in request["extras"] if each["apiVersion"] not in FOREIGN)]
        found[path.stem] = [{**each, "metadata": {**each["metadata"], "namespace": namespace}} for each in things]
    return found


@pytest.mark.parametrize("folder", GOLDEN.values(), ids=GOLDEN)
def test_the_server_accepts_every_golden_request(namespace: Namespace, folder: Path) -> None:
    executor = KubernetesExecutor(kubeconfig=str(namespace.kubeconfig))
    client = executor._jobs(None).client
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    said = {}
    requests = objects(folder, namespace.name)
    assert requests
    for name, things in requests.items():
        for thing in things:
            try:
                answer = client.call(
                    "POST", collection(thing, namespace.name), name, "submit", query=query, body=thing, tries=1
                )
                said[name] = list(answer.warnings)
            except AtollError as exc:
                said[name] = [exc.message]
    assert {name: lines for name, lines in said.items() if lines} == {}
    assert namespace.api.items(namespace.path("jobs")) == []


def test_the_server_refuses_a_field_that_it_does_not_know(namespace: Namespace) -> None:
    """So that the test above can fail."""
    executor = KubernetesExecutor(kubeconfig=str(namespace.kubeconfig))
    jobs = executor._jobs(None)
    job = objects(GOLDEN["request"], namespace.name)["plain"][0]
    with pytest.raises(AtollError) as caught:
        jobs.dry_run({**job, "spec": {**job["spec"], "completion": 2}}, namespace.name)
    assert caught.value.reason == "invalid"
