"""The log of one replica of an app, from its newest pod or from the attempt before: read once, or followed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from atoll._time import SYSTEM_CLOCK
from atoll.errors import AuthError, RunNotFound
from atoll.kube.logs import Seen, follow_lines
from atoll.kube.pod_state import age_key
from atoll.torchx import status
from atoll.torchx.cluster import Cluster
from atoll.torchx.logs import split
from atoll.torchx.names import label_value, split_app_id

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_NOT_STARTED = (
    "is waiting to start",
    "is not available",
    "does not have a host assigned",
    "previous terminated container",
)
"""In refusals to read a log that has no line yet."""
log = logging.getLogger(__name__)


class ReplicaLog:
    """Lines with their times, from `age_s` seconds ago on. `explained` turns refused permissions into one error."""

    def __init__(
        self,
        cluster: Cluster,
        app_id: str,
        role_name: str,
        index: int,
        age_s: int | None,
        explained: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        self._cluster, self._app_id, self._role_name, self._index = cluster, app_id, role_name, index
        self._namespace, self._name = split_app_id(app_id)
        self._age_s, self._explained = age_s, explained

    def printed(self, api_client: ApiClient, *, is_previous: bool) -> Iterable[str]:
        """The lines there are now; with `is_previous`, those of the attempt before the last restart."""
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException

        found = self._pods()
        if found is not None and not found:  # a pod with the name of the original's may be of another role
            text = "app `%s` has no pod of replica %s of role `%s`"
            log.warning(text, self._app_id, self._index, self._role_name)
            return iter(())
        query: dict[str, Any] = {
            "name": f"{self._name}-{self._index}",
            "namespace": self._namespace,
            "timestamps": True,
        }
        if is_previous and found and not status.restarts_in_place(found[-1]):
            found = found[:-1]  # the attempt before, if there was one, had a pod of its own
            if not found:
                return iter(())
        elif is_previous:
            query["previous"] = True
        if found:
            query["name"] = found[-1]["metadata"]["name"]
            if len(found[-1]["spec"].get("containers") or ()) > 1:
                query["container"] = status.own_container(found[-1])
        if self._age_s is not None:
            query["since_seconds"] = self._age_s
        try:
            with self._explained("get", "pods/log"):
                return split(_text_of(client.CoreV1Api(api_client), query) or "")
        except ApiException as exc:
            if exc.status == 400 and any(words in str(exc.body) for words in _NOT_STARTED):
                return iter(())
            raise

    def followed(self, is_app_over: Callable[[], bool]) -> Iterator[str]:
        """The lines until the replica has ended and no other pod follows."""

        def look() -> Seen:
            found = self._pods(must_be_allowed=True) or []
            return Seen(found, all(map(_has_ended, found)) and is_app_over())

        try:
            yield from follow_lines(
                self._cluster.client,
                self._namespace,
                look,
                tail=None,
                clock=SYSTEM_CLOCK,
                container_of=status.own_container,
                since_s=self._age_s,
                has_times=True,
            )
        except AuthError as exc:
            what = f"replica {self._index} of role `{self._role_name}`"
            raise ValueError(f"cannot follow the log of {what}: {exc.message}") from exc
        except RunNotFound:
            text = "app `%s` has no log of replica %s of role `%s` any more"
            log.warning(text, self._app_id, self._index, self._role_name)

    def _pods(self, *, must_be_allowed: bool = False) -> Sequence[Any] | None:
        """The pods of the replica, the oldest first; None if they cannot be read."""
        role = label_value(self._role_name)
        found = self._cluster.pods(self._namespace, self._name, role, must_be_allowed=must_be_allowed)
        return None if found is None else sorted((p for p in found if status.replica_of(p) == self._index), key=age_key)


def _text_of(api: Any, query: Mapping[str, Any]) -> str | None:
    """The log of a pod, also if it is not UTF-8, which the client refuses."""
    try:
        return api.read_namespaced_pod_log(**query)  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        answer = api.read_namespaced_pod_log(**query, _preload_content=False)
        return bytes(answer.data).decode("utf-8", "backslashreplace")


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
