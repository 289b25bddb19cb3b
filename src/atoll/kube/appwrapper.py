"""Pure: AppWrappers of every dialect: objects wrapped into one, its retry annotations, and what it says about itself.

An AppWrapper holds the objects of a run until it may start, creates them, and ends them together. Three dialects exist:
that of the AppWrapper controller (`v1beta2`), and two of MCAD, an earlier controller. A cluster serves one of the first
two, because their definitions have the same name; `served_dialect` chooses one from what the cluster says.

No state of MCAD except `Completed` is final, and its counters are unreliable: Job and pods say how a run is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atoll.kube.client import path_to
from atoll.kube.pod_state import condition
from atoll.kube.quantities import is_quantity, of_cpus, parsed

Object = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """One form of AppWrapper."""

    name: str
    """As in the setting `dialect`."""
    api_version: str
    is_mcad: bool

    @property
    def group(self) -> str:
        return self.api_version.partition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.partition("/")[2]

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """The path of an AppWrapper, or of all in a namespace or in the cluster."""
        return path_to("appwrappers", namespace, name, api=f"/apis/{self.api_version}")


V1BETA2 = Dialect("v1beta2", "workload.codeflare.dev/v1beta2", is_mcad=False)
MCAD = Dialect("v1beta1", "workload.codeflare.dev/v1beta1", is_mcad=True)
"""MCAD from 1.34.1 on."""
OLD_MCAD = Dialect("mcad.ibm.com/v1beta1", "mcad.ibm.com/v1beta1", is_mcad=True)
DIALECTS = {each.name: each for each in (V1BETA2, MCAD, OLD_MCAD)}
"""In the order in which they are preferred."""
GROUPS = tuple(dict.fromkeys(each.group for each in DIALECTS.values()))

PREFIX = "workload.codeflare.dev.appwrapper/"
"""Of the annotations by which a v1beta2 AppWrapper is told when to retry and when to give up."""
WRAPPER_LABEL = "workload.codeflare.dev/appwrapper"
"""The controller of v1beta2 gives this label to every pod. Its value is the name of the AppWrapper."""
MCAD_LABEL = "appwrapper.mcad.ibm.com"
MOST_POD_SETS = 8
MOST_GRACE_S = 86_400.0
"""The controller cuts longer grace periods to this."""
LONGEST_NAME = 63
COMPLETION = "Complete,Failed"
"""The conditions of a Job by which MCAD sees that it is over; without them it says `Running` for ever."""


def served_dialect(served: Iterable[str]) -> Dialect | None:
    """The dialect to use on a cluster that serves AppWrappers of these API versions; None if it serves none."""
    found = set(served)
    return next((each for each in DIALECTS.values() if each.api_version in found), None)


def dialect_of(wrapper: Mapping[str, Any]) -> Dialect | None:
    """The dialect of an AppWrapper; None if it is none of ours."""
    return next((each for each in DIALECTS.values() if each.api_version == wrapper.get("apiVersion")), None)


# Building.


def app_wrapper(
    dialect: Dialect,
    components: Sequence[Mapping[str, Any]],
    *,
    name: str,
    namespace: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    suspend: bool | None = None,
    priority: int | None = None,
    scheduling: Mapping[str, Any] | None = None,
) -> Object:
    """These objects, wrapped. `suspend` is only for v1beta2; `priority` and `scheduling` are only for MCAD."""
    metadata: Object = {"name": name, "namespace": namespace}
    metadata |= {key: dict(given) for key, given in (("labels", labels), ("annotations", annotations)) if given}
    spec: Object
    if dialect.is_mcad:
        spec = {} if priority is None else {"priority": priority}
        spec |= {} if scheduling is None else {"schedulingSpec": dict(scheduling)}
        spec["resources"] = {"GenericItems": [generic_item(each) for each in components]}
    else:
        spec = {} if suspend is None else {"suspend": suspend}
        spec["components"] = [{"template": dict(each)} for each in components]
    return {"apiVersion": dialect.api_version, "kind": "AppWrapper", "metadata": metadata, "spec": spec}


def generic_item(thing: Mapping[str, Any]) -> Object:
    """An object as an item of MCAD. A Job says when it is over, and what all its pods request together."""
    item: Object = {"replicas": 1, "generictemplate": dict(thing)}
    if thing.get("kind") != "Job":
        return item
    item["completionstatus"] = COMPLETION
    if (resources := _pod_resources(thing)) is not None:
        item["custompodresources"] = [resources]
    return item


def components_of(wrapper: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects inside an AppWrapper of any dialect."""
    spec = wrapper.get("spec") or {}
    items = (spec.get("resources") or {}).get("GenericItems") or ()
    found = [each.get("template") for each in spec.get("components") or ()]
    found += [each.get("generictemplate") for each in items]
    return [each for each in found if isinstance(each, Mapping)]


