"""What doctor says about a cluster that does not answer."""

from __future__ import annotations

from types import SimpleNamespace

from atoll.executors.kubernetes.executor import KubernetesExecutor


class DeadPool:
    """A connection pool without a server behind it."""

    def __init__(self) -> None:
        self.requests = 0

    def request(self, *_: object, **__: object) -> object:
        self.requests += 1
        raise ConnectionRefusedError("no server")


def test_doctor_asks_a_dead_cluster_only_a_few_times_and_has_one_finding():
    pool = DeadPool()
    configuration = SimpleNamespace(host="https://cluster.invalid", auth_settings=dict)
    client = SimpleNamespace(configuration=configuration, rest_client=SimpleNamespace(pool_manager=pool))
    findings = KubernetesExecutor(api_client=client, image="train:1").diagnose()
    assert [(check.name, check.ok) for check in findings] == [("cluster", False)]
    assert findings[0].hint
    assert pool.requests == 3
