"""Lines that are put together from the entries of a log. The client rounds the times of entries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.executors.modal.logs import CallLog


class _Service:
    """Has entries with times in nanoseconds; the client rounds them to microseconds."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []
        self.logs = self

    def call(self, _operation: str, _what: str, send: Any) -> Any:
        return send()

    def function_call(self, _call_id: str) -> _Service:
        return self

    def tail(self, count: int, *, source: str) -> Iterator[Any]:
        return iter(list(self.fetch(source=source))[-count:])

    def fetch(self, *, source: str, until: datetime | None = None, since: datetime | None = None) -> Iterator[Any]:
        assert source == "stdout"
        until = until or datetime.now(UTC)
        first = 0 if since is None else int(since.timestamp() * 1e6) * 1000
        for at, text in self.entries:
            if first <= at <= until.timestamp() * 1e9:
                yield SimpleNamespace(message=text, timestamp=datetime.fromtimestamp(at / 1e9, UTC))


@pytest.mark.parametrize("rest", [200, 900], ids=["rounded down", "rounded up"])
def test_following_loses_and_doubles_no_entry_whose_time_the_client_rounds(rest):
    service, now = _Service(), time.time_ns() // 1000 * 1000
    log = CallLog(service, "fc-1")  # type: ignore[arg-type]
    service.entries = [(now - 5_000_000 + rest, "one\n"), (now - 4_000_000 + rest, "two\n")]
    assert log.new_lines() == ["one", "two"]
    service.entries += [(now - 4_000_000 + rest, "three\n"), (now - 3_000_000 + rest, "four\n")]
    assert log.new_lines() == ["three", "four"]
    assert log.new_lines() == []


def test_entries_that_come_late_or_only_sometimes_are_shown_once():
    service, now = _Service(), time.time_ns() // 1000 * 1000
    log = CallLog(service, "fc-1")  # type: ignore[arg-type]
    first, second, late = (now - 4 * 10**9, "one\n"), (now - 2 * 10**9, "three\n"), (now - 3 * 10**9, "two\n")
    for entries, lines in (
        ([first, second], ["one", "three"]),
        ([], []),
        ([first], []),
        ([first, second, late, late], ["two", "two"]),
        ([first, second, late, late, second], ["three"]),
    ):
        service.entries = entries
        assert log.new_lines() == lines


def test_batches_of_two_containers_are_put_in_order():
    service, now = _Service(), time.time_ns() // 1000 * 1000
    service.entries = [(now - 2_000_000, "after "), (now - 1_000_000, "the move\n"), (now - 3_000_000, "before\n")]
    wanted = ["before", "after the move"]
    assert CallLog(service, "fc-1").lines() == wanted  # type: ignore[arg-type]
    assert CallLog(service, "fc-1").new_lines() == wanted  # type: ignore[arg-type]
    assert CallLog(service, "fc-1").last_lines(2) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "parts"), [(1, 100), (3, 100), (30_000, 1), (15_000, 3)])
def test_the_last_lines_are_complete_however_many_entries_they_have(count, parts):
    service, now = _Service(), time.time_ns()
    texts = [
        f"{number}:{part}" + ("\n" if part == parts - 1 else " ") for number in range(count) for part in range(parts)
    ]
    service.entries = [(now - (len(texts) - at) * 1000, text) for at, text in enumerate(texts)]
    wanted = "".join(texts).splitlines()
    assert CallLog(service, "fc-1").last_lines(count) == wanted  # type: ignore[arg-type]


def test_a_clock_that_is_late_hides_no_line():
    service = _Service()
    service.entries = [(time.time_ns() + 60 * 10**9, "from a container whose clock is ahead\n")]
    log = CallLog(service, "fc-1")  # type: ignore[arg-type]
    assert log.new_lines() == log.lines() == ["from a container whose clock is ahead"]
    service.entries += [(time.time_ns() + 61 * 10**9, "later\n")]
    assert log.new_lines() == ["later"]
