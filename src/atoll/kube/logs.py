"""Lines of a replica, from the containers of its pods: read once, or followed over cut connections and restarts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, RunNotFound
from atoll.kube.client import KubeClient, Stream, path_to
from atoll.kube.errors import retry_after_s
from atoll.kube.names import CONTAINER

_IDLE_S = 60.0
"""A log that is silent for so long is asked for again, from the last line on."""
_PAUSE_S = 0.5
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)")
_WAITING = re.compile("is waiting to start|is not available|does not have a host assigned")
_UNREADABLE = re.compile(
    "unable to retrieve container logs for |rpc error: code = |is terminated$|no logs available$"
    "|failed to (try resolving symlinks in path|(open|read|reset seek in) log file|tail .* log file|watch directory"
    "|create fsnotify watcher)"
)
"""A kubelet has no log of the container, or no more of it: it is removed, its runtime does not answer, or the node has
no watch left. From 1.32 on, and after the first line, the kubelet has sent the status 200 by then, so that its sentence
comes as the last line, without a time."""


class Seen(NamedTuple):
    """What a look at the cluster says about one rank."""

    pods: Sequence[Mapping[str, Any]]
    """Its pods, from the oldest to the newest."""
    is_over: bool
    """Whether the rank gets no further pod, and the last one has ended."""


def last_lines(client: KubeClient, namespace: str, pod: str, tail: int | None) -> Iterator[str]:
    """The lines of a pod so far; none if its container has not started."""
    return iter(()) if tail == 0 else PodLog(client, namespace, pod, tail=tail).lines()


def follow_lines(
    client: KubeClient,
    namespace: str,
    look: Callable[[], Seen],
    *,
    tail: int | None,
    clock: Clock,
    container_of: Callable[[Mapping[str, Any]], str] = lambda _: CONTAINER,
    since_s: int | None = None,
    has_times: bool = False,
) -> Iterator[str]:
    """Lines of the newest pod of a rank as they are printed, and then of each pod that follows it.

    `container_of` names the container of a pod; `since_s` limits how old the first lines are; with `has_times` each
    line begins with its time. Raises `RunNotFound` if the rank is over and the cluster has no log of it.
    """
    logs: dict[str, PodLog] = {}
    ended: set[str] = set()
    pauses = _pauses()
    while True:
        seen = look()
        pods = [(str(pod["metadata"]["name"]), pod) for pod in seen.pods]
        if not logs:
            ended.update(name for name, _ in pods[:-1])
        name, pod = next(((name, pod) for name, pod in pods if name not in ended), ("", {}))
        if name:
            start = tail if not logs else None
            container = container_of(pod)
            log = logs.setdefault(
                name,
                PodLog(
                    client,
                    namespace,
                    name,
                    tail=start,
                    is_followed=True,
                    container=container,
                    since_s=since_s,
                    has_times=has_times,
                ),
            )
            for line in log.lines():
                pauses = _pauses()
                yield line
            is_read = log.is_whole or log.is_unreadable
            if log.is_gone or (is_read and (seen.is_over or _has_ended(pod, container))):  # it ended before it was read
                ended.add(name)
                continue
        elif seen.is_over:
            if not any(log.was_read for log in logs.values()):
                raise RunNotFound("the pods of this rank are gone, and with them their logs", operation="logs")
            return
        clock.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Between two looks: many ranks may be followed, and wait for their nodes for hours."""
    return backoff(_PAUSE_S, factor=1.5, cap_s=4 * _PAUSE_S)


