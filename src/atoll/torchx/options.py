"""The run options of the scheduler: what `torchx runopts kubernetes_mcad` shows, checked and with their defaults."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from atoll.errors import InvalidSpec
from atoll.kube import appwrapper
from atoll.kube.names import is_dns_label, is_dns_name, is_label_key, is_label_value
from atoll.kube.quantities import RULE, is_quantity
from atoll.torchx.resources import NVIDIA, RESERVED_MEMMB, RESERVED_MILLICPU

V1BETA2, V1BETA1, LEGACY = DIALECTS = tuple(each.api_version for each in appwrapper.DIALECTS.values())
"""The API of the wrapper, in the order in which a cluster is searched for them."""
_SHORT = {"v1beta2": V1BETA2, "v1beta1": V1BETA1, "mcad.ibm.com": LEGACY}
LAYOUTS = ("jobs", "pods")
DURATION = re.compile(r"(\d+(\.\d+)?(h|m|s|ms))+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_GRACES = ("retry_pause", "warmup_grace", "failure_grace", "keep_failed")
_MOST_TTL_S = 10 * 365 * 86_400.0
"""Go reads durations up to 292 years; the controller replaces one that it cannot read by its default."""
_MOST_INT = 2**31 - 1
_EXIT_CODES = ("terminal_exit_codes", "retryable_exit_codes")


def _option(help_text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One value for each run option."""

    namespace: str = _option("Kubernetes namespace of the app", "default")
    image_repo: str | None = _option(
        "image repository for patched images, with push access. Ex: example.com/your/container"
    )
    service_account: str | None = _option("service account of the pods")
    priority: int | None = _option("priority of the AppWrapper for MCAD; a higher number goes first")
    priority_class_name: str | None = _option("PriorityClass of the pods, if the cluster has any")
    image_secret: str | None = _option("secret of the namespace with which private images are pulled")
    coscheduler_name: str | None = _option("second scheduler that places the pods of a role together, by PodGroups")
    network: str | None = _option("additional network of the pods (Multus)")
    dialect: str = _option(f"API of the wrapper: auto, {', '.join(_SHORT)}", "auto")
    layout: str = _option(
        "jobs (one Indexed Job for each role) or pods (one pod for each replica, as TorchX 0.7.0)", "jobs"
    )
    context: str | None = _option("context of the kubeconfig")
    queue: str | None = _option("LocalQueue of Kueue that admits the app (v1beta2 only)")
    queue_priority: str | None = _option("WorkloadPriorityClass of Kueue, for the place in the queue")
    overlay: str | None = _option(
        "changes to every pod: JSON, or the path of a JSON or YAML file (strategic merge patch)"
    )
    reserved_millicpu: int = _option("CPU (1/1000) by which requests are below limits", RESERVED_MILLICPU)
    reserved_memmb: int = _option("memory (MB) by which requests are below limits", RESERVED_MEMMB)
    shm_size: str | None = _option("size limit of /dev/shm, such as 8Gi")
    gpu_resource: str = _option("name of the GPU resource", NVIDIA)
    retry_limit: int | None = _option("restarts of the whole app instead of the smallest max_retries (v1beta2 only)")
    retry_pause: str = _option("pause before a restart (v1beta2 only)", "90s")
    warmup_grace: str = _option("time for all pods to get ready before a restart (v1beta2 only)", "30m")
    failure_grace: str = _option("time for failed pods to recover before a restart (v1beta2 only)", "1m")
    keep_failed: str = _option("how long a failed app without restarts keeps its pods and logs, and its quota", "10m")
    success_ttl: str = _option("how long a finished app is kept, counted from its start (v1beta2 only)", "720h")
    terminal_exit_codes: str | None = _option("exit codes after which no restart follows: 3;4 (v1beta2 only)")
    retryable_exit_codes: str | None = _option("the only exit codes after which a restart follows (v1beta2 only)")
    code_store: str | None = _option(
        "store to which the workspace is uploaded instead of a docker build: s3://bucket/x"
    )
    all_apps: bool = _option("list: also AppWrappers that TorchX did not create", False)

    @classmethod
    def of(cls, cfg: Mapping[str, Any] | None) -> Options:
        """The options in the configuration of a run. Raises `InvalidSpec` with every wrong value."""
        given = {each.name: cfg[each.name] for each in fields(cls) if each.name in cfg} if cfg is not None else {}
        # An option of an older configuration file may be an empty text or None.
        given = {name: value for name, value in given.items() if value is not None}
        made = cls(**given)
        if problems := list(made.problems()):
            raise InvalidSpec("the configuration of the scheduler", problems, hint="`torchx runopts kubernetes_mcad`")
        return made

    def problems(self) -> Iterator[str]:
        """Each option that breaks its rule."""
        for each in fields(self):
            value = getattr(self, each.name)
            wanted = option_type(each.name)
            is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
            if value is not None and not is_right:
                yield f"{each.name}={value!r}: a value of type {wanted.__name__}"
            elif value is not None:
                yield from self._rule(each.name, value)
        if isinstance(self.layout, str) and self.layout == "jobs":
            yield from self._names()
        if both := sorted(set.intersection(*(exit_codes(getattr(self, name)) for name in _EXIT_CODES))):
            yield f"{', '.join(_EXIT_CODES)}: {', '.join(map(str, both))} is in both"

    def _rule(self, name: str, value: Any) -> Iterator[str]:
        if name == "dialect" and value != "auto" and value not in (*_SHORT, *DIALECTS):
            yield f"dialect=`{value}`: auto, {', '.join((*_SHORT, *DIALECTS))}"
        elif name == "layout" and value not in LAYOUTS:
            yield f"layout=`{value}`: {' or '.join(LAYOUTS)}"
        elif name in (*_GRACES, "success_ttl"):
            yield from _duration_problems(name, value)
        elif name in _EXIT_CODES and not exit_codes(value):
            yield f"{name}=`{value}`: exit codes from 1 to 255 with `;` between them, such as `3;4`"
        elif name in ("reserved_millicpu", "reserved_memmb", "retry_limit") and not 0 <= value <= _MOST_INT:
            yield f"{name}={value}: a number from 0 to {_MOST_INT}"
        elif name == "priority" and not -_MOST_INT <= value <= _MOST_INT:
            yield f"priority={value}: a number from {-_MOST_INT} to {_MOST_INT}"
        elif name == "shm_size" and not is_quantity(value):
            yield f"shm_size=`{value}`: {RULE}"
        elif name == "gpu_resource" and not ("/" in value and is_label_key(value)):
            yield f"gpu_resource=`{value}`: the name of a resource, such as `{NVIDIA}`"
        elif name in ("queue", "queue_priority") and not is_label_value(value):
            yield f"{name}=`{value}`: at most 63 letters, digits, `-`, `_` and `.`"
        elif name == "overlay":
            yield from overlay_problems(value)

    def _names(self) -> Iterator[str]:
        """Names of objects. The original passes them on unchecked, and so does the layout `pods`."""
        if not is_dns_label(self.namespace):
            yield f"namespace=`{self.namespace}`: at most 63 small letters, digits and `-`"
        for name in ("service_account", "priority_class_name", "image_secret", "coscheduler_name"):
            value = getattr(self, name)
            if isinstance(value, str) and not is_dns_name(value):
                yield f"{name}=`{value}`: the name of an object: small letters, digits, `-` and `.`"

    @property
    def wanted_dialect(self) -> str | None:
        """The API of the wrapper; None if the cluster decides."""
        return None if self.dialect == "auto" else _SHORT.get(self.dialect, self.dialect)

    @property
    def pod_overlay(self) -> Mapping[str, Any]:
        return {} if self.overlay is None else read_overlay(self.overlay)


