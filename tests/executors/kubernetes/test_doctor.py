"""`atoll doctor kubernetes` on the real control plane."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.role import role
from atoll.kube.settings import KubernetesSettings

pytestmark = [pytest.mark.process, pytest.mark.server]

SETTINGS: dict[str, Any] = {
    "image": "atoll-test",
    "service_account": "default",
    "pull_secrets": ["registry"],
    "volumes": [{"pvc": "data", "mount": "/data"}],
    "gang": "volcano:q",
}


def found(kubeconfig, **settings: Any) -> dict[str, Any]:
    checks = KubernetesExecutor(kubeconfig=str(kubeconfig), **settings).diagnose()
    return {check.name: check for check in checks}


def test_it_reports_each_part_of_the_setup(namespace):
    checks = found(namespace.kubeconfig, **SETTINGS)
    is_ok = {name: check.ok for name, check in checks.items() if name != "queues"}
    assert is_ok == {
        "cluster": True, "version": True, "permissions": True, "namespace": True, "service account": True,
        "secret": False, "volume": False, "gang": False, "nodes": True,
    }  # fmt: skip
    assert "take replicas" in checks["nodes"].message


def test_a_user_with_the_least_role_has_no_failing_check(namespace):
    made = {"image": "atoll-test", "service_account": "nobody", "pull_secrets": ["registry"]}
    config = namespace.user("launcher", role(namespace.name, KubernetesSettings(**made))["rules"])
    checks = found(config, **made)
    assert [name for name, check in checks.items() if not check.ok] == []
    assert {"secret", "service account", "nodes"} <= checks.keys()


def test_a_namespace_that_enforces_a_level_and_one_that_is_missing(namespace):
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    namespace.api.patch(f"/api/v1/namespaces/{namespace.name}", labels)
    assert not found(namespace.kubeconfig, image="x")["namespace"].ok
    assert found(namespace.kubeconfig, image="x", pod_security="restricted")["namespace"].ok
    missing = found(namespace.kubeconfig, image="x", namespace="nowhere")["namespace"]
    assert (missing.ok, missing.is_input) == (False, True)
    assert "`nowhere`" in missing.message
    assert "kubectl get namespaces" in missing.hint


def test_a_cluster_that_does_not_answer_is_the_only_finding(tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "c", '
        '"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}], '
        '"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]}'
    )
    checks = found(path, image="x", patience_s=0.1)
    assert [(check.name, check.ok) for check in checks.values()] == [("cluster", False)]
