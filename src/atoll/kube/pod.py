"""Pure: the pod template of a run, and every reason why a placement and its settings give none.

Requests and limits: memory and storage are limited to what they request, so that a replica that takes more is ended
alone and does not make the node evict others. Cores are requested and not limited, because a limit slows a replica down
although the node has idle cores. GPUs and EFA devices are only in the limits; Kubernetes requests the same.

Time limits: the supervisor in the container ends a replica that has run for `timeout_s`, so that pulling the image does
not count. The kubelet's own limit (`activeDeadlineSeconds`, counted from when the node accepts the pod) is `START_S`
longer and only ends a container that never starts or hangs. An own command has no supervisor: there the kubelet's limit
is `timeout_s` itself. Both work without a launcher, and neither counts the time before a node is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.context import GRACE, LABEL, RANK, RESERVED, TIMEOUT, RunContext, index_environment
from atoll.kube import gpus
from atoll.kube.bootstrap import Wheel, bootstrap_command, wheel_volume
from atoll.kube.gang import GangParts
from atoll.kube.machines import machine
from atoll.kube.names import BATCH, CONTAINER, INDEX, is_dns_name, job_labels
from atoll.kube.pod_settings import PodSettings
from atoll.kube.quantities import of_cpus, of_gib
from atoll.kube.security import container_context, pod_context
from atoll.kube.volumes import SHM, config_map_file, pod_volumes, shared_memory
from atoll.spec import Placement

SECRET_SCHEME = "kubernetes"  # noqa: S105
ARGS = "ATOLL_ARGS"
"""Names the JSON file with the arguments of an own command."""
ARGS_FOLDER, ARGS_FILE = "/etc/atoll", "args.json"
START_S = 3600
"""How long a node may take to pull the image and start the container."""
UPLOAD_S = 15
"""The supervisor needs this after the end of a replica, to store its outcome and its last lines."""
_MOST_VALUE = 131_000
"""Bytes of one variable, its name included: Linux does not start a program with a longer one."""
_MOST_SECONDS = 2**31 - 1


@dataclass(frozen=True)
class Sizes:
    """What one replica requests of a node; None if it requests nothing."""

    cpus: float | None
    memory_gib: float | None


def pod_template(
    context: RunContext,
    placement: Placement,
    settings: PodSettings,
    *,
    name: str,
    sizes: Sizes,
    gang: GangParts,
    version: str,
    extras: tuple[str, ...],
    wheel: Wheel | None,
) -> dict[str, Any]:
    """The template of every pod of the Job `name`. Wrong settings give a template, too; `pod_problems` lists them.

    `version` and `extras` of Atoll, and its `wheel`, are for the bootstrap.
    """
    volumes, mounts = _volumes(placement, settings, name, wheel)
    gpu_key = None if placement.gpu is None else gpus.resource_key(placement.gpu, settings.gpu_resource_key)
    container = {
        "name": CONTAINER,
        "image": placement.image or settings.image,
        **({"imagePullPolicy": settings.image_pull_policy} if settings.image_pull_policy else {}),
        "command": _command(settings, version, extras, wheel),
        "env": list(_environment(context, placement, settings)),
        "resources": _resources(placement, settings, sizes, gpu_key),
        "securityContext": container_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"volumeMounts": mounts} if mounts else {}),
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "terminationGracePeriodSeconds": grace_seconds(placement, settings),
        "activeDeadlineSeconds": deadline_seconds(placement, settings),
        "securityContext": pod_context(settings.pod_security, settings.run_as_user, settings.fs_group),
        "automountServiceAccountToken": settings.mount_service_account_token,
        "enableServiceLinks": False,
        "tolerations": gpus.tolerations(
            settings.tolerations, gpu_key=gpu_key, spot=settings.spot, node_lost_s=settings.node_lost_s
        ),
        **_optional(placement, settings, name),
        **({"volumes": volumes} if volumes else {}),
        **gang.pod_spec,
    }
    annotations = {
        **(gpus.DO_NOT_DISRUPT if settings.do_not_disrupt else {}),
        **settings.annotations,  # such as a time for which Karpenter does not move a replica
        **gang.pod_annotations,
    }
    labels = {**settings.labels, **job_labels(context), **gang.pod_labels}
    return {"metadata": {"labels": labels, **({"annotations": annotations} if annotations else {})}, "spec": pod}


def grace_seconds(placement: Placement, settings: PodSettings) -> int:
    """The time between SIGTERM and SIGKILL for the container; above 0, because 0 removes a pod that still runs."""
    return max(1, math.ceil(placement.grace_s) + (0 if settings.command else UPLOAD_S))


def deadline_seconds(placement: Placement, settings: PodSettings) -> int:
    """The kubelet's time limit for one pod, from when a node accepts it."""
    if settings.command:
        return math.ceil(placement.timeout_s)
    return math.ceil(placement.timeout_s + placement.grace_s) + START_S


