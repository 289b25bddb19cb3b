"""Logs of jobs: connections that are cut, a Date header that is wrong, jobs that never stop printing."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest

from atoll.errors import BackendUnavailable
from atoll.executors.hf_jobs.client import HubClient
from atoll.executors.hf_jobs.logs import _is_at_most
from atoll.handle import RunHandle
from atoll.testing.bench import Call, launched, let_go, over, until
from services.hf_jobs.job import Job

LINES = [f"line {number}" for number in range(90)]


@pytest.fixture
def finished(bench):
    with launched(bench, "say", args={"lines": LINES}) as run:
        over(bench, run)
        yield run


@pytest.mark.parametrize("tail", [None, 70, 5])
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_log_that_is_cut_every_20_lines_has_no_gap_and_no_double_line(bench, hub, finished, tail, follow, is_clean):
    hub.log_cut_every, hub.cuts_are_clean = 20, is_clean
    wanted = LINES if tail is None else LINES[-tail:]
    assert list(bench.executor().logs(finished.handle, 0, tail=tail, follow=follow)) == wanted


@pytest.mark.parametrize("follow", [False, True])
def test_pauses_do_not_grow_while_a_log_that_is_cut_goes_on(bench, hub, finished, monkeypatch, follow):
    def pauses(_: HubClient) -> Iterator[float]:
        yield 0.01
        raise AssertionError("a second failure in a row")

    monkeypatch.setattr(HubClient, "pauses", pauses)
    hub.log_cut_every = 20
    assert list(bench.executor().logs(finished.handle, 0, follow=follow)) == LINES


@pytest.mark.parametrize("holds", [False, True], ids=["over", "running"])
@pytest.mark.parametrize("tail", [None, 5])
def test_a_log_whose_first_event_comes_late_is_not_empty(bench, hub, holds, tail):
    """An old log comes from an archive: the first event takes longer than a pause between two of them."""
    with launched(bench, "say", args={"lines": LINES, "then_hold": holds}) as run:
        until(bench, "all is printed", lambda: printed(only(hub)) and (holds or only(hub).is_over))
        hub.log_delay_s = 1.5
        executor = bench.executor(log_quiet_s=1.0)
        wanted = LINES if tail is None else LINES[-tail:]
        assert list(executor.logs(run.handle, 0, tail=tail)) == wanted
        if not holds:
            assert list(executor.logs(run.handle, 0, tail=tail, follow=True)) == wanted


@pytest.mark.parametrize("offset_s", [-86_400.0, 86_400.0])
def test_a_date_header_that_is_off_by_a_day_loses_nothing(bench, hub, finished, offset_s):
    hub.date_offset_s = offset_s
    executor = bench.executor()
    assert list(executor.logs(finished.handle, 0)) == LINES
    assert list(executor.logs(finished.handle, 0, tail=3)) == LINES[-3:]
    assert list(executor.logs(finished.handle, 0, tail=3, follow=True)) == LINES[-3:]


@pytest.mark.parametrize("offset_s", [-86_400.0, 0.0, 86_400.0])
def test_the_log_of_a_running_job_ends_where_it_is_now(bench, hub, offset_s):
    hub.date_offset_s = offset_s
    with launched(bench, "say", args={"lines": LINES, "then_hold": True}) as run:
        job = only(hub)
        until(bench, "all is printed", lambda: printed(job))
        assert list(bench.executor().logs(run.handle, 0)) == LINES
        assert list(bench.executor().logs(run.handle, 0, tail=4)) == LINES[-4:]
        followed = bench.executor().logs(run.handle, 0, tail=4, follow=True)
        assert [next(followed) for _ in range(4)] == LINES[-4:], "they are shown while nothing new comes"
        let_go(bench, run)
        assert list(followed) == []


def test_comments_that_keep_a_connection_alive_do_not_keep_the_reader_of_a_running_log(bench, hub):
    """The peer sends a comment every 0.2 s, so the connection is never silent for longer."""
    with launched(bench, "say", args={"lines": LINES, "then_hold": True}) as run:
        until(bench, "all is printed", lambda: printed(only(hub)))
        read: list[str] = []
        executor = bench.executor(log_quiet_s=0.5)
        reader = Thread(target=lambda: read.extend(executor.logs(run.handle, 0)), daemon=True)
        reader.start()
        until(bench, "the reader has ended", lambda: not reader.is_alive())
        assert read == LINES
        let_go(bench, run)


def test_the_log_of_a_job_that_prints_without_end_ends(bench, hub):
    code = "import time\nwhile True: print('x', flush=True); time.sleep(0.002)"
    spec = {"dockerImage": "i", "command": ["python", "-c", code], "arguments": [], "environment": {}}
    job = hub.run("tester", {**spec, "flavor": "cpu-basic", "labels": {"atoll-run": "chatty", "atoll-rank": "0"}})
    chatty = hub.jobs[job["id"]]
    until(bench, "it prints", lambda: chatty.log.count > 50)
    handle = RunHandle("hf_jobs", "tester", "chatty", 1)
    found = list(bench.executor().logs(handle, 0))
    assert 50 <= len(found) <= chatty.log.count
    assert list(bench.executor().logs(handle, 0, tail=3)) == ["x"] * 3
    followed = bench.executor().logs(handle, 0, tail=3, follow=True)
    assert [next(followed) for _ in range(8)] == ["x"] * 8
    chatty.cancel()
    assert set(followed) <= {"x"}


@pytest.mark.parametrize("follow", [False, True])
def test_a_line_with_other_line_ends_of_unicode_is_one_line(bench, follow):
    """The service sends them as they are: JSON escapes only those below U+0020."""
    texts = ["one\u2028two", "next\x85line", "漢字", "last"]
    with launched(bench, "say", args={"lines": texts}) as run:
        over(bench, run)
        assert list(bench.executor().logs(run.handle, 0, follow=follow)) == texts


def test_times_with_and_without_fractions_are_compared_as_times():
    events = [{"timestamp": text} for text in ("2026-01-01T00:00:05Z", "2026-01-01T00:00:05.25Z", "soon")]
    assert _is_at_most(events[0], events[1])
    assert not _is_at_most(events[1], events[0])
    assert _is_at_most(events[0], events[2])


def test_a_connection_that_never_delivers_is_an_error(bench, hub, finished):
    hub.log_cut_every = 0
    with pytest.raises(BackendUnavailable) as caught:
        list(bench.executor(patience_s=0.2).logs(finished.handle, 0))
    assert caught.value.__cause__ is not None


def test_a_503_is_retried(bench, hub, finished):
    hub.faults.refuse(Call.LOG, 503, "Service Unavailable", times=2)
    assert list(bench.executor(patience_s=20.0).logs(finished.handle, 0, tail=2)) == LINES[-2:]


def only(hub) -> Job:
    return next(iter(hub.jobs.values()))


def printed(job: Job) -> bool:
    return job.log.count > len(LINES)