def _duration_problems(name: str, value: str) -> Iterator[str]:
    if DURATION.match(value) is None:
        yield f"{name}=`{value}`: a duration such as `90s`, `5m` or `1h30m`"
        return
    seconds = sum(float(count) * _UNITS_S[unit] for count, unit in _PART.findall(value))
    if name in _GRACES and seconds > appwrapper.MOST_GRACE_S:
        yield f"{name}=`{value}`: at most 24h, to which the controller cuts longer ones"
    elif seconds > _MOST_TTL_S:
        yield f"{name}=`{value}`: at most {_MOST_TTL_S / 3600:g}h"


def exit_codes(given: Any) -> set[int]:
    """The exit codes of an option; empty if there are none, or if one of them is no exit code of a failure."""
    parts = [part.strip() for part in given.replace(";", ",").split(",")] if isinstance(given, str) else []
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 255 for part in parts):
        return set()
    return {int(part) for part in parts}


def option_type(name: str) -> type:
    """The type of an option, as TorchX wants it."""
    annotation = str(Options.__annotations__[name])
    return {"str": str, "int": int, "bool": bool}[annotation.partition(" ")[0]]


def read_overlay(given: Any) -> Mapping[str, Any]:
    """The patch in an option or in the metadata of a role: a table, JSON, or the path of a JSON or YAML file."""
    if isinstance(given, Mapping):
        return given
    text = str(given).strip()
    if not text.startswith("{"):
        with open(os.path.expanduser(text.removeprefix("file://")), encoding="utf-8") as file:
            text = file.read()
    try:
        found = json.loads(text)
    except ValueError:
        import yaml

        found = yaml.safe_load(text)
    if not isinstance(found, Mapping):
        raise ValueError("not a table")
    return found


def overlay_problems(given: Any, where: str = "overlay") -> Iterator[str]:
    """Why this is no patch of a pod."""
    import yaml

    try:
        found = read_overlay(given)
    except (OSError, ValueError, yaml.YAMLError) as exc:
        yield f"{where}: JSON, or the path of a JSON or YAML file with a table: {exc}"
        return
    for name in ("metadata", "spec"):
        if not isinstance(found.get(name, {}), Mapping):
            yield f"{where}.{name}: a table"
            return
    marks = (found.get("metadata") or {}).get("labels", {})
    if not isinstance(marks, Mapping):
        yield f"{where}.metadata.labels: a table"
    containers = (found.get("spec") or {}).get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(each, Mapping) for each in containers):
        yield f"{where}.spec.containers: a list of tables"


class KubernetesMCADOpts(TypedDict, total=False):
    """The run options; `torchx runopts kubernetes_mcad` explains them."""

    namespace: str | None
    image_repo: str | None
    service_account: str | None
    priority: int | None
    priority_class_name: str | None
    image_secret: str | None
    coscheduler_name: str | None
    network: str | None
    dialect: str | None
    layout: str | None
    context: str | None
    queue: str | None
    queue_priority: str | None
    overlay: str | None
    reserved_millicpu: int | None
    reserved_memmb: int | None
    shm_size: str | None
    gpu_resource: str | None
    retry_limit: int | None
    retry_pause: str | None
    warmup_grace: str | None
    failure_grace: str | None
    keep_failed: str | None
    success_ttl: str | None
    terminal_exit_codes: str | None
    retryable_exit_codes: str | None
    code_store: str | None
    all_apps: bool | None
    quiet: bool | None
