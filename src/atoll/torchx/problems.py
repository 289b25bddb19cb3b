"""Pure: everything that the cluster would refuse about an app, or would accept and never run. All of it at once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torchx.specs import MISSING, RetryPolicy

from atoll.errors import InvalidSpec
from atoll.kube.appwrapper import MOST_POD_SETS, components_of
from atoll.kube.names import CONTAINER, is_dns_label, is_label_key, is_label_value
from atoll.torchx.mounts import mount_problems
from atoll.torchx.names import (
    INDEX_VARIABLE,
    INSTANCE,
    LONGEST,
    RANK0,
    REPLICA_ID,
    ROLE_INDEX,
    ROLE_NAME,
    hosts_variable,
    is_port_name,
    label_value,
    replica_name,
)
from atoll.torchx.options import V1BETA2, Options, overlay_problems
from atoll.torchx.pods import least_replicas
from atoll.torchx.resources import resource_rules
from atoll.torchx.wrapping import app_retries, wrapper

MOST_BYTES = 1_400_000
"""etcd takes requests of 1.5 MiB; the controllers add a status."""
_ONLY_V1BETA2 = (
    "queue",
    "queue_priority",
    "retry_limit",
    "retry_pause",
    "warmup_grace",
    "failure_grace",
    "keep_failed",
    "success_ttl",
    "terminal_exit_codes",
    "retryable_exit_codes",
)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")


class InvalidApp(InvalidSpec, ValueError):
    """An app that this scheduler cannot run; `problems` has one line for each reason."""


def checked_wrapper(app: Any, app_id: str, options: Options, dialect: str, version: str) -> dict[str, Any]:
    """The AppWrapper of an app. Raises `InvalidApp` with every reason why there is none."""
    raise_problems(app, list(problems_of(app, app_id, options, dialect, version)))
    return wrapper(app, app_id, options, dialect, version)


def problems_of(app: Any, app_id: str, options: Options, dialect: str, version: str) -> Iterator[str]:
    """Every problem of the app, and of the AppWrapper that is built of it."""
    found = list(app_problems(app, app_id, options, dialect))
    yield from found
    if not found:
        yield from resource_problems(wrapper(app, app_id, options, dialect, version), options)
        return
    made = None
    with suppress(Exception):  # an app with problems cannot always be built
        made = wrapper(app, app_id, options, dialect, version)
    if made is not None:
        yield from _size_problems(made, options)


def raise_problems(app: Any, problems: list[str]) -> None:
    if problems:
        raise InvalidApp(f"the app `{app.name}`", problems)


def app_problems(app: Any, app_id: str, options: Options, dialect: str) -> Iterator[str]:
    """Each rule that the app breaks."""
    if not app.roles:
        yield "roles: an app has at least one"
        return
    if not is_dns_label(app_id) or app_id[0].isdigit():
        yield f"name: `{app_id}` is not a name of a Service: small letters, digits and `-`, a letter first"
    same = Counter(label_value(role.name) for role in app.roles)
    for label in (label for label, count in same.items() if count > 1):
        names = ", ".join(f"`{role.name}`" for role in app.roles if label_value(role.name) == label)
        yield f"roles: {names} have one label `{label}`, so that their logs cannot be told apart; rename one"
    for index, role in enumerate(app.roles):
        yield from role_problems(app, index, role, app_id, options)
    yield from _retry_problems(app, options, dialect)
    yield from _dialect_problems(app, options, dialect)


def role_problems(app: Any, index: int, role: Any, app_id: str, options: Options) -> Iterator[str]:
    where = f"roles[{role.name}]"
    if not role.name:
        yield "roles: a role has a name, by which its pods are found"
    if role.num_replicas < 1:
        yield f"{where}.num_replicas={role.num_replicas}: at least 1"
    name = replica_name(app_id, index, max(role.num_replicas - 1, 0), layout=options.layout)
    if len(name) > LONGEST:
        yield f"{where}: the host name `{name}` has more than {LONGEST} characters; shorten the name of the app"
    if not role.image or any(map(str.isspace, role.image)):
        yield f"{where}.image=`{role.image}`: the name of an image"
    if not role.entrypoint or role.entrypoint == MISSING:
        yield f"{where}.entrypoint: the program that the container runs"
    yield from (f"{where}.args[{i}]={each!r}: a text" for i, each in enumerate(role.args) if not isinstance(each, str))
    yield from resource_rules(f"{where}.resource", role.resource)
    yield from _port_problems(where, role)
    yield from _env_problems(where, app, role)
    yield from mount_problems(where, role.mounts)
    if own := role.metadata.get("kubernetes"):
        yield from overlay_problems(own, f"{where}.metadata.kubernetes")
    least = least_replicas(role)
    if not 0 < least <= role.num_replicas:
        yield f"{where}.min_replicas={least}: from 1 to num_replicas={role.num_replicas}"


def _port_problems(where: str, role: Any) -> Iterator[str]:
    for port, number in role.port_map.items():
        if not is_port_name(port):
            yield f"{where}.port_map.{port}: the name of a port has at most 15 small letters, digits and `-`"
        if not isinstance(number, int) or not 0 < number <= 65535:
            yield f"{where}.port_map.{port}={number!r}: a port from 1 to 65535"


def _env_problems(where: str, app: Any, role: Any) -> Iterator[str]:
    ours = {RANK0, hosts_variable(role.name), hosts_variable(app.roles[0].name), INDEX_VARIABLE}
    for variable, value in role.env.items():
        if _VARIABLE.match(variable) is None:
            yield f"{where}.env.{variable}: not the name of a variable"
        elif variable in ours:
            yield f"{where}.env.{variable}: the scheduler sets this variable; a second one would hide it"
        if not isinstance(value, str):
            yield f"{where}.env.{variable}={value!r}: a text"


def _retry_problems(app: Any, options: Options, dialect: str) -> Iterator[str]:
    for role in app.roles:
        where = f"roles[{role.name}]"
        if role.max_retries < 0:
            yield f"{where}.max_retries={role.max_retries}: a number from 0"
        if role.max_retries > 0 and role.retry_policy == getattr(RetryPolicy, "ROLE", None):
            yield f"{where}.retry_policy=ROLE: an AppWrapper restarts all (APPLICATION) or one replica (REPLICA)"
        if role.max_retries > 0 and role.retry_policy == RetryPolicy.REPLICA and options.layout == "pods":
            yield f"{where}.retry_policy=REPLICA: only the layout `jobs` restarts one replica"
    if options.layout == "jobs" and dialect != V1BETA2 and app_retries(app) > 0:
        yield (
            f"max_retries={app_retries(app)}: MCAD has no limit that holds for restarts of the whole app; "
            "use retry_policy=REPLICA, max_retries=0, or layout=pods, which restarts without end"
        )


def _dialect_problems(app: Any, options: Options, dialect: str) -> Iterator[str]:
    is_elastic = [role for role in app.roles if least_replicas(role) < role.num_replicas]
    if is_elastic and (options.layout == "jobs" or dialect == V1BETA2):
        names = ", ".join(f"`{role.name}` (min_replicas={role.min_replicas})" for role in is_elastic)
        yield f"roles: {names}: this wrapper starts all replicas; leave min_replicas out, or use MCAD and layout=pods"
    if dialect != V1BETA2:
        for name in _ONLY_V1BETA2:
            if getattr(options, name) != Options.__dataclass_fields__[name].default:
                yield f"{name}: {dialect} has no such field; use it with the dialect v1beta2"
        return
    if options.priority is not None:
        yield (
            f"priority={options.priority}: v1beta2 has no such field; name a WorkloadPriorityClass of Kueue with "
            "queue_priority, or a PriorityClass of the pods with priority_class_name"
        )
    if options.queue_priority is not None and options.queue is None:
        yield f"queue_priority=`{options.queue_priority}`: only a queue has priorities; set queue, too"
    sets = len(app.roles) if options.layout == "jobs" else sum(role.num_replicas for role in app.roles)
    if sets > MOST_POD_SETS:
        what = "roles" if options.layout == "jobs" else "pods; layout=jobs needs one set for each role"
        yield f"roles: an AppWrapper has at most {MOST_POD_SETS} pod sets, not {sets} {what}"


def resource_problems(resource: Mapping[str, Any], options: Options) -> Iterator[str]:
    """What is wrong with the resource as it would be sent: its size, and overlays that change what we rely on."""
    yield from _size_problems(resource, options)
    for each in components_of(resource):
        yield from _label_problems(each)
        if each["kind"] in ("Pod", "Job"):
            yield from _overlay_problems(each)


def _size_problems(resource: Mapping[str, Any], options: Options) -> Iterator[str]:
    size = len(json.dumps(resource))
    if size > MOST_BYTES:
        more = "; use layout=jobs, whose size does not grow" if options.layout == "pods" else ""
        yield f"the AppWrapper has {size} bytes, and at most {MOST_BYTES} can be stored{more}"


def _label_problems(made: Mapping[str, Any]) -> Iterator[str]:
    """Labels that an overlay or a long name of a role has made wrong."""
    template = made["spec"]["template"] if made["kind"] == "Job" else {"metadata": {}}
    labels = {**(made["metadata"].get("labels") or {}), **(template["metadata"].get("labels") or {})}
    for key, value in labels.items():
        if not is_label_key(key) or not isinstance(value, str) or (value and not is_label_value(value)):
            what = f"{made['kind']} {made['metadata']['name']}"
            yield f"labels.{key}=`{value}`: {what}: at most 63 letters, digits, `-`, `_` and `.`"


def _overlay_problems(made: Mapping[str, Any]) -> Iterator[str]:
    is_job = made["kind"] == "Job"
    pod = made["spec"]["template"] if is_job else made
    labels = pod["metadata"].get("labels") or {}
    wanted = (INSTANCE, ROLE_INDEX, ROLE_NAME) if is_job else (INSTANCE, ROLE_INDEX, ROLE_NAME, REPLICA_ID)
    for key in wanted:
        if not labels.get(key):
            yield f"overlay.metadata.labels.{key}: no overlay can remove it, because the scheduler relies on it"
    name = CONTAINER if is_job else made["metadata"]["name"]
    containers = pod["spec"].get("containers") or [{}]
    if containers[0].get("name") != name:
        yield f"overlay.spec.containers: the first one is `{name}`, the container of the replica"
    if pod["spec"].get("subdomain") != labels.get(INSTANCE):
        yield "overlay.spec.subdomain: no overlay can change it, because host names have it"
    if is_job and pod["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        yield "overlay.spec.restartPolicy: Never or OnFailure"
