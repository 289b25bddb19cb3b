"""Pure: the request of a run on Kubernetes: the Job and the objects that it owns, and the reasons why there is none.

The executor's `plan` calls `job_request`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from atoll.context import RunContext
from atoll.executors.base import Capabilities, check, store_problems
from atoll.kube.bootstrap import Wheel, bootstrap_notes, wheel_config_map, wheel_problems
from atoll.kube.gang import Gang, gang_notes, gang_parts, gang_problems, mark_problems
from atoll.kube.gpus import INSTANCE_TYPE
from atoll.kube.job import JobSettings, indexed_job, with_token
from atoll.kube.machines import (
    Machine,
    fit_notes,
    gpu_notes,
    machine,
    machines_with,
    price_notes,
    smallest_that_fits,
)
from atoll.kube.names import COMMAND, QUEUE_TIMEOUT, TIMEOUT, job_labels, job_name
from atoll.kube.overlay import directive_problems, merged, overlay_problems
from atoll.kube.pod import (
    ARGS_FILE,
    SECRET_SCHEME,
    Sizes,
    args_config_map_name,
    number,
    our_variables,
    pod_problems,
    pod_template,
)
from atoll.kube.settings import KubernetesSettings
from atoll.registry import ANY_OTHER_STORE, STORES
from atoll.spec import Placement

CAPABILITIES = Capabilities(
    code=frozenset({"image", "bundle"}),
    secret_schemes=frozenset({SECRET_SCHEME}),
    cancels_together=True,
    forgets_cancelled=True,
)
_MOST_BYTES = 1_400_000
"""The JSON of a Job that the API server can still store."""
_MOST_ARGS = 1_000_000
"""Bytes of a ConfigMap, of which Kubernetes stores at most 1 MiB."""
_SHORT_TTL_S = 60


def job_request(
    context: RunContext,
    placement: Placement,
    settings: KubernetesSettings,
    *,
    namespace: str,
    version: str,
    wheel: Wheel | str = "it was not made",
    name: str | None = None,
    is_wrapped: bool = False,
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why Kubernetes cannot run it, and notes for the user.

    `version` is that of Atoll, and `wheel` its wheel, or why there is none; both are only for `bootstrap`. A Job that
    is wrapped into another object, which has its own rules for queues, has no gang.
    """
    machines = _machines(placement, settings)
    sizes, lowered = _sizes(placement, settings, machines)
    gang = Gang.parse(settings.gang)
    problems = [
        *check(placement, CAPABILITIES),
        *store_problems(context.store_uri, is_mounted=settings.store_is_mounted),
    ]
    problems += settings.problems(has_image=placement.image is not None)
    problems += [problem for problem in pod_problems(placement, settings, sizes) if problem not in problems]
    if settings.command and context.first_rank:
        rule = "a program of the image reads its number from 0 as its rank, and the ranks of this part begin with "
        problems.append(f"command=`{settings.command[0]}`: {rule}{context.first_rank}; put this part first")
    if not is_wrapped:
        problems += gang_problems(
            gang,
            has_requests=placement.gpu is not None or sizes != Sizes(None, None),
            marks={**settings.labels, **settings.annotations},
            max_restarts=placement.max_restarts,
            queue_priority=settings.queue_priority,
        )
    used_wheel = wheel if isinstance(wheel, Wheel) and needs_wheel(settings) else None
    if used_wheel is not None:
        problems += wheel_problems(used_wheel)
    elif needs_wheel(settings):
        problems.append(f"bootstrap: there is no wheel of the installed Atoll: {wheel}; name an index as pip_index")
    name = name or job_name(context, placement.replicas)
    request, more = _request(context, placement, settings, gang, sizes, name, namespace, version, used_wheel)
    problems += more
    notes = [] if is_wrapped else [*gang_notes(gang, placement.replicas)]
    notes += [*_notes(placement, settings), *lowered]
    if settings.bootstrap is not None:
        notes += bootstrap_notes(used_wheel, version, settings.pip_index)
    notes += [*gpu_notes(placement.gpu, machines), *fit_notes(placement.cpus, placement.memory_gib, machines)]
    if (priced := _priced(settings, machines, sizes)) is not None:
        notes += price_notes(
            priced,
            placement.gpu,
            is_sure=_instance_type(settings) is not None,
            replicas=placement.replicas,
            limit_s=placement.timeout_s,
            spot=settings.spot,
            own=settings.prices,
        )
    return request, problems, notes


