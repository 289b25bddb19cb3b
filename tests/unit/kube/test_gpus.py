"""Which nodes have a GPU: resource keys, affinity terms and tolerations."""

from __future__ import annotations

import pytest

from atoll.kube import gpus
from atoll.spec import KNOWN, Gpu

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def keys(terms):
    return [expression["key"] for term in terms for expression in term]


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "any"])
def test_every_gpu_that_atoll_knows_has_a_label(name):
    terms = gpus.gpu_terms(Gpu(name), "auto", hyperpod=False)
    assert isinstance(terms, list)
    assert terms


def test_any_gpu_and_the_selector_none_choose_no_node():
    assert gpus.gpu_terms(Gpu("any"), "auto", hyperpod=False) == []
    assert gpus.gpu_terms(Gpu("H100"), "none", hyperpod=False) == []


def test_a_selector_without_a_label_for_the_gpu_says_so():
    assert isinstance(gpus.gpu_terms(Gpu("RTX4090"), "karpenter", hyperpod=False), str)
    assert isinstance(gpus.gpu_terms(Gpu("MI300X"), "gke", hyperpod=False), str)


def test_auto_accepts_any_of_the_labels():
    assert keys(gpus.gpu_terms(Gpu("H100", 8), "auto", hyperpod=False)) == [
        "nvidia.com/gpu.product",
        "karpenter.k8s.aws/instance-gpu-name",
        "eks.amazonaws.com/instance-gpu-name",
        "cloud.google.com/gke-accelerator",
        "node.kubernetes.io/instance-type",
    ]


def test_amd_has_its_own_key_and_labels():
    assert gpus.resource_key(Gpu("MI300X"), None) == "amd.com/gpu"
    assert gpus.resource_key(Gpu("H100"), None) == gpus.resource_key(Gpu("any"), None) == "nvidia.com/gpu"
    assert gpus.resource_key(Gpu("H100"), "example.com/gpu") == "example.com/gpu"
    assert keys(gpus.gpu_terms(Gpu("MI300X"), "auto", hyperpod=False)) == [
        "amd.com/gpu.device-id",
        "amd.com/gpu.product-name",
    ]


def test_a_gpu_with_80_gb_is_told_by_its_memory():
    (term,) = gpus.gpu_terms(Gpu("A100-80GB"), "karpenter", hyperpod=False)
    assert [expression["values"] for expression in term] == [["a100"], ["81920"]]


def test_hyperpod_has_its_own_names_of_instance_types():
    ((expression,),) = gpus.gpu_terms(Gpu("H100", 8), "instance-type", hyperpod=True)
    assert expression["values"] == ["ml.p5.48xlarge"]


def test_each_term_of_the_user_is_combined_with_each_of_ours():
    own = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}], "matchFields": ["f"]}
    affinity = {"podAffinity": {"x": 1}, "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [own, {}]}, "preferred": []}}
    merged = gpus.with_terms(affinity, [[{"key": "g1"}], [{"key": "g2"}]], [[{"key": "s"}]])
    terms = merged["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    found = [[expression["key"] for expression in term["matchExpressions"]] for term in terms]
    assert found == [["zone", "g1", "s"], ["zone", "g2", "s"], ["g1", "s"], ["g2", "s"]]
    assert [term.get("matchFields") for term in terms] == [["f"], ["f"], None, None]
    assert merged["podAffinity"] == {"x": 1}
    assert merged["nodeAffinity"]["preferred"] == []
    assert affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [own, {}]


def test_without_terms_the_affinity_is_unchanged():
    assert gpus.with_terms({}, [], []) == {}
    assert gpus.spot_terms(None) == []


def test_spot_is_any_label_of_spot_and_its_opposite_is_none_of_them():
    assert len(gpus.spot_terms(True)) == 4
    ((*expressions,),) = gpus.spot_terms(False)
    assert {expression["operator"] for expression in expressions} == {"NotIn"}
    assert len(expressions) == 4


def test_gpu_and_node_lost_tolerations_are_added():
    found = gpus.tolerations([], gpu_key="nvidia.com/gpu", spot=None, node_lost_s=30)
    assert [(t["key"], t["effect"], t.get("tolerationSeconds")) for t in found] == [
        ("nvidia.com/gpu", "NoSchedule", None),
        ("node.kubernetes.io/not-ready", "NoExecute", 30),
        ("node.kubernetes.io/unreachable", "NoExecute", 30),
    ]


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Equal", "value": "x", "effect": "NoSchedule"}, 2),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}, 2),
        ({"operator": "Exists"}, 0),
        ({"key": "team", "operator": "Exists"}, 3),
    ],
)
def test_a_toleration_of_the_user_replaces_ours_for_the_same_taint(own, kept):
    found = gpus.tolerations([own], gpu_key="nvidia.com/gpu", spot=None, node_lost_s=30)
    assert found[0] == own
    assert len(found) == 1 + kept