def _command(settings: PodSettings, version: str, extras: tuple[str, ...], wheel: Wheel | None) -> list[str]:
    if settings.command:
        return list(settings.command)
    if settings.bootstrap == "pip":
        every = (*extras, *settings.pip_extras)
        return bootstrap_command(settings.python, version, every, wheel=wheel, index=settings.pip_index)
    return [settings.python, "-m", "atoll.replica"]


def _environment(context: RunContext, placement: Placement, settings: PodSettings) -> Iterator[dict[str, Any]]:
    """The variables of the container, in a fixed order. None is given twice."""
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    for variable in dict.fromkeys((RANK, placement.rank_env)):
        yield {"name": variable, "valueFrom": rank}
    limits = {TIMEOUT: number(placement.timeout_s), GRACE: number(placement.grace_s)}
    values = {**context.environment(placement.replicas), **limits, **index_environment(context, placement.rank_env)}
    if settings.command_args is not None:
        values[ARGS] = f"{ARGS_FOLDER}/{ARGS_FILE}"
    values |= {key: placement.env[key] for key in sorted(placement.env)}
    for key, value in values.items():
        yield {"name": key, "value": literal(value)}
    for key in sorted(placement.secrets):
        secret, _, entry = placement.secrets[key].partition(":")[2].partition("/")
        yield {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}}


def our_variables(placement: Placement) -> list[str]:
    """The variables that only Atoll sets."""
    return sorted({*RESERVED, ARGS, placement.rank_env} - {LABEL})


