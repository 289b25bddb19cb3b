"""The settings of `atoll run --on kubernetes`: those of a pod, and those of the Job around it.

The annotations are not kept as texts, for the reason in `kube.pod_settings`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from atoll.kube.gang import GANG
from atoll.kube.job import DEFAULT_TTL_S
from atoll.kube.pod_settings import PodSettings
from atoll.kube.rules import Index, Name, Namespace, Seconds, Word
from atoll.validation import settings_hint


@dataclass(frozen=True)
class KubernetesSettings(PodSettings):
    """The settings of a run on Kubernetes. None, or an empty value, means that the user did not set it."""

    namespace: Namespace | None = None
    """Without it, the namespace of the context in the kubeconfig, or of the pod that this process runs in."""
    context: Word | None = None
    """The context in the kubeconfig; without it, the current one."""
    kubeconfig: Word | None = None
    """The path of a kubeconfig."""
    gang: Annotated[str, GANG] = "none"
    """Which scheduler starts all replicas or none."""
    queue_priority: Name | None = None
    """With a queue of Kueue: its WorkloadPriorityClass. Without it, the priority is 0."""
    queue_timeout_s: Seconds | None = None
    """How long replicas may wait for a node before they have run. `timeout_s` of the placement counts running time."""
    fail_fast: bool = False
    """One failed rank ends the run; by default the others go on, as long as they are a quorum."""
    ttl_s: Index | None = DEFAULT_TTL_S
    """Kubernetes removes the Job and its pods so long after the end; the store still has the run. None: never."""

    def problems(self, *, has_image: bool) -> Iterator[str]:
        """Settings that are missing, contradict each other or would have no effect."""
        yield from self.pod_problems(has_image=has_image)


def plan_hint(problems: Sequence[str], executor: str, settings_class: type[PodSettings]) -> str | None:
    """Where to set what a refused plan needs; None if no problem is about a setting."""
    settings = tuple(field.name for field in fields(settings_class))
    return settings_hint(executor) if any(problem.startswith(settings) for problem in problems) else None
