"""Reads what Kueue says about a Job or an AppWrapper in one of its queues. `kube.kueue` has the meaning.

A state costs one request, one more while the object waits (its position), and one for the name of a preemptor that was
not asked for yet. Without a permission, or without an answer of Kueue, the state says less, and nothing fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, AuthError, CapacityError, RunNotFound, SubmitError
from atoll.kube import kueue
from atoll.kube.client import KubeClient
from atoll.kube.kueue import Cause, QueueState
from atoll.kube.pod_state import seconds

Object = dict[str, Any]
_POSITION_S = 4.0
"""How old a position may be that a status shows again."""
_NO_POSITION_S = 60.0
"""After a list of pending workloads that we may not read, or that is not there."""
_VERDICT_S = 3.0
"""How long a launch waits for Kueue's first look at it, which takes 0.2 s in an idle queue."""
_NO_ROOM = "ask for less, or use another queue: `kubectl describe localqueue,clusterqueue` has the quotas"

log = logging.getLogger("atoll.executors")


class Queues:
    """The queues of Kueue in one cluster."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self._version = 0
        """The index in `kueue.VERSIONS` of the newest version that this cluster may have."""
        self._positions: dict[tuple[str, str], tuple[float, Sequence[Object]]] = {}
        """The pending workloads of each queue, and until when they are shown again."""
        self._preemptors: dict[str, Object | None] = {}
        self._evictions: dict[tuple[str, str], int] = {}

    def state(self, thing: Mapping[str, Any], *, with_position: bool = True) -> QueueState | None:
        """Why Kueue holds this object back; None if it has no queue, or if the cluster has no Kueue."""
        queue, metadata = kueue.queue_of(thing), thing["metadata"]
        if not queue:
            return None
        uid, namespace = str(metadata["uid"]), str(metadata["namespace"])
        try:
            workload = kueue.workload_of(self._workloads(namespace, uid), uid)
        except RunNotFound:
            return None
        except AtollError as exc:
            if isinstance(exc, AuthError) and exc.reason != "forbidden":
                raise
            return kueue.unreadable(queue, exc.message)
        created = seconds(metadata.get("creationTimestamp"))
        waited_s = 0.0 if created is None else self._clock.time() - created
        found = kueue.queue_state(workload, queue=queue, waited_s=waited_s)
        if with_position and found.is_queued:
            found = kueue.with_position(found, workload, self._pending(namespace, queue))
        if with_position and (preemptor := found.preemptor_uid) is not None:
            found = kueue.with_preemptor(found, self._preemptor(namespace, preemptor))
        return found

    def check_fits(self, thing: Mapping[str, Any], run_id: str) -> None:
        """Raise `SubmitError` if its queue never has room for this new object, which only Kueue knows, and only now.

        An error of this look is no reason to leave: the object exists, and its status says more later.
        """
        try:
            found = self._verdict(thing)
        except AtollError as exc:
            log.warning("run %s: cannot see whether it fits into its queue: %s", run_id, exc.message)
            return
        if found is None or not found.is_hopeless:
            return
        name, executor = str(thing["metadata"]["name"]), self._client.executor
        text = f"run `{run_id}`: {found.message}"
        why = CapacityError(text, executor=executor, operation="submit", reason=found.cause, hint=_NO_ROOM)
        raise SubmitError(text, left_running=[name], created=[name], executor=executor, hint=_NO_ROOM) from why

    def _verdict(self, thing: Mapping[str, Any]) -> QueueState | None:
        """The state of a new object after Kueue's first look at it, or what is known after a few seconds."""
        deadline, pauses = Deadline(_VERDICT_S, self._clock), backoff(0.1, factor=1.5, cap_s=0.5)
        while True:
            found = self.state(thing, with_position=False)
            if found is None or found.cause not in (Cause.NEW, Cause.IN_LINE) or deadline.is_past:
                return found
            deadline.sleep(next(pauses))

    def evictions(self, thing: Mapping[str, Any], *, may_ask: bool = True) -> int:
        """How often Kueue has stopped an object that runs now. Read once for each time that it started."""
        metadata, started = thing["metadata"], (thing.get("status") or {}).get("startTime")
        key = (str(metadata["uid"]), str(started))
        if key not in self._evictions and may_ask and kueue.queue_of(thing):
            found = self.state(thing, with_position=False)
            if found is None or started is None:
                return 0 if found is None else found.evictions
            self._evictions[key] = found.evictions
        return self._evictions.get(key, 0)

    def _workloads(self, namespace: str, uid: str) -> Sequence[Object]:
        """The Workloads of this object. `RunNotFound` if the cluster has no Kueue."""
        what = "the Workload in the queue of Kueue"
        for number in range(self._version, len(kueue.VERSIONS)):
            path = kueue.workloads_path(namespace, kueue.VERSIONS[number])
            try:
                found = self._client.get(path, what, "status", query=kueue.selector(uid), tries=1)
            except RunNotFound:
                continue
            self._version = number
            return list(found.get("items") or ())
        raise RunNotFound("the cluster has no Kueue", executor=self._client.executor, operation="status")

    def _pending(self, namespace: str, queue: str) -> Sequence[Object]:
        """What waits in this queue, in order; empty if Kueue's visibility server does not say it."""
        now = self._clock.monotonic()
        until, found = self._positions.get((namespace, queue), (float("-inf"), ()))
        if now < until:
            return found
        path = kueue.pending_path(namespace, queue, kueue.VERSIONS[self._version])
        try:
            answer = self._client.get(path, f"what waits in queue `{queue}`", "status", tries=1)
            kept_s, found = _POSITION_S, list(answer.get("items") or ())
        except AtollError as exc:
            log.debug("no positions in queue `%s`: %s", queue, exc.message)
            kept_s, found = _NO_POSITION_S, ()
        self._positions[namespace, queue] = (now + kept_s, found)
        return found

    def _preemptor(self, namespace: str, uid: str) -> Object | None:
        """The Workload of another object of this namespace; None if it is in another one."""
        if uid not in self._preemptors:
            try:
                found = kueue.workload_of(self._workloads(namespace, uid), uid)
            except AtollError:
                found = None
            self._preemptors[uid] = None if found is None else dict(found)
        return self._preemptors[uid]