def literal(value: str) -> str:
    """A value that Kubernetes passes on unchanged: it would replace `$(NAME)` and shorten `$$`."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _resources(placement: Placement, settings: PodSettings, sizes: Sizes, gpu_key: str | None) -> dict[str, Any]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if sizes.cpus is not None:
        requests["cpu"] = of_cpus(sizes.cpus)
    if sizes.memory_gib is not None:
        requests["memory"] = limits["memory"] = of_gib(sizes.memory_gib)
    if settings.ephemeral_storage:
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = settings.ephemeral_storage
    if placement.gpu is not None and gpu_key is not None:
        limits[gpu_key] = str(placement.gpu.count)
    if settings.efa is not None:
        limits[gpus.EFA] = str(settings.efa)
        requests[gpus.HUGE_PAGES] = limits[gpus.HUGE_PAGES] = gpus.EFA_HUGE_PAGES
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(
    placement: Placement, settings: PodSettings, name: str, wheel: Wheel | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        volumes, mounts = pod_volumes(settings.volumes)
    except (KeyError, TypeError):  # `volume_problems` says which rule a volume breaks
        volumes, mounts = [], []
    has_shm = any(mount["mountPath"] == SHM for mount in mounts)
    more = []
    if settings.shm_size or (placement.gpu is not None and not has_shm):
        more.append(shared_memory(settings.shm_size))
    if wheel is not None:
        more.append(wheel_volume(name, wheel))
    if settings.command_args is not None:
        more.append(config_map_file("atoll-args", args_config_map_name(name), ARGS_FOLDER))
    return [*volumes, *(volume for volume, _ in more)], [*mounts, *(mount for _, mount in more)]


def args_config_map_name(name: str) -> str:
    return f"{name}-args"


def _optional(placement: Placement, settings: PodSettings, name: str) -> dict[str, Any]:
    selector = dict(settings.node_selector)
    if settings.instance_type:
        selector[gpus.INSTANCE_TYPE] = settings.instance_type
    if settings.hyperpod:
        selector = {**gpus.HYPERPOD_HEALTH, **selector}
    affinity = gpus.with_terms(settings.affinity, _gpu_terms(placement, settings), gpus.spot_terms(settings.spot))
    spread = [
        {"labelSelector": {"matchLabels": {f"{BATCH}job-name": name}}, **constraint}
        for constraint in settings.topology_spread
    ]
    found = {
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
        "nodeSelector": selector,
        "affinity": affinity,
        "topologySpreadConstraints": spread,
        "runtimeClassName": settings.runtime_class,
        "priorityClassName": settings.priority_class,
    }
    return {key: value for key, value in found.items() if value}


def _gpu_terms(placement: Placement, settings: PodSettings) -> list[gpus.Term]:
    if placement.gpu is None or settings.instance_type:
        return []
    terms = gpus.gpu_terms(placement.gpu, settings.gpu_selector, hyperpod=settings.hyperpod)
    return [] if isinstance(terms, str) else terms


def pod_problems(placement: Placement, settings: PodSettings, sizes: Sizes) -> Iterator[str]:
    """What no pod can do of this placement with these settings."""
    yield from settings.pod_problems(has_image=placement.image is not None)
    yield from _gpu_problems(placement, settings)
    for key, reference in placement.secrets.items():
        scheme, _, path = reference.partition(":")
        secret, _, entry = path.partition("/")
        if scheme == SECRET_SCHEME and not (is_dns_name(secret) and _is_secret_key(entry)):
            yield f"secrets.{key}=`{reference}`: write `{SECRET_SCHEME}:SECRET/KEY`"
    for key, value in placement.env.items():
        if key == ARGS:
            yield f"env.{key}: this variable is set by Atoll"
        size = len(key.encode()) + len(value.encode())
        if size > _MOST_VALUE:
            yield f"env.{key}: {size} bytes; Linux starts no program with a variable of more than {_MOST_VALUE}"
    if ARGS in placement.secrets or placement.rank_env == ARGS:
        yield f"{ARGS}: this variable is set by Atoll"
    if settings.efa is not None and sizes == Sizes(None, None):
        yield f"efa={settings.efa}: EFA needs huge pages, which Kubernetes only gives with cpus or memory_gib"
    if deadline_seconds(placement, settings) > _MOST_SECONDS:
        yield f"timeout_s={placement.timeout_s:g}: Kubernetes counts at most {_MOST_SECONDS} s"


def _gpu_problems(placement: Placement, settings: PodSettings) -> Iterator[str]:
    gpu = placement.gpu
    if gpu is None:
        if settings.gpu_resource_key is not None:
            yield f"gpu_resource_key=`{settings.gpu_resource_key}`: has no effect with gpu=None; leave it out"
        return
    if settings.instance_type is None:
        terms = gpus.gpu_terms(gpu, settings.gpu_selector, hyperpod=settings.hyperpod)
        if isinstance(terms, str):
            yield terms
        return
    known = machine(settings.instance_type)
    if known is None:
        return
    if not known.has(gpu):
        has = f"has {known.gpus} × {known.gpu}" if known.gpu else "has no GPU"
        yield f"instance_type=`{settings.instance_type}`: it {has}, and the run asks for gpu=`{gpu}`"


def _is_secret_key(text: str) -> bool:
    return 0 < len(text) <= 253 and all(letter.isalnum() or letter in "-_." for letter in text) and text.isascii()
