"""Pure: what a launcher does in its namespace, as data: the Role, and the permissions that `doctor` asks for.

A test runs a whole life of runs as a user with this Role alone, and compares the recorded requests with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from atoll.kube.gang import COSCHEDULING_API, Gang
from atoll.kube.settings import KubernetesSettings

ROLE = "atoll-launcher"
_API = "rbac.authorization.k8s.io/v1"


class Right(NamedTuple):
    """What a launcher does with one kind of object, and why."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    purpose: str
    is_needed: bool = True
    """Whether a launcher cannot do without it."""


ALWAYS = (
    Right("batch", "jobs", ("create", "get", "list", "delete"), "a run is one Job"),
    Right("", "pods", ("list",), "the state of each replica"),
    Right("", "pods", ("watch",), "without it, waiting asks every two seconds", is_needed=False),
    Right("", "pods/log", ("get",), "atoll logs"),
    Right("", "events", ("list",), "why a replica has no pod, or waits"),
)
"""Every run uses these."""
CONFIG_MAPS = Right("", "configmaps", ("create",), 'with command_args, or bootstrap="pip" without pip_index')
POD_GROUPS = Right(COSCHEDULING_API.partition("/")[0], "podgroups", ("create",), "with gang=coscheduling:SCHEDULER")
_KUEUE = "kueue.x-k8s.io"
LOCAL_QUEUES = Right(_KUEUE, "localqueues", ("get", "list"), "whether the queue of gang=kueue:QUEUE exists", False)
WORKLOADS = Right(_KUEUE, "workloads", ("list",), "with gang=kueue:QUEUE: why a run waits, and its end there", False)
PENDING = Right(
    f"visibility.{_KUEUE}", "localqueues/pendingworkloads", ("get",), "with gang=kueue:QUEUE: the position", False
)
OPTIONAL = (CONFIG_MAPS, POD_GROUPS, WORKLOADS, PENDING)
"""Only runs with these settings need them."""
LOOKS = (
    Right("", "namespaces", ("get",), "the Pod Security level that the namespace enforces"),
    Right("", "serviceaccounts", ("get",), "whether the ServiceAccount of the replicas exists"),
    Right("", "persistentvolumeclaims", ("get",), "whether the volumes of the replicas exist"),
    LOCAL_QUEUES,
)
"""A launch and `atoll doctor` report more problems with these, and no run needs them."""


def rights(settings: KubernetesSettings) -> tuple[Right, ...]:
    """What runs with these settings need."""
    return (*ALWAYS, *_optional(settings))


def _optional(settings: KubernetesSettings) -> Iterator[Right]:
    has_wheel = settings.bootstrap is not None and settings.pip_index is None
    if has_wheel or settings.command_args is not None:
        yield CONFIG_MAPS
    if Gang.parse(settings.gang).kind == "coscheduling":
        yield POD_GROUPS
    if Gang.parse(settings.gang).kind == "kueue":
        yield from (WORKLOADS, PENDING, LOCAL_QUEUES)


def role(namespace: str, settings: KubernetesSettings) -> dict[str, Any]:
    """The least Role of a launcher of such runs."""
    return role_of(namespace, rights(settings))


def role_of(namespace: str, needed: Sequence[Right]) -> dict[str, Any]:
    """The Role with these rights."""
    return {
        "apiVersion": _API,
        "kind": "Role",
        "metadata": {"name": ROLE, "namespace": namespace},
        "rules": [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)} for right in needed
        ],
    }


def role_text(namespace: str, settings: KubernetesSettings) -> str:
    """The Role as YAML for `kubectl apply -f -`; what only other settings need stands in comments."""
    return text_of(namespace, rights(settings), (*OPTIONAL, *LOOKS))


def text_of(namespace: str, needed: Sequence[Right], optional: Sequence[Right]) -> str:
    """The Role with the needed rights, and the others in comments."""
    others = [right for right in optional if right not in needed]
    lines = [
        f"apiVersion: {_API}",
        "kind: Role",
        f"metadata: {{name: {ROLE}, namespace: {namespace}}}",
        "rules:",
        *(f"  - {_rule(right)}" for right in needed),
        "# Add these only where you need them:",
        *(f"#  - {_rule(right)}" for right in others),
        "# Give the Role to a user or to a ServiceAccount:",
        f"#   kubectl -n {namespace} create rolebinding {ROLE} --role={ROLE} --user=NAME",
        f"#   kubectl -n {namespace} create rolebinding {ROLE} --role={ROLE} --serviceaccount={namespace}:NAME",
    ]
    return "\n".join(lines)


def _rule(right: Right) -> str:
    """One rule in one line, with its purpose."""
    group = right.group or '""'
    rule = f"{{apiGroups: [{group}], resources: [{right.resource}], verbs: [{', '.join(right.verbs)}]}}"
    return f"{rule}  # {right.purpose}"