class PodLog:
    """The log of one pod. After a cut connection it goes on behind the last whole line.

    Each line comes with its time. The kubelet can begin at a given second, so the lines of the last second are kept,
    and are left out once when they come again. The kubelet stores a long line in parts, each with its time: if the line
    began in an earlier second, only its later parts come again, and are left out, too.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        pod: str,
        *,
        tail: int | None,
        is_followed: bool = False,
        container: str = CONTAINER,
        since_s: int | None = None,
        has_times: bool = False,
    ) -> None:
        self._container, self._since_s, self._has_times = container, since_s, has_times
        self._client, self._path, self._what = client, f"{path_to('pods', namespace, pod)}/log", f"log of pod `{pod}`"
        self._tail, self._is_followed = tail, is_followed
        self._second = b""
        self._last: Counter[bytes] = Counter()
        self._before = b""
        """The last line that began before this second."""
        self._newest = b""
        self.was_read = False
        """Whether the cluster has answered with this log, also if it was empty."""
        self.is_whole = False
        """Whether the last answer has ended, and was not cut; an answer that there is no log yet counts, too."""
        self.is_unreadable = False
        """Whether the kubelet has answered last that it has no log, or no more of it."""
        self.is_gone = False
        """Whether a followed pod does not exist any more."""

    def lines(self) -> Iterator[str]:
        """The lines that were not read yet. With `is_followed`, until the container ends or the answer is cut.

        None if the container has not started.
        """
        outage: Deadline | None = None
        pauses = self._client.pauses()
        while True:
            self.is_whole = self.is_unreadable = has_begun = False
            try:
                stream = self._opened()
                has_begun = True
                for line in self._new(stream):
                    outage = None
                    yield line
                self.is_whole = not self.is_unreadable
                return
            except AtollError as exc:
                if not has_begun and _UNREADABLE.search(exc.message):
                    self._give_up(exc.message)
                    return
                if _WAITING.search(exc.message):
                    self.was_read = self.is_whole = True
                    self._tail = None  # nothing was printed before: every line is new
                    return
                if isinstance(exc, RunNotFound) and self._is_followed:
                    self.is_gone = True
                    return
                is_retryable = getattr(exc, "retryable", False)
                if is_retryable and self._is_followed and has_begun:
                    if self._tail and not self._second:
                        self._tail = None  # the log was empty
                    return  # also a log that is silent; the caller looks whether the pod is still there
                outage = outage or self._client.deadline()
                if not is_retryable or outage.is_past:
                    raise
                outage.sleep(max(next(pauses), retry_after_s(exc.__cause__)))

    def _give_up(self, sentence: str) -> None:
        """The kubelet has no log, or no more of it. Raises `RunNotFound` if there is nothing to wait for."""
        self.is_unreadable = True
        if self._newest:
            return
        self.was_read = False
        if not self._is_followed:
            raise RunNotFound(f"{self._what}: {sentence.removeprefix(f'{self._what}: ')}", operation="logs")

    def _opened(self) -> Stream:
        query: dict[str, Any] = {"container": self._container, "timestamps": "true"}
        if self._is_followed:
            query["follow"] = "true"
        if self._second:
            query["sinceTime"] = self._second.decode("ascii", "replace")
        elif self._tail is not None:
            query["tailLines"] = self._tail
        elif self._since_s is not None:
            query["sinceSeconds"] = self._since_s
        stream = self._client.stream(self._path, self._what, "logs", query=query, idle_s=_IDLE_S)
        self.was_read = True
        return stream

    def _new(self, stream: Stream) -> Iterator[str]:
        """The lines that were not read before."""
        again, is_first = self._last.copy(), True
        for line, is_ended in _split(stream):
            if not is_ended and _TIME.match(line) is None and _UNREADABLE.match(_text(line)):
                self._give_up(_text(line))
                return
            is_rest = is_first and line != b"" and self._before.endswith(line)
            is_first = False
            if again[line] > 0:
                again[line] -= 1
                continue
            if is_rest:
                continue
            moment, _, text = line.partition(b" ")
            found = _TIME.fullmatch(moment)
            second, text = (b"".join(found.groups()), text) if found else (b"", line)  # some kubelets give no times
            if second != self._second:
                self._second, self._last, self._before = second, Counter(), self._newest
            self._last[line] += 1
            self._newest = line
            yield _text(line if self._has_times else text)


def _has_ended(pod: Mapping[str, Any], container: str) -> bool:
    """Whether the container of the replica writes no further line."""
    status = pod.get("status") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or () if each["name"] == container]
    return status.get("phase") in ("Succeeded", "Failed") or any("terminated" in state for state in states)


def _split(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether a newline ends each. What is left at a clean end is a line, too; at a cut it is dropped, and
    read again."""
    partial = b""
    for chunk in chunks:
        *whole, partial = (partial + chunk).split(b"\n")
        yield from ((line, True) for line in whole)
    if partial:
        yield partial, False


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
