"""The settings of a replica's pod, which every backend on Kubernetes has: names, defaults, and rules between them.

`validation.check_settings` reads the rules for single settings from the annotations. The annotations are evaluated here
and not kept as texts, so that the rules are also found from the module of a subclass.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from atoll.kube import gpus
from atoll.kube.bootstrap import bootstrap_problems
from atoll.kube.machines import machine
from atoll.kube.names import is_ours
from atoll.kube.rules import (
    Amount,
    Annotations,
    Count,
    Index,
    LabelKey,
    Labels,
    Manifest,
    Manifests,
    Name,
    Names,
    Prices,
    Quantity,
    SecondsFrom0,
    Word,
    Words,
    choice,
)
from atoll.kube.security import LEVELS, security_problems
from atoll.kube.volumes import SHM, volume_problems
from atoll.spec import json_problems

_HYPERPOD_TYPE = re.compile(r"ml\.")


@dataclass(frozen=True)
class PodSettings:
    """How the pod of a replica is made. None, or an empty value, means that the user did not set it."""

    image: Word = ""
    """The image of placements that name none."""
    pull_secrets: Names = ()
    image_pull_policy: Annotated[str, choice("Always", "IfNotPresent", "Never")] | None = None
    service_account: Name | None = None
    """The ServiceAccount of replicas. On EKS it gives them a role, by IRSA or by Pod Identity."""
    mount_service_account_token: bool = False
    """Replicas do not use the Kubernetes API; a sidecar may need the token."""
    command: Words = ()
    """The image's own program instead of `python -m atoll.replica`. Kubernetes replaces `$(NAME)` and `$$` in it."""
    command_args: Manifest | None = None
    """With `command`: arguments for it, in the JSON file that the variable ATOLL_ARGS names."""
    python: Word = "python"
    """The interpreter in the image."""
    bootstrap: Annotated[str, choice("pip")] | None = None
    """`pip`: install Atoll in the image when a replica starts."""
    pip_index: Word | None = None
    """With `bootstrap`: the package index that has Atoll; without it, Atoll's wheel comes from this machine."""
    pip_extras: Words = ()
    """With `bootstrap`: extras of Atoll besides the one that the store needs, such as `train`."""
    default_cpus: Amount | None = None
    """Cores for placements that say none; lowered where the machine cannot hold them."""
    default_memory_gib: Amount | None = None
    """The same for memory."""
    ephemeral_storage: Quantity | None = None
    shm_size: Quantity | None = None
    """The size of /dev/shm. Without it a run with GPUs may use it up to its memory limit, and others have 64 MiB."""
    gpu_resource_key: LabelKey | None = None
    """The resource that counts GPUs, if it is neither `nvidia.com/gpu` nor, for AMD, `amd.com/gpu`."""
    gpu_selector: Annotated[str, choice(*gpus.SELECTORS)] = "auto"
    """Which label tells a node that has the GPU; `auto` accepts any of them."""
    instance_type: Word | None = None
    """The only machine that replicas may run on."""
    efa: Count | None = None
    """EFA network devices for each replica."""
    hyperpod: bool = False
    """The cluster is SageMaker HyperPod: use healthy nodes only, and its names of instance types."""
    spot: bool | None = None
    """True: only spot machines; False: only others."""
    do_not_disrupt: bool = True
    """Ask Karpenter and the Cluster Autoscaler not to move replicas to other nodes."""
    node_lost_s: SecondsFrom0 = 30.0
    """How long a node may be unreachable before its replicas are given up."""
    tolerations: Manifests = ()
    node_selector: Labels = field(default_factory=dict)
    affinity: Manifest = field(default_factory=dict)
    topology_spread: Manifests = ()
    runtime_class: Name | None = None
    priority_class: Name | None = None
    volumes: Manifests = ()
    """Such as `[{"pvc": "data", "mount": "/data", "read_only": true}]`."""
    labels: Labels = field(default_factory=dict)
    """Labels of the Job and of its pods."""
    annotations: Annotations = field(default_factory=dict)
    pod_security: Annotated[str, choice(*LEVELS)] = "default"
    """`restricted` also forbids root, as namespaces with that Pod Security level want."""
    run_as_user: Index | None = None
    fs_group: Index | None = None
    image_is_non_root: bool = False
    """With `restricted`: the image names a user that is not root by its number."""
    prices: Prices = field(default_factory=dict)
    """Instance type -> dollars an hour; overrides the built-in table."""
    store_is_mounted: bool = False
    """Every replica sees the folder of a `file://` store under the same path."""
    overlay: Manifest = field(default_factory=dict)
    """A strategic merge patch for the Job: what the other settings cannot say."""

    def pod_problems(self, *, has_image: bool) -> Iterator[str]:
        """Settings of the pod that are missing, contradict each other or would have no effect."""
        if not has_image and not self.image:
            yield "image: not set; a pod needs one, from `--image` or the setting `image`"
        if self.command_args is not None and not self.command:
            yield "command_args: has no effect without command; an entry point gets its arguments from the store"
        elif self.command_args is not None:
            yield from json_problems(self.command_args, "command_args")
        if self.command and not self.command[0].strip():
            yield "command: its first word is the program and cannot be empty"
        if self.command and self.python != "python":
            yield f"python=`{self.python}`: has no effect with an own command"
        yield from bootstrap_problems(self.bootstrap, self.pip_index, self.pip_extras, owns=bool(self.command))
        has_host_path = any("host_path" in volume for volume in self.volumes)
        yield from security_problems(
            self.pod_security,
            run_as_user=self.run_as_user,
            image_is_non_root=self.image_is_non_root,
            has_host_path=has_host_path,
        )
        yield from volume_problems(self.volumes)
        yield from self._shape_problems()
        if self.shm_size and any(volume.get("mount") == SHM for volume in self.volumes):
            yield f"shm_size=`{self.shm_size}`: a volume is mounted at {SHM}; use one of the two"
        yield from _reserved("labels", self.labels)
        yield from _reserved("annotations", self.annotations)
        yield from self._machine_problems()

    def _shape_problems(self) -> Iterator[str]:
        for index, toleration in enumerate(self.tolerations):
            strange = set(toleration) - {"key", "operator", "value", "effect", "tolerationSeconds"}
            yield from (f"tolerations[{index}].{name}: a toleration has no such field" for name in sorted(strange))
        for index, spread in enumerate(self.topology_spread):
            missing = [name for name in ("maxSkew", "topologyKey", "whenUnsatisfiable") if name not in spread]
            yield from (f"topology_spread[{index}].{name}: missing" for name in missing)
        kinds = ("nodeAffinity", "podAffinity", "podAntiAffinity")
        yield from (
            f"affinity.{name}: an affinity has {', '.join(kinds)}" for name in self.affinity if name not in kinds
        )
        yield from gpus.node_affinity_problems(self.affinity)

    def _machine_problems(self) -> Iterator[str]:
        name = self.instance_type
        if name is None:
            return
        if gpus.INSTANCE_TYPE in self.node_selector:
            yield f"instance_type=`{name}`: node_selector names an instance type, too; use one of the two"
        if self.gpu_selector not in ("auto", "none"):
            yield f"gpu_selector=`{self.gpu_selector}`: has no effect with instance_type, which selects the nodes"
        is_known, is_ml = machine(name) is not None, _HYPERPOD_TYPE.match(name) is not None
        if is_known and is_ml != self.hyperpod:
            remedy = f"write `ml.{name}`" if self.hyperpod else f"write `{name[3:]}`, or set hyperpod=true"
            yield f"instance_type=`{name}`: only nodes of HyperPod have names that begin with `ml.`; {remedy}"


def _reserved(setting: str, given: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{setting}.{key}: set by Atoll or by Kubernetes" for key in given if is_ours(key))