def needs_wheel(settings: KubernetesSettings) -> bool:
    """Whether replicas install the wheel of the launcher's Atoll."""
    return settings.bootstrap is not None and settings.pip_index is None


def _request(
    context: RunContext,
    placement: Placement,
    settings: KubernetesSettings,
    gang: Gang,
    sizes: Sizes,
    name: str,
    namespace: str,
    version: str,
    wheel: Wheel | None,
) -> tuple[dict[str, Any], list[str]]:
    """The request, and the problems of the finished objects."""
    parts = gang_parts(gang, name, placement.replicas, queue_priority=settings.queue_priority)
    template = pod_template(
        context,
        placement,
        settings,
        name=name,
        sizes=sizes,
        gang=parts,
        version=version,
        extras=_store_extras(context.store_uri),
        wheel=wheel,
    )
    outer = JobSettings(
        labels=settings.labels,
        annotations={**settings.annotations, **_reading_annotations(placement, settings)},
        fail_fast=settings.fail_fast,
        ttl_s=settings.ttl_s,
        queue_timeout_s=settings.queue_timeout_s,
        is_supervised=not settings.command,
    )
    plain = indexed_job(context, placement, outer, name=name, namespace=namespace, template=template, gang=parts)
    job = merged(plain, settings.overlay)
    problems = sorted([*directive_problems(settings.overlay), *overlay_problems(plain, job, our_variables(placement))])
    if problems:
        job = plain
    problems += mark_problems(parts, settings.labels, settings.annotations)
    extras = [_of_run(each, context, namespace) for each in _extras(parts.objects, settings, name, wheel)]
    rest: dict[str, Any] = {"namespace": namespace, "extras": extras}
    if parts.by_version:
        rest["by_version"] = list(parts.by_version)
    if wheel is not None:
        rest["wheel"] = {"file": wheel.file, "sha256": wheel.sha256}
    if (size := len(json.dumps(job))) > _MOST_BYTES:
        problems.append(f"env: the Job has {size} bytes; Kubernetes stores at most {_MOST_BYTES}")
    if settings.command_args is not None and (size := len(_args_text(settings).encode())) > _MOST_ARGS:
        problems.append(f"command_args: {size} bytes; a ConfigMap has at most {_MOST_ARGS}; put them into the store")
    return {**rest, "job": with_token(job, rest)}, problems


def _reading_annotations(placement: Placement, settings: KubernetesSettings) -> dict[str, str]:
    """What the status of the run needs to know, so that a handle is enough to read it."""
    found = {TIMEOUT: number(placement.timeout_s)}
    found[COMMAND] = "own" if settings.command else settings.bootstrap or "replica"
    if settings.queue_timeout_s is not None:
        found[QUEUE_TIMEOUT] = number(settings.queue_timeout_s)
    return found


def _extras(
    objects: tuple[dict[str, Any], ...], settings: KubernetesSettings, name: str, wheel: Wheel | None
) -> Iterator[dict[str, Any]]:
    """The objects that the Job owns; the executor adds the owner."""
    yield from objects
    if wheel is not None:
        yield wheel_config_map(name, wheel)
    if settings.command_args is not None:
        text = _args_text(settings)
        metadata = {"name": args_config_map_name(name)}
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {ARGS_FILE: text},
            "immutable": True,
        }


def _args_text(settings: KubernetesSettings) -> str:
    return json.dumps(dict(settings.command_args or {}), sort_keys=True, ensure_ascii=False)


