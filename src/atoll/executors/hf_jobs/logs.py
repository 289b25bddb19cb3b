"""The log of a job, read from the event stream of the service.

The service replays the whole log on every connection, then sends what is new. A connection that was cut is opened
again, and the events that were read before are skipped by their number. Where the log ended at the moment of the
question is known from the newest event (`tail=1`), not from a clock: neither the Date header nor the clock of this
machine has to be right.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from atoll._time import Deadline
from atoll.errors import AtollError
from atoll.executors.hf_jobs import errors
from atoll.executors.hf_jobs.client import HubClient

_STARTED = "===== Job started"
"""The service begins the log of each try with a line that the replica has not written."""
_KEEP_ALIVE_S = 120.0
"""The service sends a comment every 30 s; after such a silence the connection is dead."""
_SLOW = 5
"""The first event may come so many times later than the next ones: old logs are read from an archive."""
_DATA = "data: {"
Event = dict[str, Any]


class JobLog:
    """The log of one job. A job that runs is quiet if nothing comes for `quiet_s`."""

    def __init__(self, client: HubClient, namespace: str, job_id: str, *, quiet_s: float, pause_s: float) -> None:
        self._client, self._namespace, self._job_id = client, namespace, job_id
        self._quiet_s, self._slow_s, self._pause_s = quiet_s, _SLOW * quiet_s, pause_s

    def snapshot(self, tail: int | None, *, is_over: bool) -> list[str]:
        """The log as it is now: its last `tail` lines, or all."""
        if not self._client.reads_events:
            return _last(list(self._given_lines(follow=False)), tail)
        if tail == 0:
            return []
        end = None if is_over else self._newest()
        if end is None and not is_over:
            return []
        return _last(_lines(self._all_events(tail, end)), tail)

    def follow(self, tail: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
        """The log, then each line as it comes, until the job is over and nothing is new."""
        if not self._client.reads_events:
            yield from self._given_lines(follow=True, tail=tail)
            return
        place, failures = 0, self._client.pauses()
        old = _OldEvents(self._newest() if tail is not None else None, tail)
        deadline = self._client.deadline()
        while True:
            was_over, before = is_over(), place
            try:
                for index, event in self._events(None, self._slow_s if was_over else _KEEP_ALIVE_S, is_over):
                    if index < place:
                        continue
                    place, deadline = index + 1, self._client.deadline()
                    yield from _lines(old.released(event))
            except AtollError as exc:
                if not getattr(exc, "retryable", False) or deadline.is_past:
                    raise
                failures = self._client.pauses() if place > before else failures
                deadline.sleep(next(failures))
                continue
            if place > before:
                continue  # the connection may have been cut before the end
            yield from _lines(old.release())
            if was_over:
                return
            self._client.clock.sleep(self._pause_s)

    def _all_events(self, tail: int | None, end: Event | None) -> list[Event]:
        """The events up to `end`, or all of a job that is over. A connection that was cut is opened again.

        A cut may look like the end of the log, so a connection without anything new shows that it was the end.
        """
        found: list[Event] = []
        most = 0
        read_s = self._slow_s if end is None else self._quiet_s  # the service ends the log of a job that is over
        deadline, pauses = self._client.deadline(), self._client.pauses()
        limit = Deadline(self._client.timeout_s, self._client.clock)
        while True:
            try:
                for index, event in self._events(tail, read_s):
                    if index < len(found):
                        continue  # read before the connection was cut
                    is_past_end = end is not None and not _is_at_most(event, end)
                    # If the newest event was the first one, the service may have ignored `tail=1`.
                    if is_past_end and len(found) >= (tail or 0) and found[:1] != [end]:
                        return found
                    found.append(event)
                    if end is not None and limit.is_past:
                        return found
            except AtollError as exc:
                if not getattr(exc, "retryable", False) or (deadline.is_past and len(found) <= most):
                    raise
                if len(found) > most:
                    deadline, pauses = self._client.deadline(), self._client.pauses()
                deadline.sleep(next(pauses))
            else:
                has_end = end is not None and bool(found) and (found[-1] == end or not _is_at_most(found[-1], end))
                is_slow = len(found) <= most and read_s < self._slow_s
                if has_end or (tail is not None and len(found) >= tail) or (len(found) <= most and not is_slow):
                    return found
                read_s = self._slow_s if is_slow else read_s
            most = len(found)
            if tail is not None and end is not None:
                found = []  # the log has grown, so the last events are other ones now

    def _newest(self) -> Event | None:
        """The newest event of the log; None if it has none."""
        deadline, pauses = self._client.deadline(), self._client.pauses()
        while True:
            try:
                return next((event for _, event in self._events(1, self._slow_s)), None)
            except AtollError as exc:
                if not getattr(exc, "retryable", False) or deadline.is_past:
                    raise
            deadline.sleep(next(pauses))

    def _events(
        self, tail: int | None, read_s: float, is_over: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Event]]:
        """The events of one connection, numbered from 0, until it ends or is silent for `read_s`.

        Comments keep the connection alive. They end it if the job is over, or without `is_over`, if no event came for
        `read_s`.
        """
        is_open, index = False, 0
        try:
            with self._client.log_events(self._namespace, self._job_id, tail=tail, read_s=read_s) as lines:
                is_open, quiet = True, Deadline(read_s, self._client.clock)
                for line in lines:
                    if line.startswith(_DATA):
                        yield index, json.loads(line.removeprefix("data: "))
                        index, quiet = index + 1, Deadline(read_s, self._client.clock)
                    elif line.startswith(":") and (quiet.is_past if is_over is None else is_over()):
                        return
        except Exception as exc:
            if is_open and any(each.__name__ == "ReadTimeout" for each in type(exc).__mro__):
                return
            if not errors.is_of_service(exc):
                raise
            raise errors.translated(exc, f"log of job `{self._job_id}`", "logs") from exc

    def _given_lines(self, *, follow: bool, tail: int | None = None) -> Iterator[str]:
        """The log through a client of the caller, which has no events."""
        what = f"log of job `{self._job_id}`"
        more = {} if tail is None else {"tail": tail}
        lines = self._client.call(
            "fetch_job_logs", "logs", what, job_id=self._job_id, namespace=self._namespace, follow=follow, **more
        )
        for line in lines:
            yield from str(line).removesuffix("\n").split("\n")


class _OldEvents:
    """Holds the events up to `end` back, until they are complete and the last `tail` of them can be shown."""

    def __init__(self, end: Event | None, tail: int | None) -> None:
        self._end = end
        self._held: deque[Event] = deque(maxlen=tail)

    def released(self, event: Event) -> list[Event]:
        """What can be shown after this event: nothing, the end of the old events, the event itself."""
        if self._end is None:
            return [event]
        if not _is_at_most(event, self._end):
            return [*self.release(), event]
        self._held.append(event)
        return self.release() if event == self._end else []

    def release(self) -> list[Event]:
        """The last old events, unless they were released before."""
        found, self._end = list(self._held), None
        self._held.clear()
        return found


def _is_at_most(event: Event, end: Event) -> bool:
    """Whether the event is not newer."""
    times = [str(each.get("timestamp", "")) for each in (event, end)]
    try:
        this, last = map(datetime.fromisoformat, times)
        return this <= last
    except (ValueError, TypeError):  # not a time, or only one of them has a zone
        return times[0] <= times[1]


def _lines(events: Any) -> list[str]:
    texts = (str(event.get("data", "")) for event in events)
    return [line for text in texts if not text.startswith(_STARTED) for line in text.removesuffix("\n").split("\n")]


def _last(lines: list[str], tail: int | None) -> list[str]:
    return lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]
