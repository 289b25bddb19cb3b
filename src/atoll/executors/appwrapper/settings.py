"""The settings of `atoll run --on appwrapper`: those of a pod, and those of the AppWrapper around its Job.

The annotations are not kept as texts, for the reason in `kube.pod_settings`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from atoll.kube.appwrapper import DIALECTS, MOST_GRACE_S, PREFIX, V1BETA2, Dialect
from atoll.kube.gang import KUEUE_PRIORITY, KUEUE_QUEUE, PARTIAL
from atoll.kube.names import is_dns_name, is_label_value
from atoll.kube.pod_settings import PodSettings
from atoll.kube.rules import Index, Namespace, Seconds, Word, choice
from atoll.kube.settings import KubernetesSettings
from atoll.validation import Kind, a_list_of, between, is_whole

EXECUTOR = "appwrapper"
AUTO = "auto"
_MOST_PRIORITY = 2**31 - 1
_GRACE = f"seconds, at most {MOST_GRACE_S:g}, to which the controller cuts longer ones"
Grace = Annotated[float, Kind(f"{_GRACE}; 1 or more", between(1, MOST_GRACE_S))]
GraceFrom0 = Annotated[float, Kind(_GRACE, between(0, MOST_GRACE_S))]
Codes = Annotated[Sequence[int], a_list_of(Kind("an exit code from 1 to 255", lambda v: is_whole(v) and 1 <= v <= 255))]


def _is_priority(value: Any) -> bool:
    return is_dns_name(value) or (is_whole(value) and abs(value) <= _MOST_PRIORITY)


_PRIORITY = Kind("the name of a WorkloadPriorityClass of Kueue, or for MCAD a whole number", _is_priority)
_QUEUE = Kind("the name of a LocalQueue of Kueue", is_label_value)


@dataclass(frozen=True)
class AppWrapperSettings(PodSettings):
    """The settings of a run in an AppWrapper. None, or an empty value, means that the user did not set it."""

    namespace: Namespace | None = None
    """Without it, the namespace of the context in the kubeconfig, or of the pod that this process runs in."""
    context: Word | None = None
    """The context in the kubeconfig; without it, the current one."""
    kubeconfig: Word | None = None
    """The path of a kubeconfig."""
    dialect: Annotated[str, choice(AUTO, *DIALECTS)] = AUTO
    """The form of AppWrapper; `auto` asks the cluster."""
    queue: Annotated[str, _QUEUE] | None = None
    """The LocalQueue of Kueue that the AppWrapper waits in."""
    priority: Annotated[str | int, _PRIORITY] | None = None
    """With `queue`: a WorkloadPriorityClass. On MCAD: a number; higher ones are dispatched first."""
    queue_timeout_s: Seconds | None = None
    """How long replicas may wait for a node before they have run. `timeout_s` of the placement counts running time."""
    admission_s: Grace = 60.0
    """The pods of the Job may be missing for so long."""
    warmup_s: Grace | None = None
    """The pods may be not ready for so long; without it `queue_timeout_s`, or else half an hour."""
    failure_grace_s: Grace = 60.0
    """A failed pod may be there for so long while its Job goes on."""
    retry_pause_s: GraceFrom0 = 30.0
    """The controller waits for so long before it starts all replicas again."""
    forceful_deletion_s: Grace = 60.0
    """Pods that cannot end, such as those of a lost node, are removed by force after so long."""
    keep_failed_s: GraceFrom0 = 60.0
    """Without restarts: the pods of a failed run stay for so long, and hold their quota for twice as long."""
    terminal_exit_codes: Codes = ()
    """A replica that ends with one of these is not started again."""
    retryable_exit_codes: Codes = ()
    """If there are some: only a replica that ends with one of these is started again."""
    ttl_s: Index | None = 86_400
    """The Job and the pods of a run that has succeeded are kept for so long, or longer. None: never removed."""
    hostnames: bool = False
    """A headless Service gives the replicas the host names `NAME-RANK.NAME`, for a program that needs them."""

    def problems(self) -> Iterator[str]:
        """Settings that contradict each other or would have no effect, whatever the cluster."""
        marks = {**self.labels, **self.annotations}
        yield from (
            f"labels, annotations: `{key}`: partial admission starts fewer replicas than WORLD_SIZE says; leave it out"
            for key in PARTIAL
            if key in marks
        )
        yield from (f"annotations.{key}: Atoll writes it from a setting" for key in marks if key.startswith(PREFIX))
        for key, setting in ((KUEUE_QUEUE, "queue"), (KUEUE_PRIORITY, "priority")):
            if key in marks:
                yield f"labels.{key}: write {setting}=`{marks[key]}` instead"
        if isinstance(self.priority, str) and self.queue is None:
            yield f"priority=`{self.priority}`: has no effect without queue"
        if isinstance(self.priority, int) and self.queue is not None:
            yield f"priority={self.priority}: in a queue of Kueue it is the name of a WorkloadPriorityClass"
        if both := sorted(set(self.terminal_exit_codes) & set(self.retryable_exit_codes)):
            yield f"terminal_exit_codes, retryable_exit_codes: {', '.join(map(str, both))} is in both"
        if self.dialect != AUTO:
            yield from self.dialect_problems(DIALECTS[self.dialect])

    def dialect_problems(self, dialect: Dialect) -> Iterator[str]:
        """Settings that this dialect does not have."""
        if not dialect.is_mcad:
            if isinstance(self.priority, int):
                yield f"priority={self.priority}: {dialect.name} has no numbers; set queue and a WorkloadPriorityClass"
            return
        if self.queue is not None:
            yield f"queue=`{self.queue}`: MCAD ({dialect.name}) has no queues of Kueue; leave it out"
        if isinstance(self.priority, str):
            yield f"priority=`{self.priority}`: a whole number on MCAD ({dialect.name})"
        for name in ("terminal_exit_codes", "retryable_exit_codes"):
            if getattr(self, name):
                yield f"{name}: MCAD ({dialect.name}) does not look at exit codes; leave it out"

    @property
    def shown_dialect(self) -> Dialect:
        """The dialect of the plan: the one that is set, or else the one for which the other settings are made."""
        if self.dialect != AUTO:
            return DIALECTS[self.dialect]
        return DIALECTS["v1beta1"] if isinstance(self.priority, int) else V1BETA2

    def job_settings(self) -> KubernetesSettings:
        """The settings of the Job inside: one failed rank ends it, nothing is started again, and nothing removes it."""
        shared = {each.name: getattr(self, each.name) for each in fields(PodSettings)}
        place = {name: getattr(self, name) for name in ("namespace", "context", "kubeconfig", "queue_timeout_s")}
        return KubernetesSettings(**shared, **place, fail_fast=True, ttl_s=None)
