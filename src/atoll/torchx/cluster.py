"""Requests to the cluster: which dialect it serves, and the pods and the Workload of an app.

AppWrappers themselves are read and written by the scheduler with the official client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from atoll._time import SYSTEM_CLOCK
from atoll.errors import AtollError, AuthError, BackendError, BackendUnavailable, ConfigError, RunNotFound
from atoll.kube import kueue
from atoll.kube.client import KubeClient, path_to
from atoll.kube.connection import Connection
from atoll.kube.pod_state import seconds
from atoll.torchx.names import INSTANCE, MANAGED_BY, MANAGER, ROLE_NAME
from atoll.torchx.options import DIALECTS

MERGE_PATCH = "application/merge-patch+json"
_TIMEOUT_S, _PATIENCE_S = 30.0, 30.0

log = logging.getLogger(__name__)


class Cluster:
    """One cluster, for one scheduler."""

    def __init__(self, connection: Connection) -> None:
        self.client = KubeClient(
            connection, executor="kubernetes_mcad", timeout_s=_TIMEOUT_S, patience_s=_PATIENCE_S, clock=SYSTEM_CLOCK
        )
        self._served: Sequence[str] | None = None
        self._kueue = kueue.VERSIONS[0]
        """The newest version of Kueue's objects that this cluster may have."""

    def served(self) -> Sequence[str] | None:
        """The dialects that the cluster serves, the best first; None if it cannot be asked."""
        if self._served is None:
            try:
                groups = self.client.get("/apis", "API groups", "discovery", tries=1).get("groups") or []
            except (BackendError, ConfigError) as exc:
                log.debug("cannot ask the cluster for its API groups: %s", exc)
                return None
            found = {each["groupVersion"] for group in groups for each in group.get("versions") or ()}
            self._served = [dialect for dialect in DIALECTS if dialect in found]
        return self._served

    def pods(
        self, namespace: str, name: str | None = None, role: str | None = None, *, must_be_allowed: bool = False
    ) -> list[Any] | None:
        """The pods of an app, of one of its roles, or of all apps, in one request; None if they cannot be read.
        Raises `AuthError` if they never can and `must_be_allowed`."""
        wanted = {MANAGED_BY: MANAGER} if name is None else {INSTANCE: name}
        wanted |= {} if role is None else {ROLE_NAME: role}
        return self._labelled("pods", path_to("pods", namespace), wanted, must_be_allowed=must_be_allowed)

    def jobs(self, namespace: str, name: str | None = None) -> list[Any] | None:
        """The Jobs of an app or of all apps, in one request; None if they cannot be read."""
        wanted = {MANAGED_BY: MANAGER} if name is None else {INSTANCE: name}
        return self._labelled("Jobs", path_to("jobs", namespace, api="/apis/batch/v1"), wanted)

    def _labelled(
        self, what: str, path: str, labels: Mapping[str, str], *, must_be_allowed: bool = False
    ) -> list[Any] | None:
        selector = ",".join(f"{label}={value}" for label, value in labels.items())
        try:
            answer = self.client.get(path, what, "status", query={"labelSelector": selector}, tries=2)
        except AuthError as exc:
            if must_be_allowed:
                raise
            log.warning("the %s cannot be read, so that the state is only what the wrapper says: %s", what, exc.message)
            return None
        except (BackendUnavailable, ConfigError) as exc:
            log.debug("the %s cannot be read: %s", what, exc)
            return None
        return list(answer.get("items") or [])

    def queue_state(self, wrapper: Mapping[str, Any]) -> kueue.QueueState | None:
        """What Kueue says about a wrapper in one of its queues; None if its Workload cannot be read."""
        queue, created = kueue.queue_of(wrapper), seconds(wrapper["metadata"].get("creationTimestamp"))
        try:
            found = self.workload(wrapper)
        except AtollError as exc:
            log.warning("the Workload in queue `%s` cannot be read: %s", queue, exc.message)
            return None
        waited_s = 0.0 if created is None else max(0.0, SYSTEM_CLOCK.time() - created)
        return kueue.queue_state(found, queue=queue, waited_s=waited_s)

    def workload(self, wrapper: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The Workload of a wrapper; None if there is none yet. Kueue before 0.15 serves an older version."""
        namespace, uid = wrapper["metadata"]["namespace"], wrapper["metadata"]["uid"]
        for version in kueue.VERSIONS[kueue.VERSIONS.index(self._kueue) :]:
            path = kueue.workloads_path(namespace, version)
            try:
                answer = self.client.get(path, "Workloads", "status", query=kueue.selector(uid), tries=2)
            except RunNotFound:
                continue
            self._kueue = version
            return kueue.workload_of(answer.get("items") or [], uid)
        raise RunNotFound("the cluster has no Kueue", executor=self.client.executor, operation="status")

    def deactivate(self, wrapper: Mapping[str, Any]) -> bool:
        """Let Kueue stop an app for good; False if it has no Workload."""
        workload = self.workload(wrapper)
        if workload is None:
            return False
        path = f"{kueue.workloads_path(wrapper['metadata']['namespace'], self._kueue)}/{workload['metadata']['name']}"
        self.patch(path, "Workload", {"spec": {"active": False}})
        return True

    def patch(self, path: str, what: str, change: Mapping[str, Any]) -> None:
        self.client.call("PATCH", path, what, "cancel", body=change, content_type=MERGE_PATCH)