def _pod_resources(job: Mapping[str, Any]) -> Object | None:
    """What one pod of a Job requests, and how many there are; None if it requests nothing."""
    spec = job.get("spec") or {}
    containers = (((spec.get("template") or {}).get("spec")) or {}).get("containers") or ()
    resources = [each.get("resources") or {} for each in containers]
    limits = _summed(each.get("limits") or {} for each in resources)
    requests = _summed({**(each.get("limits") or {}), **(each.get("requests") or {})} for each in resources)
    if not requests:
        return None
    return {"replicas": int(spec.get("parallelism") or 1), "requests": requests, "limits": {**requests, **limits}}


def _summed(resources: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The sum over the containers of a pod, for each resource."""
    found: dict[str, str] = {}
    for key, value in ((key, str(value)) for each in resources for key, value in each.items()):
        is_more = key in found and is_quantity(value) and is_quantity(found[key])  # else the API server refuses it
        found[key] = of_cpus(parsed(found[key]) + parsed(value)) if is_more else value
    return found


# The annotations of v1beta2.


@dataclass(frozen=True)
class Retries:
    """When a v1beta2 AppWrapper starts its objects again, gives up, and removes them. Every field is written: the
    defaults of the controller retry three times, and it replaces a value that it cannot read by its default."""

    limit: int
    admission_s: float = 60.0
    """Pods may be missing for so long."""
    warmup_s: float = 300.0
    """Pods may be not ready for so long."""
    failure_grace_s: float = 60.0
    """A failed pod may be there for so long while its Job has not failed."""
    pause_s: float = 90.0
    forceful_deletion_s: float = 600.0
    """Pods that cannot end are removed by force after so long."""
    keep_failed_s: float = 0.0
    """Failed objects stay for so long, and their quota for twice as long. It has no effect after a retry."""
    success_ttl_s: float = 604_800.0
    """Counted from the start, not from the success: then the AppWrapper is removed if it has succeeded."""
    terminal_codes: tuple[int, ...] = ()
    """Exit codes after which there is no retry."""
    retryable_codes: tuple[int, ...] = ()
    """If there are some: only these exit codes are retried."""


def retry_annotations(retries: Retries) -> dict[str, str]:
    """All annotations, with their full names."""
    found = {
        "retryLimit": str(retries.limit),
        "admissionGracePeriodDuration": go_duration(retries.admission_s),
        "warmupGracePeriodDuration": go_duration(retries.warmup_s),
        "failureGracePeriodDuration": go_duration(retries.failure_grace_s),
        "retryPausePeriodDuration": go_duration(retries.pause_s),
        "forcefulDeletionGracePeriodDuration": go_duration(retries.forceful_deletion_s),
        "deletionOnFailureGracePeriodDuration": go_duration(retries.keep_failed_s),
        "successTTLDuration": go_duration(retries.success_ttl_s),
    }
    codes = {"terminalExitCodes": retries.terminal_codes, "retryableExitCodes": retries.retryable_codes}
    found |= {name: ",".join(map(str, sorted(set(given)))) for name, given in codes.items() if given}
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def go_duration(seconds: float) -> str:
    """Seconds as Go reads them, such as `90s` or `1.5s`."""
    whole = int(seconds)
    return f"{whole}s" if whole == seconds else f"{seconds:.3f}".rstrip("0") + "s"


_GO_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)")
_CODES = re.compile(r"\d{1,3}(?:,\d{1,3})*\Z")


def annotation_problems(annotations: Mapping[str, str]) -> Iterator[str]:
    """Each annotation of v1beta2 that the controller would replace by its default without a word."""
    for key, value in annotations.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            continue
        if name.endswith("Duration"):
            is_good, rule = not _GO_DURATION.sub("", value) and value != "", "a Go duration such as `90s` or `1h30m`"
        elif name == "retryLimit":
            is_good, rule = value.isdecimal(), "a whole number from 0 on"
        elif name in ("terminalExitCodes", "retryableExitCodes"):
            is_good, rule = _CODES.match(value) is not None, "exit codes such as `3,4`"
        else:
            is_good, rule = False, "no such annotation"
        if not is_good:
            yield f"annotations.{key}=`{value}`: {rule}"


# What may be inside.

_ONE_POD_SET = frozenset({"Pod", "Job", "Deployment", "StatefulSet"})


def pod_sets(components: Iterable[Mapping[str, Any]]) -> int:
    """How many sets of equal pods these objects have, as far as their kinds are known."""
    count = 0
    for each in components:
        spec = each.get("spec") or {}
        if each.get("kind") in _ONE_POD_SET:
            count += 1
        elif each.get("kind") == "JobSet":
            count += len(spec.get("replicatedJobs") or ())
        elif each.get("kind") == "PyTorchJob":
            count += len(spec.get("pytorchReplicaSpecs") or ())
        elif each.get("kind") in ("RayCluster", "RayJob"):
            count += 1 + len((spec.get("rayClusterSpec") or spec).get("workerGroupSpecs") or ())
    return count


def component_problems(dialect: Dialect, components: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What no AppWrapper of this dialect runs to a good end, although the API server accepts it."""
    if not dialect.is_mcad and (sets := pod_sets(components)) > MOST_POD_SETS:
        yield f"components: {sets} pod sets; an AppWrapper has at most {MOST_POD_SETS}; use one Job for equal pods"
    for each in components:
        if each.get("kind") != "Job":
            continue
        spec = each.get("spec") or {}
        if spec.get("ttlSecondsAfterFinished") is not None:
            yield "spec.ttlSecondsAfterFinished: a Job that removes itself counts as failed, without a retry"
        if spec.get("successPolicy") is not None:
            yield "spec.successPolicy: the AppWrapper counts every pod, runs the Job again, and fails"
        if not dialect.is_mcad and spec.get("backoffLimitPerIndex"):
            yield "spec.backoffLimitPerIndex: a failed pod makes the AppWrapper fail although its Job is complete"


# Reading.


class Phase(StrEnum):
    """How far an AppWrapper is, in the words of no dialect."""

    NEW = "new"
    """Its controller has not looked at it yet."""
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    """Its objects exist, or are being created. Only their pods tell whether something runs."""
    RESETTING = "resetting"
    """Its objects are deleted, and created again."""
    STOPPING = "stopping"
    """Its objects are deleted because it was suspended, or because it is being deleted."""
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """MCAD: its Jobs are over, in whatever way."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    """A word that this version of Atoll does not know."""


_PHASES = {
    "": Phase.NEW,
    "Suspended": Phase.QUEUED,
    "Resuming": Phase.DISPATCHED,
    "Running": Phase.DISPATCHED,
    "Resetting": Phase.RESETTING,
    "Suspending": Phase.STOPPING,
    "Terminating": Phase.STOPPING,
    "Succeeded": Phase.SUCCEEDED,
    "Failed": Phase.FAILED,
}
_MCAD_STATES = {
    "": Phase.NEW,
    "Pending": Phase.QUEUED,
    "Running": Phase.DISPATCHED,
    "RunningHoldCompletion": Phase.DISPATCHED,
    "Completed": Phase.ENDED,
    "Failed": Phase.FAILED,
    "Deleted": Phase.FAILED,
}


@dataclass(frozen=True)
class WrapperView:
    """What an AppWrapper says about itself. Never raises, whatever it says."""

    word: str
    """The phase (v1beta2) or the state (MCAD) as the controller wrote it; empty before it did."""
    phase: Phase
    is_mcad: bool
    is_deleted: bool
    resets: int
    """How often the controller has started its objects again."""
    reason: str
    """Why it fails or waits, in one word of the controller; empty if it says nothing."""
    message: str
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest condition of each type."""

    @classmethod
    def of(cls, wrapper: Mapping[str, Any]) -> WrapperView:
        status = wrapper.get("status") or {}
        metadata = wrapper.get("metadata") or {}
        dialect = dialect_of(wrapper)
        is_mcad = dialect.is_mcad if dialect is not None else "state" in status
        word = str(status.get("state" if is_mcad else "phase") or "")
        phase = (_MCAD_STATES if is_mcad else _PHASES).get(word, Phase.UNKNOWN)
        conditions = {str(each.get("type")): each for each in status.get("conditions") or () if isinstance(each, dict)}
        reason, message = _mcad_words(status) if is_mcad else _words(status)
        count = status.get("numberOfRequeueings" if is_mcad else "resettingCount")
        return cls(
            word,
            phase,
            is_mcad,
            bool(metadata.get("deletionTimestamp")),
            count if isinstance(count, int) else 0,
            reason,
            message,
            conditions,
        )

    def is_true(self, kind: str) -> bool:
        """Whether there is a condition of this type that holds."""
        return (self.conditions.get(kind) or {}).get("status") == "True"

    @property
    def starts_again(self) -> bool:
        """Whether MCAD, which has given up, dispatches it again, without end."""
        return self.is_mcad and self.phase is Phase.FAILED

    @property
    def said(self) -> str:
        """Reason and message in one line; empty if it says nothing."""
        return ": ".join(filter(None, (self.reason, self.message)))


def _words(status: Mapping[str, Any]) -> tuple[str, str]:
    """Why a v1beta2 AppWrapper is unhealthy. Its controller writes this before it resets or gives up."""
    unhealthy = condition(status, "Unhealthy")
    if unhealthy.get("status") != "True":
        return "", ""
    return str(unhealthy.get("reason") or ""), " ".join(str(unhealthy.get("message") or "").split())


def _mcad_words(status: Mapping[str, Any]) -> tuple[str, str]:
    """The newest condition of MCAD that says something, and what it says."""
    conditions = [each for each in status.get("conditions") or () if isinstance(each, dict)]
    for each in reversed(conditions):
        if each.get("message") or each.get("reason"):
            return str(each.get("reason") or each.get("type") or ""), " ".join(str(each.get("message") or "").split())
    return str(status.get("queuejobstate") or ""), str(status.get("message") or "")
