"""What the cluster says before a launch (`preflight`), and `atoll doctor appwrapper`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from atoll.errors import AtollError, ConfigError, Conflict, InvalidSpec
from atoll.executors.appwrapper.request import in_dialect
from atoll.executors.appwrapper.role import rights
from atoll.executors.appwrapper.settings import AUTO, AppWrapperSettings
from atoll.executors.appwrapper.wrappers import Wrappers
from atoll.executors.base import Check
from atoll.kube import doctor
from atoll.kube.appwrapper import DIALECTS, Dialect, components_of
from atoll.kube.gang import Gang
from atoll.kube.looks import Looks
from atoll.kube.preflight import check_server


def check_cluster(wrappers: Wrappers, request: Mapping[str, Any], run_id: str, settings: AppWrapperSettings) -> None:
    """Raise `InvalidSpec` with every reason why this cluster cannot run the request, or `Conflict`.

    The AppWrapper controller reports a bad Job only after it has accepted the AppWrapper, so that the objects inside
    are checked by the API server first, one by one.
    """
    try:
        dialect = wrappers.dialect("submit")
    except ConfigError as exc:
        if exc.reason != "no_appwrapper":
            raise
        raise InvalidSpec(f"run `{run_id}`", [f"dialect: {exc.message}"]) from exc
    problems = [*_dialect_problems(wrappers, dialect, settings)]
    if problems:  # no AppWrapper of this form can be sent
        raise InvalidSpec(f"run `{run_id}`", problems)
    namespace = str(request["namespace"])
    wrapper = in_dialect(request["appwrapper"], dialect)
    if wrappers.jobs.same(wrapper, namespace, "submit") is not None:
        return  # the launch adopts it or reports the conflict
    if taken := wrappers.taken(wrapper, namespace):
        raise Conflict(run_id, taken)
    job, *others = components_of(wrapper)
    sent = {"namespace": namespace, "job": job, "extras": [*others, *request["extras"], wrapper]}
    before = [*_queue_problems(wrappers, namespace, settings)]
    check_server(wrappers.jobs, sent, run_id, Gang("none"), before=before)


def _dialect_problems(wrappers: Wrappers, dialect: Dialect, settings: AppWrapperSettings) -> Iterator[str]:
    if settings.dialect != AUTO and not wrappers.is_served(dialect):
        others = [each.name for each in DIALECTS.values() if wrappers.is_served(each)]
        there = f"; it serves {', '.join(others)}" if others else ""
        yield f"dialect=`{dialect.name}`: the cluster does not serve {dialect.api_version}{there}"
    yield from settings.dialect_problems(dialect)


def _queue_problems(wrappers: Wrappers, namespace: str, settings: AppWrapperSettings) -> Iterator[str]:
    if settings.queue is None:
        return
    looks = Looks(wrappers.jobs, namespace)
    for problem in looks.gang_problems(Gang("kueue", settings.queue), (0, 0), _priority_class(settings)):
        yield _in_our_words(problem, settings.queue)


def _priority_class(settings: AppWrapperSettings) -> str | None:
    """The WorkloadPriorityClass; a number is a priority of MCAD."""
    return settings.priority if isinstance(settings.priority, str) else None


def _in_our_words(text: str, queue: str) -> str:
    """A sentence about the settings of the Kubernetes executor, with the names of ours."""
    return text.replace(f"gang=`kueue:{queue}`", f"queue=`{queue}`").replace("queue_priority", "priority")


def _in_our_names(check: Check, queue: str) -> Check:
    name = "queue" if check.name == "gang" else check.name
    return replace(check, name=name, message=_in_our_words(check.message, queue))


def setup_checks(wrappers: Wrappers, settings: AppWrapperSettings) -> list[Check]:
    """One finding for each part of the setup; the rest is left out if the cluster does not answer."""
    inner = settings.job_settings()
    if settings.queue is not None:
        inner = replace(inner, gang=f"kueue:{settings.queue}", queue_priority=_priority_class(settings))
    found = doctor.setup_checks(wrappers.jobs, inner, rights(settings))
    if not found[0].ok:
        return found
    found = [_in_our_names(each, settings.queue or "") for each in found]
    return [*found[:2], *_wrapper_checks(wrappers, settings), *found[2:]]


def _wrapper_checks(wrappers: Wrappers, settings: AppWrapperSettings) -> Iterator[Check]:
    try:
        dialect = wrappers.dialect("doctor")
        problems = [*_dialect_problems(wrappers, dialect, settings)]
    except AtollError as exc:
        yield Check("appwrapper", False, exc.message, exc.hint or "")
        return
    for problem in problems:
        yield Check("appwrapper", False, problem, is_input=True)
    if not problems:
        controller = "MCAD" if dialect.is_mcad else "the AppWrapper controller"
        yield Check("appwrapper", True, f"{dialect.api_version}, of {controller}")