def _of_run(thing: dict[str, Any], context: RunContext, namespace: str) -> dict[str, Any]:
    metadata = {**thing["metadata"], "namespace": namespace, "labels": job_labels(context)}
    return {**thing, "metadata": metadata}


def _store_extras(store_uri: str) -> tuple[str, ...]:
    """The extra of Atoll that replicas need for this store."""
    extra = STORES.get(store_uri.partition(":")[0], ANY_OTHER_STORE).extra
    return () if extra is None else (extra,)


def _machines(placement: Placement, settings: KubernetesSettings) -> list[Machine]:
    """The machines that replicas may run on, as far as the table knows them."""
    if (name := _instance_type(settings)) is not None:
        known = machine(name)
        return [] if known is None else [known]
    return [] if placement.gpu is None else machines_with(placement.gpu)


def _instance_type(settings: KubernetesSettings) -> str | None:
    return settings.instance_type or settings.node_selector.get(INSTANCE_TYPE)


def _priced(settings: KubernetesSettings, machines: list[Machine], sizes: Sizes) -> Machine | None:
    """The machine whose price the plan shows: also one that only the user's prices know."""
    name = _instance_type(settings)
    if name is not None and not machines and name in settings.prices:
        return Machine(name, gpu=None, gpus=0, cpus=0, memory_gib=0, price=None)
    return smallest_that_fits(machines, sizes.cpus, sizes.memory_gib)


def _sizes(placement: Placement, settings: KubernetesSettings, machines: list[Machine]) -> tuple[Sizes, list[str]]:
    """What a replica requests. The placement is taken as it is; a default is lowered to what the machine can hold."""
    cpus, memory, notes = placement.cpus, placement.memory_gib, []
    smallest = machines[0] if machines else None
    if cpus is None and (cpus := settings.default_cpus) is not None and smallest and cpus > smallest.usable_cpus:
        limit = f"{smallest.usable_cpus:g}, which {smallest} can hold"
        notes.append(f"warning: cpus: the default of {cpus:g} is lowered to {limit}")
        cpus = smallest.usable_cpus
    default = settings.default_memory_gib
    if memory is None and (memory := default) is not None and smallest and memory > smallest.usable_gib:
        limit = f"{smallest.usable_gib:g} GiB, which {smallest} can hold"
        notes.append(f"warning: memory_gib: the default of {memory:g} GiB is lowered to {limit}")
        memory = smallest.usable_gib
    return Sizes(cpus, memory), notes


def _notes(placement: Placement, settings: KubernetesSettings) -> Iterator[str]:
    if placement.max_restarts:
        yield (
            f"restarts: at most {placement.max_restarts} for each rank, each in a new pod and without a launcher; "
            "evictions are not counted"
        )
    if settings.command:
        yield (
            f"timeout_s={placement.timeout_s:g}: an own command has no supervisor, so that the node counts the time: "
            "from when it accepts the pod, pulling the image included, and anew for each restart"
        )
    if settings.queue_timeout_s is not None:
        yield (
            f"queue_timeout_s={settings.queue_timeout_s:g}: a watching command ends a run that waits for longer; "
            "without one, Kubernetes ends it after this and the running time together"
        )
    if settings.ttl_s is not None and settings.ttl_s < _SHORT_TTL_S:
        yield (
            f"warning: ttl_s={settings.ttl_s}: a watching command may not read the end before the Job is removed; what "
            "the store does not know is lost then"
        )
    if settings.runtime_class and placement.gpu is not None and settings.runtime_class != "nvidia":
        yield (
            f"warning: runtime_class=`{settings.runtime_class}`: many sandboxes do not pass GPUs on, so that the "
            f"replica may not see gpu=`{placement.gpu}`"
        )
    if placement.cpus is None and settings.default_cpus is None and placement.memory_gib is None:
        yield (
            "cpus, memory_gib: not set, so that a node may be overcommitted, and evicts such replicas first when it "
            "runs out of memory"
        )
