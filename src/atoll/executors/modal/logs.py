"""The output of a call, from the log API of Modal. The replica's lines are what its supervisor writes to stdout.

Entries of the log are pieces of text with a time; lines are put together from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from atoll._time import Clock, Deadline
from atoll.executors.modal.client import ModalClient

_MOST_ENTRIES = 20_000
"""What Modal returns of the end of a log."""
_SOURCE = "stdout"
_OVERLAP = timedelta(seconds=10)
"""An entry may arrive so much later than entries with a later time."""
_SKEW = timedelta(minutes=5)
"""By how much the clock of this machine may be late."""


class CallLog:
    """The output of one call, and how far it has been read."""

    def __init__(self, client: ModalClient, call_id: str) -> None:
        self._client, self._call_id = client, call_id
        self._since: datetime | None = None
        self._seen = Counter[tuple[datetime, str]]()
        """The entries that were read and that the next request returns again."""
        self._rest = ""

    def lines(self) -> list[str]:
        """All lines."""
        return _split("".join(str(entry.message) for entry in self._fetch(None)))

    def last_lines(self, count: int) -> list[str]:
        """The last lines. An entry may be a part of a line, so more entries than lines are read, or all of the log."""
        most = min(_MOST_ENTRIES, 4 * count + 16)

        def send() -> list[Any]:
            return list(self._client.function_call(self._call_id).logs.tail(most, source=_SOURCE))

        entries = _in_order(self._client.call("logs", self._what, send))
        lines = _split("".join(str(entry.message) for entry in entries))
        if len(entries) >= most:
            del lines[:1]  # its beginning may be missing
            if len(lines) < count:
                lines = self.lines()
        return lines[len(lines) - min(count, len(lines)) :]

    def new_lines(self) -> list[str]:
        """Complete lines that were not read before."""
        text, old = self._rest, self._seen.copy()
        entries = [(entry.timestamp, str(entry.message)) for entry in self._fetch(self._since)]
        for entry in entries:
            if old[entry] > 0:
                old[entry] -= 1
            else:
                text += entry[1]
        if entries:
            self._since = max(entries[-1][0], self._since or entries[-1][0])
            known = self._seen | Counter(entries)
            self._seen = Counter({entry: n for entry, n in known.items() if entry[0] >= self._since - _OVERLAP})
        *lines, self._rest = text.split("\n")
        return lines

    def rest(self) -> list[str]:
        """A last line without an end."""
        found, self._rest = self._rest, ""
        return [found] if found else []

    def _fetch(self, since: datetime | None) -> list[Any]:
        until = max(datetime.now(UTC), since or datetime.min.replace(tzinfo=UTC)) + _SKEW
        limits = {"until": until} if since is None else {"since": since - _OVERLAP, "until": until}

        def send() -> list[Any]:
            return list(self._client.function_call(self._call_id).logs.fetch(source=_SOURCE, **limits))

        return _in_order(self._client.call("logs", self._what, send))

    @property
    def _what(self) -> str:
        return f"log of call `{self._call_id}`"


def follow_lines(
    log: CallLog, *, tail: int | None, is_over: Callable[[], bool], pause_s: float, lag_s: float, clock: Clock
) -> Iterator[str]:
    """Lines as Modal delivers them, until the call has been over for `lag_s` without a new line."""
    is_first = True
    end: Deadline | None = None
    while True:
        over = is_over()  # before reading: what is written later is read in the next iteration
        lines = log.new_lines()
        if is_first and tail is not None:
            lines = lines[len(lines) - min(tail, len(lines)) :]
        is_first = False
        yield from lines
        if over and (end is None or lines):
            end = Deadline(lag_s, clock)
        elif end is not None and end.is_past:
            yield from log.rest()
            return
        clock.sleep(pause_s)


def _in_order(entries: list[Any]) -> list[Any]:
    """The entries by their times. Modal sends them in batches of a container, of which a moved call has several."""
    return sorted(entries, key=lambda entry: entry.timestamp)


def _split(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]
