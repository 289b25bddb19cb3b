"""`atoll doctor kubernetes`: can this machine reach the cluster, and may it do what a run needs?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.errors import AtollError, ConfigError, RunNotFound
from atoll.executors.base import Check
from atoll.kube import gpus
from atoll.kube.gang import Gang
from atoll.kube.jobs import Jobs
from atoll.kube.looks import NAMESPACE_HINT, Looks, Version, server_version
from atoll.kube.nodes import room_text, rooms
from atoll.kube.preflight import version_problem
from atoll.kube.references import Reference, references
from atoll.kube.role import Right, rights
from atoll.kube.settings import KubernetesSettings
from atoll.kube.volumes import pod_volumes, volume_problems

_TRIES = 3
"""How often doctor asks a cluster that does not answer, whatever the patience of a launch."""
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_WORDS = {
    "ServiceAccount": "service account",
    "PriorityClass": "priority class",
    "RuntimeClass": "runtime class",
    "Secret": "secret",
    "ConfigMap": "config map",
    "PersistentVolumeClaim": "volume",
}


def setup_checks(jobs: Jobs, settings: KubernetesSettings, needed: Sequence[Right] | None = None) -> list[Check]:
    """One finding for each part of the setup; the rest is left out if the cluster does not answer.

    `needed` are the rights of a launcher, if they are not those of these settings.
    """
    try:
        version = server_version(jobs, "doctor", tries=_TRIES)
        host = jobs.client.connection.host
    except AtollError as exc:
        return [Check("cluster", False, exc.message, exc.hint or "", is_input=isinstance(exc, ConfigError))]
    text = ".".join(map(str, version))
    namespace = settings.namespace or jobs.client.connection.place.namespace
    old = version_problem(version) or ""
    looks = Looks(jobs, namespace, "doctor")
    found = [Check("cluster", True, f"{host}, Kubernetes {text}"), Check("version", not old, text, old)]
    try:
        found += _permission_checks(jobs, namespace, rights(settings) if needed is None else needed)
        found += _namespace_checks(looks, settings)
        found += _queue_checks(looks, settings, version)
        found += _node_checks(looks, settings)
    except AtollError as exc:
        found.append(Check("cluster", False, exc.message, exc.hint or ""))
    return found


def _permission_checks(jobs: Jobs, namespace: str, needed: Sequence[Right]) -> Iterator[Check]:
    try:
        denied = [(right, verb) for right in needed for verb in right.verbs if not _may(jobs, namespace, right, verb)]
    except AtollError as exc:
        yield Check("permissions", False, exc.message, exc.hint or "")
        return
    missing = [f"{verb} {right.resource}" for right, verb in denied if right.is_needed]
    others = [f"{verb} {right.resource}: {right.purpose}" for right, verb in denied if not right.is_needed]
    text = f"missing in `{namespace}`: {', '.join(missing)}" if missing else f"in `{namespace}`"
    hint = "the same command with --permissions prints the Role to ask for" if denied else ""
    yield Check("permissions", not missing, "; ".join([text, *(f"no {other}" for other in others)]), hint)


def _may(jobs: Jobs, namespace: str, right: Right, verb: str) -> bool:
    resource, _, part = right.resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": right.group, "resource": resource}
    spec = {"resourceAttributes": {**attributes, **({"subresource": part} if part else {})}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
    answer = jobs.client.call("POST", _REVIEW, "our permissions", "doctor", body=review)
    return bool((answer.body.get("status") or {}).get("allowed"))


def _namespace_checks(looks: Looks, settings: KubernetesSettings) -> Iterator[Check]:
    name = looks.namespace
    try:
        level = looks.pod_security()
    except RunNotFound:
        yield Check("namespace", False, f"there is no namespace `{name}`", NAMESPACE_HINT, is_input=True)
        return
    except AtollError as exc:
        yield Check("namespace", False, f"`{name}`: {exc.message}", exc.hint or "")
        return
    fits = level != "restricted" or settings.pod_security == "restricted"
    shown = "we may not look" if level is None else level or "none enforced"
    hint = "" if fits else 'set pod_security="restricted"'
    yield Check("namespace", fits, f"`{name}`, Pod Security: {shown}", hint)
    for thing in _references(settings):
        found = looks.exists(thing)
        text = {True: str(thing), False: f"there is no {thing}", None: f"{thing}: we may not look"}[found]
        yield Check(_WORDS[thing.kind], found is not False, text)


def _references(settings: KubernetesSettings) -> list[Reference]:
    """The objects that every run with these settings names."""
    pod = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
        "volumes": [] if any(volume_problems(settings.volumes)) else pod_volumes(settings.volumes)[0],
    }
    return references({"spec": {"template": {"spec": pod}}})


def _queue_checks(looks: Looks, settings: KubernetesSettings, version: Version) -> Iterator[Check]:
    gang = Gang.parse(settings.gang)
    if problems := list(looks.gang_problems(gang, version, settings.queue_priority)):
        yield from (Check("gang", False, problem) for problem in problems)
    elif gang.kind != "none":
        yield Check("gang", True, settings.gang)
    for system, names in looks.queues().items():
        text = "we may not look" if names is None else ", ".join(names) or "none"
        yield Check("queues", True, f"{system}: {text}")


def _node_checks(looks: Looks, settings: KubernetesSettings) -> Iterator[Check]:
    nodes = looks.listed("nodes")
    if nodes is None:
        yield Check("nodes", True, "we may not look, which a launcher does not have to")
        return
    pods = looks.listed("pods")
    own = [settings.gpu_resource_key] if settings.gpu_resource_key else []
    keys = [*own, gpus.NVIDIA, gpus.AMD]
    added = [each for key in keys for each in gpus.tolerations((), gpu_key=key, spot=settings.spot, node_lost_s=0)]
    selector = dict(settings.node_selector)
    if settings.instance_type:
        selector[gpus.INSTANCE_TYPE] = settings.instance_type
    found = rooms(
        nodes,
        pods or (),
        selector=selector,
        tolerations=[*settings.tolerations, *added],
        gpu_keys=list(dict.fromkeys(keys)),
    )
    cpus, memory_gib = settings.default_cpus or 0.0, settings.default_memory_gib or 0.0
    text = room_text(found, cpus=cpus, memory_gib=memory_gib, is_complete=pods is not None)
    yield Check("nodes", True, text)
