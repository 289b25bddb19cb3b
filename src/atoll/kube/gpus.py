"""Pure: which nodes have the GPU of a placement, as data: resource keys, and the labels of several kinds of clusters.

A node is told by a label that someone else puts on it: NVIDIA's and AMD's operators name the product, Karpenter, EKS
Auto Mode and GKE name the GPU, and every cloud names the instance type. No cluster has all of them. So the selector
`auto` is a node affinity with one term for each kind of label, and a node that fulfils one of them is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from atoll.kube.machines import HYPERPOD, machines_with
from atoll.spec import Gpu
from atoll.validation import shown

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
EFA, HUGE_PAGES, EFA_HUGE_PAGES = "vpc.amazonaws.com/efa", "hugepages-2Mi", "5120Mi"
HYPERPOD_HEALTH = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
DO_NOT_DISRUPT = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
SELECTORS = ("auto", "product", "karpenter", "eks-auto", "gke", "instance-type", "none")
"""Which label tells a node with the GPU; `none` leaves it to `node_selector` and `affinity`."""

Term = list[dict[str, Any]]
"""Expressions of one term of a node affinity; all of them must hold."""

_PRODUCTS: dict[str, tuple[str, ...]] = {
    "A10": ("NVIDIA-A10",),
    "A10G": ("NVIDIA-A10G",),
    "A100": (
        "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe",
        "NVIDIA-A100-SXM-64GB",
    ),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "A30": ("NVIDIA-A30",),
    "A40": ("NVIDIA-A40",),
    "A6000": ("NVIDIA-RTX-A6000",),
    "B200": ("NVIDIA-B200",),
    "B300": ("NVIDIA-B300-SXM6-AC", "NVIDIA-B300"),
    "GB200": ("NVIDIA-GB200",),
    "GH200": ("NVIDIA-GH200-480GB", "NVIDIA-GH200-144G-HBM3e", "NVIDIA-GH200-120GB"),
    "H100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "H200": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "H20": ("NVIDIA-H20",),
    "L4": ("NVIDIA-L4",),
    "L40": ("NVIDIA-L40",),
    "L40S": ("NVIDIA-L40S",),
    "P100": ("Tesla-P100-PCIE-16GB", "Tesla-P100-PCIE-12GB", "Tesla-P100-SXM2-16GB"),
    "RTX3090": ("NVIDIA-GeForce-RTX-3090",),
    "RTX4090": ("NVIDIA-GeForce-RTX-4090",),
    "RTX5090": ("NVIDIA-GeForce-RTX-5090",),
    "RTX6000": ("NVIDIA-RTX-6000-Ada-Generation", "Quadro-RTX-6000"),
    "T4": ("Tesla-T4", "NVIDIA-T4"),
    "V100": ("Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-16GB", "Tesla-V100-PCIE-32GB"),
}  # fmt: skip
_AMD_DEVICES = {"MI300X": "74a1", "MI325X": "74a5"}
_AMD_PRODUCTS = {"MI300X": "AMD_Instinct_MI300X_OAM", "MI325X": "AMD_Instinct_MI325X_OAM"}
_GKE: dict[str, tuple[str, ...]] = {
    "A100": ("nvidia-tesla-a100", "nvidia-a100-80gb"),
    "A100-80GB": ("nvidia-a100-80gb",),
    "B200": ("nvidia-b200",),
    "GB200": ("nvidia-gb200",),
    "H100": ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    "H200": ("nvidia-h200-141gb",),
    "L4": ("nvidia-l4",),
    "P100": ("nvidia-tesla-p100",),
    "T4": ("nvidia-tesla-t4",),
    "V100": ("nvidia-tesla-v100",),
}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_80_GB_MIB = "81920"
_SPOT = (
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)


def resource_key(gpu: Gpu, own: str | None) -> str:
    """The name of the resource that counts these GPUs; `own` is the user's setting."""
    return own or (AMD if gpu.name in _AMD_DEVICES else NVIDIA)


def gpu_terms(gpu: Gpu, selector: str, *, hyperpod: bool) -> list[Term] | str:
    """The terms of a node affinity, of which one must hold, or the reason why there is none."""
    if gpu.name == "any" or selector == "none":
        return []
    makers = ("product", "karpenter", "eks-auto", "gke", "instance-type") if selector == "auto" else (selector,)
    terms = [term for each in makers for term in _terms(gpu, each, hyperpod=hyperpod)]
    if not terms:
        return f"gpu_selector=`{selector}`: has no label for gpu=`{gpu}`; use `auto`, or `none` with node_selector"
    return terms


