"""The overlay: a strategic merge that cannot change what Atoll relies on."""

from __future__ import annotations

from copy import deepcopy

import pytest

from atoll.kube.overlay import directive_problems, merged, overlay_problems

BASE = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "j", "labels": {"atoll.dev/run": "r", "team": "a"}},
    "spec": {
        "completions": 2,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "replica",
                        "image": "i",
                        "env": [{"name": "WORLD_SIZE", "value": "2"}, {"name": "A", "value": "1"}],
                        "volumeMounts": [
                            {"name": "v", "mountPath": "/a"},
                            {"name": "atoll-args", "mountPath": "/etc/atoll"},
                        ],
                    }
                ],
                "volumes": [{"name": "atoll-args", "configMap": {"name": "j-args"}}],
                "tolerations": [{"key": "a"}],
            }
        },
    },
}


def pod(patch):
    return {"spec": {"template": {"spec": patch}}}


def replica(**patch):
    return pod({"containers": [{"name": "replica", **patch}]})


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None, "z": None}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}, {"a": {"c": 2}}),
        ({"a": {"b": 1}, "c": 2}, {"a": {"$patch": "delete"}}, {"a": {}, "c": 2}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}, {"name": "B"}]},
         {"env": [{"name": "A", "value": "2"}, {"name": "B"}]}),
        ({"env": [{"name": "A"}, {"name": "B"}]}, {"env": [{"name": "A", "$patch": "delete"}]},
         {"env": [{"name": "B"}]}),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "Z", "$patch": "delete"}]}, {"env": [{"name": "A"}]}),
        ({"env": [{"name": "A"}]}, {"env": [{"$patch": "replace"}, {"name": "B"}]}, {"env": [{"name": "B"}]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
    ],
)  # fmt: skip
def test_merging(base, patch, result):
    before = deepcopy((base, patch))
    assert merged(base, patch) == result
    assert (base, patch) == before


@pytest.mark.parametrize(
    "patch",
    [
        pod({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}),
        pod({"initContainers": [{"name": "init", "image": "x"}]}),
        pod({"containers": [{"name": "sidecar", "image": "x"}]}),
        replica(resources={"limits": {"x.com/y": "1"}}),
        replica(env=[{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]),
        {"metadata": {"labels": {"team": "b"}}},
        {"spec": {"template": {"metadata": {"annotations": {"x": "y"}}}}},
    ],
)
def test_what_an_overlay_may_change(patch):
    changed = merged(BASE, patch)
    assert changed != BASE
    assert list(overlay_problems(BASE, changed, ["WORLD_SIZE"])) == []


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"kind": "CronJob"}, "kind"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": {"namespace": "x"}}, "metadata.namespace"),
        ({"metadata": {"labels": {"atoll.dev/run": "x"}}}, "metadata.labels.atoll.dev/run"),
        ({"metadata": {"labels": None}}, "metadata.labels.atoll.dev/run"),
        (
            {"metadata": {"annotations": {"kueue.x-k8s.io/job-min-parallelism": "1"}}},
            "metadata.annotations.kueue.x-k8s.io/job-min-parallelism",
        ),
        ({"spec": {"completions": 3}}, "spec.completions"),
        ({"spec": {"backoffLimit": 0}}, "spec.backoffLimit"),
        ({"spec": {"successPolicy": {"rules": []}}}, "spec.successPolicy"),
        ({"spec": {"managedBy": "x/y"}}, "spec.managedBy"),
        (pod({"restartPolicy": "OnFailure"}), "spec.template.spec.restartPolicy"),
        (pod({"containers": [{"name": "replica", "$patch": "delete"}]}), "spec.template.spec.containers[replica]"),
        (replica(image="x"), "spec.template.spec.containers[replica].image"),
        (replica(command=["x"]), "spec.template.spec.containers[replica].command"),
        (replica(args=["x"]), "spec.template.spec.containers[replica].args"),
        (
            replica(env=[{"name": "WORLD_SIZE", "value": "9"}]),
            "spec.template.spec.containers[replica].env.WORLD_SIZE",
        ),
        (
            replica(volumeMounts=[{"name": "v", "mountPath": "/etc/atoll"}]),
            "spec.template.spec.containers[replica].volumeMounts.atoll-args",
        ),
        (
            pod({"volumes": [{"name": "atoll-args", "configMap": {"name": "x"}}]}),
            "spec.template.spec.volumes.atoll-args",
        ),
        (replica(env=None), "spec.template.spec.containers[replica].env.WORLD_SIZE"),
    ],
)
def test_what_an_overlay_cannot_change(patch, path):
    problems = list(overlay_problems(BASE, merged(BASE, patch), ["WORLD_SIZE"]))
    assert f"overlay.{path}" in {problem.partition(":")[0] for problem in problems}


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        (pod({"affinity": {"$patch": "remove"}}), "overlay.spec.template.spec.affinity.$patch"),
        (pod({"$setElementOrder/containers": []}), "overlay.spec.template.spec.$setElementOrder/containers"),
        (pod({"tolerations": [{"key": "a", "$patch": "delete"}]}), "overlay.spec.template.spec.tolerations[0].$patch"),
        (replica(env=[{"value": "1"}]), "overlay.spec.template.spec.containers[0].env[0].name"),
        (pod({"volumes": [{"$patch": "delete"}]}), "overlay.spec.template.spec.volumes[0].name"),
    ],
)
def test_a_directive_without_an_effect_is_refused(patch, path):
    assert [problem.partition(":")[0] for problem in directive_problems(patch)] == [path]


def test_the_two_directives_are_accepted():
    lists = [{"$patch": "replace"}, {"name": "A"}]
    patch = replica(env=lists, resources={"$patch": "replace", "limits": {"x.com/y": "1"}})
    for each in (patch, pod({"tolerations": [{"$patch": "replace"}, {"key": "a"}], "affinity": {"$patch": "delete"}})):
        assert list(directive_problems(each)) == []
    assert list(directive_problems(pod({"volumes": [{"name": "a", "$patch": "delete"}]}))) == []


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_an_overlay_has_no_value_that_looks_like_a_secret(kind):
    def problems(entry: dict) -> list[str]:
        patch = {"spec": {"template": {"spec": {kind: [{"name": "replica", "env": [entry]}]}}}}
        return [p for p in overlay_problems(BASE, merged(BASE, patch), ["WORLD_SIZE"]) if "HUB_TOKEN" in p]

    assert problems({"name": "HUB_TOKEN", "value": "hunter2"})
    assert "hunter2" not in str(problems({"name": "HUB_TOKEN", "value": "hunter2"}))
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert problems({"name": "HUB_TOKEN", "valueFrom": reference}) == []


def test_an_overlay_of_a_wrong_shape_is_refused_and_raises_nothing():
    for patch in ({"spec": 3}, {"spec": {"template": []}}, pod({"containers": 3})):
        assert list(overlay_problems(BASE, merged(BASE, patch), ["WORLD_SIZE"]))
