"""A watch notices changes, resumes where it ended, and never hides that it does not work."""

from __future__ import annotations

import json
import logging
import threading
from threading import Event

import pytest
from kube_api import Reply, failure

from atoll._time import SYSTEM_CLOCK
from atoll.kube.watch import Changes, events

pytestmark = pytest.mark.server
PATH = "/api/v1/namespaces/ns/pods"


def line(kind: str, version: int) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": str(version)}}}).encode() + b"\n"


def gone(code: int = 410) -> bytes:
    return (
        json.dumps({"type": "ERROR", "object": {"code": code, "reason": "Expired", "message": "old"}}).encode() + b"\n"
    )


def opened(*pieces: bytes) -> Reply:
    """A watch that stays open after these pieces."""
    return Reply(pieces=list(pieces), held=Event())


@pytest.fixture
def changes(api, tmp_path):
    found = Changes(api.client(tmp_path), PATH, "pods", query={"labelSelector": "a=b"}, clock=SYSTEM_CLOCK)
    yield found
    found.close()
    assert not any(thread.name == "atoll-watch" for thread in threading.enumerate())


def until(condition) -> None:
    """Wait, in small steps: the state of a watch has no event of its own."""
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not become so")


def test_half_a_line_is_left_for_the_next_watch():
    whole, half = line("ADDED", 1), line("ADDED", 2)
    found = list(events(iter([whole[:7], whole[7:] + b"\n" + half[:-9]])))
    assert [event["object"]["metadata"]["resourceVersion"] for event in found] == ["1"]


def test_it_watches_from_the_version_of_the_list_and_wakes_at_a_change(api, changes):
    api.replies = [opened(line("BOOKMARK", 6), line("MODIFIED", 7))]
    assert not changes.is_quiet
    changes.listed("5")
    assert changes.wait(30)
    query = api.until(1).query
    assert (query["resourceVersion"], query["watch"], query["allowWatchBookmarks"]) == ("5", "true", "true")
    assert query["labelSelector"] == "a=b"
    assert 30 <= int(query["timeoutSeconds"]) <= 90
    assert not changes.is_quiet
    changes.listing()
    changes.listed("7")
    assert changes.is_quiet
    assert not changes.wait(0.0)


def test_a_bookmark_is_no_change(api, changes):
    api.replies = [opened(line("BOOKMARK", 9))]
    changes.listed("5")
    until(lambda: changes._version == "9")
    assert changes.is_quiet


@pytest.mark.parametrize(
    "first",
    [
        Reply(pieces=[line("BOOKMARK", 8)]),
        Reply(pieces=[line("BOOKMARK", 8)], is_cut=True),
        Reply(pieces=[line("BOOKMARK", 8), line("ADDED", 9)[:20]], is_cut=True),
        Reply(pieces=[line("BOOKMARK", 8), line("ADDED", 9)[:20]]),
    ],
    ids=["ended", "cut", "cut in a line", "ended in a line"],
)
def test_a_watch_that_ends_is_resumed_from_the_last_version(api, changes, first):
    api.replies = [first, opened(line("ADDED", 9))]
    changes.listed("5")
    assert changes.wait(30)
    assert [request.query["resourceVersion"] for request in api.requests] == ["5", "8"]


@pytest.mark.parametrize(
    "first",
    [failure(410, "Expired"), Reply(pieces=[gone()]), Reply(pieces=[b"no event\n"]), failure(400, "BadRequest")],
    ids=["status 410", "event 410", "no event", "status 400"],
)
def test_without_a_version_that_the_cluster_knows_the_caller_lists_again(api, changes, first):
    api.replies = [first, opened()]
    changes.listed("5")
    assert changes.wait(30)
    assert not changes.is_quiet
    assert len(api.requests) == 1, "it went on without a new list"
    changes.listing()
    changes.listed("20")
    assert api.until(2).query["resourceVersion"] == "20"
    until(lambda: changes.is_quiet)


@pytest.mark.parametrize(
    "first",
    [
        failure(429, "TooManyRequests", Retry_After="0"),
        failure(500),
        Reply(pieces=[gone(500)]),
        Reply(pieces=[], is_cut=True),
    ],
    ids=["429", "500", "event 500", "no answer"],
)
def test_while_there_is_no_watch_it_is_not_quiet_and_then_it_goes_on(api, changes, first):
    api.replies = [first, first, opened(line("ADDED", 6))]
    changes.listed("5")
    assert changes.wait(30)
    assert [request.query["resourceVersion"] for request in api.requests] == ["5"] * 3


def test_the_time_that_a_throttled_server_asks_for_is_kept(api, changes, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(changes, "_pause", pauses.append)
    api.replies = [failure(429, "TooManyRequests", Retry_After="33"), opened(line("ADDED", 6))]
    changes.listed("5")
    assert changes.wait(30)
    assert pauses == [33.0]


def test_without_the_permission_to_watch_it_says_so_once_and_stays_not_quiet(api, changes, caplog):
    caplog.set_level(logging.INFO, "atoll.executors")
    api.replies = [failure(403, "Forbidden")]
    changes.listed("5")
    thread = changes._thread
    thread.join(30)
    assert not thread.is_alive()
    changes.listed("6")
    assert (changes.is_quiet, len(api.requests)) == (False, 1)
    assert len([record for record in caplog.records if "permission to watch" in record.message]) == 1


def test_closing_ends_a_wait_and_an_open_watch(api, changes):
    api.replies = [opened()]
    changes.listed("5")
    until(lambda: changes.is_quiet)
    waiter = threading.Thread(target=changes.wait, args=(600.0,), daemon=True)
    waiter.start()
    thread = changes._thread
    changes.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert not thread.is_alive()
    changes.listed("6")
    assert changes._thread is thread


def test_a_version_that_is_always_forgotten_wakes_the_caller_less_and_less_often(api, changes, monkeypatch):
    api.replies = [failure(410, "Expired")]
    pauses: list[float] = []
    wait_for_list = changes._wait_for_list
    monkeypatch.setattr(changes, "_wait_for_list", lambda seconds: (pauses.append(seconds), wait_for_list(0.0)))
    for version in range(5):
        changes.listing()
        changes.listed(str(version))
        assert changes.wait(30)
    assert pauses[4] > pauses[0] * 4
