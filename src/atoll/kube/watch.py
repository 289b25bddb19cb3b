"""Notices that something in a list of a cluster has changed, by a watch in a thread of its own.

The caller lists and gives the version of its list (`Changes.listed`). The thread watches from there on, so that no
change between the list and the watch is missed. It resumes after a watch that ends or is cut, from the version of the
last change or bookmark. If the cluster has forgotten that version (status 410), the caller has to list again. While
there is no watch, `is_quiet` is false: the caller then lists as often as it would without a watch.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from atoll._time import Clock
from atoll.errors import AtollError, AuthError, BackendError, BackendUnavailable
from atoll.kube.client import KubeClient, Stream
from atoll.kube.errors import Refusal, retry_after_s

_WATCH_S = 60
"""How long one watch lasts, more or less; the server sends a bookmark at its end."""
_LATE_S = 10.0
"""A watch that lasts for this much longer, without a byte, is cut off: its connection is dead."""
_SHORT_S = 1.0
"""After a watch that lasted no longer than this, the next one has to wait."""
_JOIN_S = 1.0
"""A thread that waits for the first byte of an answer cannot be ended; it ends by itself."""

log = logging.getLogger("atoll.executors")


class Changes:
    """Whether something in a list has changed since the caller read it. Closing it ends its thread."""

    def __init__(self, client: KubeClient, path: str, what: str, *, query: Mapping[str, Any], clock: Clock) -> None:
        self._client, self._path, self._what, self._query, self._clock = client, path, what, query, clock
        self._state = threading.Condition()
        self._version = ""
        """From which version to watch; empty if the caller has to list first."""
        self._is_open = self._has_changed = self._is_closed = False
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether a watch is open and has reported nothing since the caller's last list."""
        with self._state:
            return self._is_open and not self._has_changed

    def listing(self) -> None:
        """The caller is about to list: changes from now on are new."""
        with self._state:
            self._has_changed = False

    def listed(self, version: str) -> None:
        """Watch from the version of the caller's list on, unless a watch goes on."""
        with self._state:
            if not self._is_open or not self._version:
                self._version = version
            self._state.notify_all()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, daemon=True, name="atoll-watch")
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return true as soon as something has changed, or false after so many seconds."""
        with self._state:
            return self._state.wait_for(lambda: self._has_changed or self._is_closed, seconds)

    def close(self) -> None:
        """End the watch and its thread."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()
            stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pauses = self._client.pauses()
        while self._has_version():
            began_at = self._clock.monotonic()
            try:
                self._watch()
                if self._clock.monotonic() - began_at > _SHORT_S:
                    pauses = self._client.pauses()
                    continue
                error: AtollError = BackendUnavailable(f"{self._what}: the watch has ended at once")
            except AtollError as exc:
                error = exc
            except Exception as exc:  # noqa: BLE001  a line that is no event: the caller lists
                error = BackendError(f"{self._what}: {exc}")
            finally:
                self._stream, self._is_open = None, False
            if self._is_closed:
                return
            if isinstance(error, AuthError) and error.reason == "forbidden":
                log.info("%s: no permission to watch; the status is read again and again instead", self._what)
                return
            log.debug("the watch of %s has ended: %s", self._what, error.message)
            if getattr(error, "retryable", False):
                self._pause(max(next(pauses), retry_after_s(error.__cause__)))
            else:
                self._wait_for_list(next(pauses))

    def _has_version(self) -> bool:
        """Wait until there is a version to watch from; false if there is nothing to watch any more."""
        with self._state:
            self._state.wait_for(lambda: self._version or self._is_closed)
            return not self._is_closed

    def _wait_for_list(self, seconds: float) -> None:
        """Forget the version, and wake the caller after so many seconds if it has not listed again by itself."""
        with self._state:
            self._version = ""
            self._state.wait_for(lambda: self._version or self._is_closed, seconds)
            if not self._version:
                self._has_changed = True
                self._state.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._state:
            self._state.wait_for(lambda: self._is_closed, seconds)

    def _watch(self) -> None:
        """Watch until the server ends it, or raise."""
        lasts_s = round(_WATCH_S * random.uniform(0.8, 1.2))
        more = {"resourceVersion": self._version, "allowWatchBookmarks": "true", "timeoutSeconds": lasts_s}
        query = {**self._query, "watch": "true", **more}
        stream = self._client.stream(self._path, self._what, "status", query=query, idle_s=lasts_s + _LATE_S)
        with self._state:
            self._stream, self._is_open = stream, True
        if self._is_closed:
            stream.close()
        for event in events(stream):
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        found = event["object"]
        if event["type"] == "ERROR":
            status = Refusal(int(found.get("code") or 500), found, _retry_after_s(found))
            raise self._client.error(status, self._what, "status") from status
        with self._state:
            self._version = str(found["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                self._has_changed = True
                self._state.notify_all()


def events(chunks: Stream | Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a watch. Half a line at the end is dropped: the next watch repeats its event."""
    partial = b""
    for chunk in chunks:
        *whole, partial = (partial + chunk).split(b"\n")
        yield from (json.loads(line) for line in whole if line.strip())


def _retry_after_s(status: Mapping[str, Any]) -> float | None:
    return (status.get("details") or {}).get("retryAfterSeconds")
