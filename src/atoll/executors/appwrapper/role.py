"""Pure: what a launcher of AppWrappers does in its namespace, as data. See `kube.role`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.executors.appwrapper.settings import AppWrapperSettings
from atoll.kube import role as jobs
from atoll.kube.role import Right


def rights(settings: AppWrapperSettings) -> tuple[Right, ...]:
    """What runs with these settings need."""
    return (*_wrappers(settings), *_inside(settings), *_reading())


def _wrappers(settings: AppWrapperSettings) -> Iterator[Right]:
    group = settings.shown_dialect.group
    yield Right(group, "appwrappers", ("create", "get", "list", "delete"), "a run is one AppWrapper")
    if not settings.shown_dialect.is_mcad:
        purpose = "keeps exit code and last lines of a failed run, and wakes the controller"
        yield Right(group, "appwrappers", ("patch",), purpose, is_needed=False)


def _inside(settings: AppWrapperSettings) -> Iterator[Right]:
    yield Right("batch", "jobs", ("create", "get"), "the Job inside: the controller asks whether you may create it")
    yield Right("batch", "jobs", ("delete",), "stops a Job whose AppWrapper was removed without it", is_needed=False)
    if settings.hostnames:
        yield Right("", "services", ("create", "get"), "with hostnames: the Service inside")
    has_wheel = settings.bootstrap is not None and settings.pip_index is None
    if has_wheel or settings.command_args is not None:
        yield jobs.CONFIG_MAPS
        if settings.shown_dialect.is_mcad:
            yield Right("", "configmaps", ("get",), "with restarts: MCAD deletes them, and they are created again")
    if settings.queue is not None:
        yield from (jobs.WORKLOADS, jobs.PENDING, jobs.LOCAL_QUEUES)


def _reading() -> Iterator[Right]:
    yield from (right for right in jobs.ALWAYS if right.resource != "jobs")


def role(namespace: str, settings: AppWrapperSettings) -> dict[str, Any]:
    """The least Role of a launcher of such runs."""
    return jobs.role_of(namespace, rights(settings))


def role_text(namespace: str, settings: AppWrapperSettings) -> str:
    """The Role as YAML for `kubectl apply -f -`; what only other settings need stands in comments."""
    others = [
        Right("", "services", ("create", "get"), "with hostnames: the Service inside"),
        jobs.CONFIG_MAPS,
        jobs.WORKLOADS,
        jobs.PENDING,
        *jobs.LOOKS,
    ]
    return jobs.text_of(namespace, rights(settings), others)
