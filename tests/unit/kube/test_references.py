"""The objects that a pod names: each once, with the setting that named it."""

from __future__ import annotations

import pytest

from atoll.kube.references import references


def found(pod, own=()):
    job = {"spec": {"template": {"spec": pod}}}
    return {(each.kind, each.name): each.setting for each in references(job, own)}


def test_every_kind_of_reference():
    ref = {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    pod = {
        "serviceAccountName": "trainer",
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "b", "secret": {"secretName": "key"}},
            {"name": "c", "configMap": {"name": "conf"}},
            {"name": "d", "emptyDir": {}},
            {"name": "e", "projected": {"sources": [{"secret": {"name": "inside"}}, {"downwardAPI": {}}]}},
        ],
        "containers": [
            {"name": "replica", "env": [{"name": "TOKEN", **ref}, {"name": "A", "value": "1"}]},
            {"name": "side", "envFrom": [{"configMapRef": {"name": "more"}}]},
        ],
    }
    assert found(pod) == {
        ("ServiceAccount", "trainer"): "service_account",
        ("PriorityClass", "high"): "priority_class",
        ("RuntimeClass", "nvidia"): "runtime_class",
        ("Secret", "registry"): "pull_secrets",
        ("PersistentVolumeClaim", "data"): "volumes",
        ("Secret", "key"): "volumes",
        ("ConfigMap", "conf"): "volumes",
        ("Secret", "inside"): "volumes",
        ("Secret", "hub"): "secrets.TOKEN",
        ("ConfigMap", "more"): "overlay",
    }


def test_optional_objects_and_those_of_the_launch_need_not_exist():
    volumes = [
        {"name": "a", "secret": {"secretName": "x", "optional": True}},
        {"name": "b", "configMap": {"name": "ours"}},
    ]
    env = [{"name": "T", "valueFrom": {"configMapKeyRef": {"name": "y", "key": "k", "optional": True}}}]
    own = [{"kind": "ConfigMap", "metadata": {"name": "ours"}}]
    assert found({"volumes": volumes, "containers": [{"name": "replica", "env": env}]}, own) == {}


@pytest.mark.parametrize(
    "value",
    [
        3, "a", {"name": "a"}, ["a"], [{"secret": "a", "configMap": {}, "persistentVolumeClaim": {}}],
        [{"projected": {"sources": [{"configMap": {}}, 3]}}], [{"valueFrom": {"secretKeyRef": {"key": "k"}}}],
    ],
)  # fmt: skip
def test_what_has_another_shape_is_left_to_the_api_server(value):
    container = {"name": "replica", "env": value, "envFrom": value}
    pod = {"volumes": value, "imagePullSecrets": value, "initContainers": value, "containers": [container]}
    assert found(pod) == {}