def _terms(gpu: Gpu, selector: str, *, hyperpod: bool) -> list[Term]:
    machines = machines_with(gpu)
    if selector == "product":
        if gpu.name in _AMD_DEVICES:
            labels = (("device-id", _AMD_DEVICES), ("product-name", _AMD_PRODUCTS))
            return [[_is_in(f"{AMD}.{label}", [values[gpu.name]])] for label, values in labels]
        products = _PRODUCTS.get(gpu.name, ())
        return [[_is_in(f"{NVIDIA}.product", products)]] if products else []
    if selector in ("karpenter", "eks-auto"):
        if not machines:
            return []
        prefix = "karpenter.k8s.aws" if selector == "karpenter" else "eks.amazonaws.com"
        term = [_is_in(f"{prefix}/instance-gpu-name", [gpu.name.partition("-")[0].lower()])]
        if gpu.name == "A100-80GB":
            term.append(_is_in(f"{prefix}/instance-gpu-memory", [_80_GB_MIB]))
        return [term]
    if selector == "gke":
        return [[_is_in("cloud.google.com/gke-accelerator", _GKE[gpu.name])]] if gpu.name in _GKE else []
    prefix = HYPERPOD if hyperpod else ""
    return [[_is_in(INSTANCE_TYPE, [prefix + each.name for each in machines])]] if machines else []


def spot_terms(spot: bool | None) -> list[Term]:
    """Only spot machines, or only others; none if any machine is good. A node has at most one of these labels."""
    if spot is None:
        return []
    if spot:
        return [[_is_in(key, [value])] for key, value in _SPOT]
    return [[{"key": key, "operator": "NotIn", "values": [value]} for key, value in _SPOT]]


def with_terms(affinity: Mapping[str, Any], *alternatives: list[Term]) -> dict[str, Any]:
    """The affinity, with nodes also restricted to those that fulfil one term of each list.

    The terms of one affinity are alternatives, so each of the user's terms is combined with each of ours.
    """
    wanted = [terms for terms in alternatives if terms]
    if not wanted or any(node_affinity_problems(affinity)):
        return dict(affinity)
    node = dict(affinity.get("nodeAffinity") or {})
    required = dict(node.get(_REQUIRED) or {})
    combined: list[dict[str, Any]] = list(required.get("nodeSelectorTerms") or [{}])
    for terms in wanted:
        combined = [
            {**one, "matchExpressions": [*(one.get("matchExpressions") or ()), *term]}
            for one in combined
            for term in terms
        ]
    required["nodeSelectorTerms"] = combined
    node[_REQUIRED] = required
    return {**affinity, "nodeAffinity": node}


def node_affinity_problems(affinity: Mapping[str, Any]) -> Iterator[str]:
    """Parts of the user's node affinity that have another shape, so that our terms cannot be combined with them."""
    node, where = affinity.get("nodeAffinity") or {}, "affinity.nodeAffinity"
    if not isinstance(node, Mapping):
        yield f"{where}={shown(node)}: a table"
        return
    required, where = node.get(_REQUIRED) or {}, f"{where}.{_REQUIRED}"
    if not isinstance(required, Mapping):
        yield f"{where}={shown(required)}: a table with nodeSelectorTerms"
        return
    terms, where = required.get("nodeSelectorTerms") or [], f"{where}.nodeSelectorTerms"
    if not isinstance(terms, list | tuple):
        yield f"{where}={shown(terms)}: a list of terms"
        return
    for index, term in enumerate(terms):
        is_term = isinstance(term, Mapping) and isinstance(term.get("matchExpressions") or [], list | tuple)
        if not is_term:
            yield f"{where}[{index}]={shown(term)}: a table with matchExpressions, which is a list"


def tolerations(
    own: Iterable[Mapping[str, Any]], *, gpu_key: str | None, spot: bool | None, node_lost_s: float
) -> list[dict[str, Any]]:
    """The user's tolerations, then ours for each taint that none of the user's covers.

    Nodes with GPUs are often tainted with the key of the resource. A node that is lost is given up after `node_lost_s`
    seconds; Kubernetes would wait for 300.
    """
    given = [dict(each) for each in own]
    wanted: list[dict[str, Any]] = []
    if gpu_key is not None:
        wanted.append({"key": gpu_key, "operator": "Exists", "effect": "NoSchedule"})
    if spot:  # the taint of spot nodes on Azure
        key, value = _SPOT[-1]
        wanted.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    wanted += [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": int(node_lost_s),
        }
        for state in ("not-ready", "unreachable")
    ]
    return given + [ours for ours in wanted if not any(_covers(each, ours) for each in given)]


def _covers(own: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether the user has already decided about the taint of our toleration."""
    return own.get("key") in (None, "", ours["key"]) and own.get("effect") in (None, "", ours["effect"])


def _is_in(key: str, values: Iterable[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
