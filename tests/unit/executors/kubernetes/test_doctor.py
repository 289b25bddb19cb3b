"""What doctor says about a cluster that does not answer, and which clients an executor accepts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atoll.errors import InvalidSpec
from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.executors.kubernetes.executor import KubernetesExecutor


class DeadPool:
    """A connection pool without a server behind it."""

    def __init__(self) -> None:
        self.requests = 0

    def request(self, *_: object, **__: object) -> object:
        self.requests += 1
        raise ConnectionRefusedError("no server")


@pytest.mark.parametrize("executor", [KubernetesExecutor, AppWrapperExecutor])
def test_a_given_client_and_the_name_of_a_cluster_are_refused_together(executor):
    configuration = SimpleNamespace(host="https://cluster.invalid", auth_settings=dict)
    client = SimpleNamespace(configuration=configuration, rest_client=SimpleNamespace(pool_manager=DeadPool()))
    with pytest.raises(InvalidSpec) as caught:
        executor(api_client=client, context="prod", kubeconfig="/a")
    assert [problem.partition("=")[0] for problem in caught.value.problems] == ["context", "kubeconfig"]


def test_doctor_asks_a_dead_cluster_only_a_few_times_and_has_one_finding():
    pool = DeadPool()
    configuration = SimpleNamespace(host="https://cluster.invalid", auth_settings=dict)
    client = SimpleNamespace(configuration=configuration, rest_client=SimpleNamespace(pool_manager=pool))
    findings = KubernetesExecutor(api_client=client, image="train:1").diagnose()
    assert [(check.name, check.ok) for check in findings] == [("cluster", False)]
    assert findings[0].hint
    assert pool.requests == 3
