"""Starts all replicas of a run on MCAD again, by delete and re-create: MCAD itself has no limit for restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from atoll._time import Deadline
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
    tails = wrappers.last_lines(seen, handle.replicas)
    again = next_attempt(seen, end_annotation(rows, tails, attempt_of(seen.wrapper)))
    log.warning(
        "run %s: attempt %s: all replicas start again", context.run_id, again["metadata"]["annotations"][ATTEMPT]
    )
    wrappers.delete(seen.wrapper)
    left = wrappers.wait_until_gone(seen.wrapper, namespace, handle.native_id, limit, job=seen.job)
    if left:
        names = ", ".join(str(each["metadata"]["name"]) for each in left)
        text = f"AppWrapper `{handle.native_id}` was deleted to start it again, and {names} has not ended"
        raise BackendUnavailable(text, executor=handle.executor, operation="restart")
    if is_cancelled is not None and is_cancelled():
        log.info("run %s was cancelled: it is not started again", context.run_id)
        return False
    wrappers.jobs.create(again, namespace, context.run_id)
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
