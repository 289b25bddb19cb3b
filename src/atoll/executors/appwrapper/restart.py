"""Starts all replicas of a run on MCAD again, by delete and re-create: MCAD itself has no limit for restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll._time import Deadline, backoff
from atoll.errors import BackendUnavailable
from atoll.executors.appwrapper.reading import (
    Snapshot,
    attempt_of,
    crowded_out,
    end_annotation,
    ended_rows,
    has_restart,
    restarts_by_atoll,
)
from atoll.executors.appwrapper.wrappers import Wrappers
from atoll.handle import RunHandle
from atoll.kube.jobs import Object
from atoll.kube.names import ATTEMPT, ENDED, context_of

log = logging.getLogger("atoll.executors")


def restarted(
    wrappers: Wrappers, namespace: str, handle: RunHandle, limit: Deadline, is_cancelled: Callable[[], bool] | None
) -> bool:
    """Whether a new attempt was started. Two callers start one, because its name is that of the attempt before.

    A cancel that finds the AppWrapper deleted has nothing to stop, so `is_cancelled` is asked before it is created.
    """
    if not wrappers.dialect().is_mcad:
        return False
    seen = wrappers.look(namespace, handle.native_id)
    rows = ended_rows(seen, handle.replicas)
    if seen.wrapper is None or seen.job is None or rows is None or not has_restart(seen.wrapper, rows):
        return False
    if seen.wrapper["metadata"].get("deletionTimestamp") or (context := context_of(seen.wrapper)) is None:
        return False
    files = _owned_files(wrappers, namespace, seen.wrapper, seen.job)
    tails = wrappers.last_lines(seen, handle.replicas)
    again = next_attempt(seen, end_annotation(rows, tails, attempt_of(seen.wrapper)))
    log.warning(
        "run %s: attempt %s: all replicas start again", context.run_id, again["metadata"]["annotations"][ATTEMPT]
    )
    wrappers.delete(seen.wrapper)
    left = wrappers.wait_until_gone(seen.wrapper, namespace, handle.native_id, limit, job=seen.job)
    left = left or _left_files(wrappers, namespace, files, limit)
    if left:
        names = ", ".join(str(each["metadata"]["name"]) for each in left)
        text = f"AppWrapper `{handle.native_id}` was deleted to start it again, and {names} has not ended"
        raise BackendUnavailable(text, executor=handle.executor, operation="restart")
    if is_cancelled is not None and is_cancelled():
        log.info("run %s was cancelled: it is not started again", context.run_id)
        return False
    created, _ = wrappers.jobs.create(again, namespace, context.run_id)
    for each in files:
        wrappers.jobs.create_owned(_as_sent(each), created, namespace)
    return True


def next_attempt(seen: Snapshot, end: str) -> dict[str, Any]:
    """The same AppWrapper as it was sent, with the number of the next attempt and the end of this one."""
    assert seen.wrapper is not None
    metadata = seen.wrapper["metadata"]
    before = restarts_by_atoll(seen.wrapper)
    key, there = f"{ENDED}{before}", metadata["annotations"]
    gone = crowded_out(there, key, end)
    annotations = {name: value for name, value in there.items() if name not in gone}
    annotations |= {ATTEMPT: str(before + 1), key: end}
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
    return {
        "apiVersion": seen.wrapper["apiVersion"],
        "kind": seen.wrapper["kind"],
        "metadata": {**kept, "annotations": annotations},
        "spec": seen.wrapper["spec"],
    }


def _owned_files(
    wrappers: Wrappers, namespace: str, wrapper: Mapping[str, Any], job: Mapping[str, Any]
) -> list[Object]:
    """The ConfigMaps of the run that its pods mount. The AppWrapper owns them, so they are deleted with it."""
    volumes = job["spec"]["template"]["spec"].get("volumes") or ()
    mounted = [str((each.get("configMap") or {}).get("name") or "") for each in volumes]
    names = sorted({name for name in mounted if name.startswith(f"{wrapper['metadata']['name']}-")})
    found = [_file(wrappers, namespace, name) for name in names]
    return [each for each in found if each is not None and wrapper["metadata"]["uid"] in _owner_uids(each)]


def _file(wrappers: Wrappers, namespace: str, name: str) -> Object | None:
    return wrappers.jobs.same(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}, namespace, "restart"
    )


def _owner_uids(thing: Mapping[str, Any]) -> list[str]:
    return [str(each.get("uid")) for each in thing["metadata"].get("ownerReferences") or ()]


def _left_files(wrappers: Wrappers, namespace: str, files: Sequence[Object], limit: Deadline) -> list[Object]:
    """Wait until Kubernetes has deleted the ConfigMaps of the attempt before. Returns what is left at the deadline."""
    pauses = backoff(0.1, factor=1.5, cap_s=1.0)
    while True:
        found = [(each, _file(wrappers, namespace, each["metadata"]["name"])) for each in files]
        left = [each for each, there in found if there and there["metadata"]["uid"] == each["metadata"]["uid"]]
        if not left or limit.is_past:
            return left
        limit.sleep(next(pauses))


def _as_sent(thing: Object) -> Object:
    """The object without what the API server has added."""
    kept = {
        key: thing["metadata"][key]
        for key in ("name", "namespace", "labels", "annotations")
        if key in thing["metadata"]
    }
    return {**thing, "apiVersion": "v1", "kind": "ConfigMap", "metadata": kept}
