"""The output of a rank's jobs in CloudWatch: one stream for each start of a container, merged by time.

Streams are listed by prefix in the order of their names: CloudWatch refuses a prefix together with the order of events.
A stream ends where CloudWatch returns the same token twice; an empty page is not the end.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from atoll._time import Clock, Deadline
from atoll.errors import BackendError, ConfigError, RunNotFound
from atoll.executors.sagemaker.client import AwsClient, Pages
from atoll.executors.sagemaker.errors import EXECUTOR

GROUP = "/aws/sagemaker/TrainingJobs"
_PAGE = 10_000
_STREAM = re.compile(r"(-r\d+)?/")
"""What follows on the name of a rank's first job in the names of its streams."""
Event = tuple[int, str]
"""A time in milliseconds, and the text."""


class JobLog:
    """The output of one job and of the jobs that replaced it, and how far it has been read."""

    def __init__(self, client: AwsClient, job: str, *, region: str | None) -> None:
        self._client, self.job, self._region = client, job, region
        self._read: dict[str, str] = {}
        """Stream -> the token after the last page that was read."""
        self._last: dict[str, list[Event]] = {}
        """Stream -> the last page, because a stand-in for a client may answer every call with the same page."""

    def streams(self) -> list[str]:
        """Names of the streams, oldest first. `RunNotFound` if the log group of training jobs does not exist."""
        found: list[str] = []
        more: dict[str, str] = {}
        pages = Pages(f"the list of log streams of `{self.job}`", "logs")
        while True:
            page = self._call("describe_log_streams", logStreamNamePrefix=self.job, **more)
            found += [
                str(stream["logStreamName"]) for stream in page.get("logStreams", []) if "logStreamName" in stream
            ]
            if not page.get("nextToken"):
                return sorted(name for name in found if self._may_have(name))
            more = {"nextToken": pages.after(str(page["nextToken"]))}

    def _may_have(self, stream: str) -> bool:
        """Whether it is a stream of this rank. A stand-in for a client may answer with names of its own."""
        return not stream.startswith(self.job) or _STREAM.match(stream.removeprefix(self.job)) is not None

    def new_lines(self, streams: Iterable[str]) -> list[str]:
        """Lines of all streams that were not read before, ordered by time."""
        return list(_lines(_merged(self._forward(stream) for stream in streams)))

    def last_lines(self, streams: Iterable[str], count: int) -> list[str]:
        """The last `count` lines, read from the end of the log."""
        lines = list(_lines(_merged(self._backward(stream, count) for stream in streams)))
        return lines[len(lines) - min(count, len(lines)) :]

    def _forward(self, stream: str) -> list[Event]:
        events: list[Event] = []
        while True:
            token = self._read.get(stream)
            more = {"nextToken": token} if token else {}
            page = self._call("get_log_events", logStreamName=stream, startFromHead=True, limit=_PAGE, **more)
            found = _events(page)
            following = str(page.get("nextForwardToken") or token or "")
            is_repeated = following == token and found == self._last.get(stream)
            self._read[stream], self._last[stream] = following, found
            events += [] if is_repeated else found
            if following in (token, ""):
                return events

    def _backward(self, stream: str, count: int) -> list[Event]:
        pages: list[list[Event]] = []
        token: str | None = None
        while sum(map(len, pages)) < count:
            more = {"nextToken": token} if token else {}
            limit = min(_PAGE, max(1, count))
            page = self._call("get_log_events", logStreamName=stream, startFromHead=False, limit=limit, **more)
            found = _events(page)
            following = str(page.get("nextBackwardToken") or token or "")
            if not (following == token and pages and found == pages[-1]):
                pages.append(found)
            if following in (token, ""):
                break
            token = following
        return list(chain.from_iterable(reversed(pages)))

    def _call(self, verb: str, **body: Any) -> dict[str, Any]:
        what = f"log of `{self.job}`"
        try:
            return self._client.call("logs", verb, "logs", what, region=self._region, logGroupName=GROUP, **body)
        except ConfigError as exc:
            if self._client.is_given("logs"):
                raise
            # There is no client for CloudWatch: the SDK or the region is missing. The caller may read the store.
            message = f"{what}: no client for CloudWatch: {exc.message}"
            raise BackendError(message, executor=EXECUTOR, operation="logs", hint="give one as `logs_client`") from exc


def follow_lines(
    log: JobLog, *, tail: int | None, is_over: Callable[[], bool], pause_s: float, lag_s: float, clock: Clock
) -> Iterator[str]:
    """Lines as CloudWatch delivers them, until the job has been over for `lag_s` without a new line.

    `RunNotFound` if no stream exists by then.
    """
    is_first = True
    end: Deadline | None = None
    while True:
        over = is_over()  # before reading: what is written later is read in the next iteration
        streams = log.streams()
        lines = log.new_lines(streams)
        if is_first and tail is not None:
            lines = lines[len(lines) - min(tail, len(lines)) :]
        is_first = False
        yield from lines
        if over and (end is None or lines):
            end = Deadline(lag_s, clock)
        elif end is not None and end.is_past:
            if not streams:
                raise no_log(log.job)
            return
        clock.sleep(pause_s)


def no_log(job: str) -> RunNotFound:
    """The error for a job without a log in CloudWatch; the caller may read the store instead."""
    return RunNotFound(f"CloudWatch has no log of job `{job}`", executor=EXECUTOR, operation="logs")


def _merged(streams: Iterable[list[Event]]) -> Iterator[Event]:
    return heapq.merge(*streams, key=lambda event: event[0])


def _events(page: dict[str, Any]) -> list[Event]:
    return [(int(event.get("timestamp", 0)), str(event.get("message", ""))) for event in page.get("events", [])]


def _lines(events: Iterable[Event]) -> Iterator[str]:
    for _, message in events:
        yield from message.removesuffix("\n").split("\n")
