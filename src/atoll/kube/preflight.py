"""What the API server says about a request before anything is recorded.

Its version, the gang scheduler, a dry run of every object that the launch creates, Pod Security, and the objects that
the run names. All problems are reported together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from atoll.errors import BackendError, ConfigError, InvalidSpec, RunNotFound
from atoll.kube.errors import Refusal
from atoll.kube.gang import KUEUE_PRIORITY, Gang, job_for
from atoll.kube.jobs import Jobs
from atoll.kube.looks import NAMESPACE_HINT, Looks, Version, server_version
from atoll.kube.references import references
from atoll.kube.security import level_problems

OLDEST: Version = (1, 29)
"""The first version of Kubernetes in which a failed index can fail alone by default."""
_NOT_ADMITTED = re.compile(r"(?:would violate|violates) PodSecurity \"(?P<level>[a-z]+)", re.I)
_MISSING = (
    "create what is missing, or correct the name: `kubectl -n {namespace} get secrets,configmaps,pvc,serviceaccounts`"
)
_HINT = 'set pod_security="restricted" and, for an image that runs as root, run_as_user'

log = logging.getLogger("atoll.executors")


def check_server(
    jobs: Jobs, request: Mapping[str, Any], run_id: str, gang: Gang, *, before: Sequence[str] = ()
) -> None:
    """Raise `InvalidSpec` with every reason why this cluster cannot run the request; `before` are known ones."""
    version = server_version(jobs)
    if problem := version_problem(version):
        raise InvalidSpec(f"run `{run_id}`", [f"cluster: {problem}"])
    namespace = str(request["namespace"])
    job, looks = job_for(request, version), Looks(jobs, namespace)
    priority = (job["metadata"].get("labels") or {}).get(KUEUE_PRIORITY)
    problems, hint = [*before, *looks.gang_problems(gang, version, priority)], None
    try:
        warnings = _dry_run(jobs, job, namespace, problems)
    except RunNotFound as exc:
        problems.append(f"namespace=`{namespace}`: {exc.message}")
        raise InvalidSpec(f"run `{run_id}`", problems, hint=NAMESPACE_HINT) from exc
    except BackendError as exc:
        if exc.reason != "taken":
            raise
        return  # the Job is there: the launch adopts it or reports the conflict
    for thing in request["extras"]:
        try:
            _dry_run(jobs, thing, namespace, problems)
        except BackendError as exc:
            is_known = isinstance(exc, RunNotFound) and problems  # the cluster has no such kind: the gang says so
            if exc.reason != "taken" and not is_known:
                raise
    if found := _pod_security_problems(looks, job["spec"]["template"]["spec"], warnings, run_id):
        problems += found
        hint = _HINT
    if missing := list(looks.missing(references(job, request["extras"]))):
        problems += missing
        hint = hint or _MISSING.format(namespace=namespace)
    if problems:  # one of the namespace comes for each object
        raise InvalidSpec(f"run `{run_id}`", [*dict.fromkeys(problems)], hint=hint)


def version_problem(version: Version) -> str | None:
    """Why no run works on a server of this version; None if runs do."""
    if version >= OLDEST:
        return None
    have, need = (".".join(map(str, each)) for each in (version, OLDEST))
    return f"Kubernetes {have}; Atoll needs {need} or newer, in which a failed rank does not end the run"


def _dry_run(jobs: Jobs, thing: Mapping[str, Any], namespace: str, problems: list[str]) -> tuple[str, ...]:
    """The warnings of the API server about an object; `problems` gets each reason why it would refuse it."""
    try:
        return jobs.dry_run(thing, namespace).warnings
    except ConfigError as exc:
        problems += _causes(exc)
    return ()


def _causes(exc: ConfigError) -> list[str]:
    """Each field that the API server refuses, with its reason; its whole message if it names none."""
    body = exc.__cause__.body if isinstance(exc.__cause__, Refusal) else {}
    causes = (body.get("details") or {}).get("causes") or []
    return [f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in causes] or [exc.message]


def _pod_security_problems(looks: Looks, pod: Mapping[str, Any], warnings: Sequence[str], run_id: str) -> list[str]:
    """Why the namespace will not admit the pods. The other warnings of the API server are logged."""
    problems, enforced = [], None
    with suppress(RunNotFound):  # the dry run says whether there is such a namespace
        enforced = looks.pod_security()
    for text in warnings:
        level = _NOT_ADMITTED.search(text)
        if level is not None and _is_enforced(level["level"], enforced):
            problems.append(f"namespace: {text}")
        else:
            log.warning("run %s: %s", run_id, text)
    violations = level_problems(enforced or "", pod)
    return problems or [f"namespace: would violate PodSecurity `{enforced}`: {each}" for each in violations]


def _is_enforced(level: str, enforced: str | None) -> bool:
    """Whether a namespace that warns of this level also enforces it. If we may not look, we take it that it does:
    a namespace without another level for warnings warns of what it enforces."""
    return enforced is None or enforced == level
