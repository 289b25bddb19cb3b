"""Logs of pods: every line once, over cut connections and restarts."""

from __future__ import annotations

import itertools

import pytest
from kube_api import Reply, failure

from atoll._time import SYSTEM_CLOCK
from atoll.errors import AuthError, BackendUnavailable, RunNotFound
from atoll.kube import logs
from atoll.kube.logs import PodLog, Seen, follow_lines, last_lines
from atoll.kube.names import CONTAINER
from atoll.testing.fakes import FakeClock

pytestmark = pytest.mark.server
WAITING = failure(400, "BadRequest", f'container "{CONTAINER}" in pod "p" is waiting to start: ContainerCreating')


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(logs, "_PAUSE_S", 0.01)


def at(second: int, fraction: str, text: str) -> bytes:
    return f"2026-01-02T03:04:{second:02}.{fraction}Z {text}\n".encode()


def pod(name: str, phase: str = "Running") -> dict:
    return {"metadata": {"name": name}, "status": {"phase": phase}}


def looks(*seen: Seen):
    """One look after the other; the last one from then on."""
    every = itertools.chain(seen, itertools.repeat(seen[-1]))
    return lambda: next(every)


def queries(api) -> list[dict]:
    return [{k: v for k, v in r.query.items() if k not in ("container", "timestamps")} for r in api.requests]


def test_lines_are_without_times_and_ends_and_bytes_that_are_no_text_are_shown(api, tmp_path):
    text = at(1, "1", "one\r") + at(1, "2", "") + at(1, "3", " two  ") + b"2026-01-02T03:04:02Z \xff end"
    api.replies = [Reply(pieces=[text[:30], text[30:]])]
    assert list(last_lines(api.client(tmp_path), "ns", "p", 7)) == ["one", "", " two  ", "\\xff end"]
    assert queries(api) == [{"tailLines": "7"}]
    assert api.requests[0].path == "/api/v1/namespaces/ns/pods/p/log"


def test_the_last_zero_lines_need_no_request(api, tmp_path):
    assert list(last_lines(api.client(tmp_path), "ns", "p", 0)) == []
    assert api.requests == []


@pytest.mark.parametrize(("reply", "kind"), [(failure(403, "Forbidden"), AuthError), (failure(404), RunNotFound)])
def test_a_log_that_we_may_not_read_is_told_from_one_that_is_not_there(api, tmp_path, reply, kind):
    api.replies = [reply]
    with pytest.raises(kind):
        list(last_lines(api.client(tmp_path), "ns", "p", None))


def test_a_container_that_has_not_started_has_no_lines(api, tmp_path):
    api.replies = [WAITING]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == []


def test_after_a_cut_each_line_comes_once_also_equal_lines_of_one_second(api, tmp_path):
    same = at(5, "5", "same")
    lines = [at(4, "9", "old"), same, same, at(5, "50", "same"), at(5, "7", "next"), at(6, "1", "last")]
    first = b"".join(lines[:3]) + lines[3][:9]
    api.replies = [Reply(pieces=[first], is_cut=True), Reply(pieces=[b"".join(lines[1:])])]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == ["old", "same", "same", "same", "next", "last"]
    assert queries(api) == [{}, {"sinceTime": "2026-01-02T03:04:05Z"}]


def test_a_clock_that_goes_back_loses_no_line(api, tmp_path):
    api.replies = [Reply(pieces=[at(9, "1", "later") + at(3, "1", "earlier")])]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == ["later", "earlier"]


def test_lines_without_times_are_whole_and_come_once_after_a_cut(api, tmp_path):
    api.replies = [Reply(pieces=[b"one line\n\nno"], is_cut=True), Reply(pieces=[b"one line\n\nno time\n"])]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == ["one line", "", "no time"]


@pytest.mark.parametrize("rest", [b"the rest\n", at(2, "1", "the rest")])
def test_a_long_line_of_two_seconds_does_not_come_again_in_part(api, tmp_path, rest):
    """A kubelet repeats the time in front of each part of a line, or only gives that of the first part."""
    long, end = at(1, "9", "a long line, ")[:-1] + rest, at(2, "2", "end")
    more = at(2, "3", "more")
    api.replies = [Reply(pieces=[long + end], is_cut=True), Reply(pieces=[rest + end], is_cut=True),
                   Reply(pieces=[rest + end + more])]  # fmt: skip
    log = PodLog(api.client(tmp_path), "ns", "p", tail=None)
    assert [line[:4] for line in log.lines()] == ["a lo", "end", "more"]
    assert [query.get("sinceTime", "")[-3:] for query in queries(api)] == ["", "02Z", "02Z"]


def test_trouble_that_stays_is_raised(api, tmp_path):
    api.replies = [failure(500)]
    with pytest.raises(BackendUnavailable):
        list(last_lines(api.client(tmp_path, patience_s=0.0), "ns", "p", None))


def test_a_log_is_followed_over_silence_and_cuts_and_read_to_the_end_of_the_pod(api, tmp_path):
    api.replies = [
        WAITING,
        Reply(pieces=[at(1, "1", "one")]),  # the server ended the answer, and the container runs
        failure(500),
        Reply(pieces=[at(1, "1", "one"), at(2, "1", "two")], is_cut=True),
        Reply(pieces=[at(2, "1", "two"), at(3, "1", "three")]),
    ]
    running, ended = Seen([pod("p")], False), Seen([pod("p", "Succeeded")], True)
    look = looks(running, running, running, ended)
    found = list(follow_lines(api.client(tmp_path), "ns", look, tail=5, clock=SYSTEM_CLOCK))
    assert found == ["one", "two", "three"]
    tails = [query.get("tailLines") for query in queries(api)]
    assert tails == ["5", None, None, None, None]
    assert all(query["follow"] == "true" for query in queries(api))


def test_every_later_pod_is_followed_from_its_first_line(api, tmp_path):
    """Two pods may end between two looks."""
    a, b, c, d = pod("a", "Failed"), pod("b", "Failed"), pod("c", "Failed"), pod("d", "Succeeded")
    api.replies = [Reply(pieces=[at(1, "1", name)]) for name in ("b", "c", "d")]
    look = looks(Seen([a, b], False), Seen([a, b], False), Seen([a, b, c, d], True))
    assert list(follow_lines(api.client(tmp_path), "ns", look, tail=2, clock=SYSTEM_CLOCK)) == ["b", "c", "d"]
    assert [request.path.split("/")[-2] for request in api.requests] == ["b", "c", "d"]
    assert [query.get("tailLines") for query in queries(api)] == ["2", None, None]


def test_a_pod_that_is_deleted_while_it_is_followed_ends_its_log(api, tmp_path):
    api.replies = [Reply(pieces=[at(1, "1", "one")], is_cut=True), failure(404, "NotFound")]
    look = looks(Seen([pod("a")], False), Seen([pod("a")], False), Seen([], True))
    assert list(follow_lines(api.client(tmp_path), "ns", look, tail=None, clock=SYSTEM_CLOCK)) == ["one"]


def test_a_rank_without_any_log_raises_so_that_the_store_is_asked(api, tmp_path):
    api.replies = [failure(404, "NotFound")]
    client = api.client(tmp_path)
    for seen in (Seen([], True), Seen([pod("a")], True)):
        with pytest.raises(RunNotFound):
            list(follow_lines(client, "ns", looks(seen), tail=None, clock=SYSTEM_CLOCK))


def test_a_rank_that_waits_for_long_is_looked_at_less_often_until_it_prints(api, tmp_path):
    api.replies = [Reply(pieces=[at(1, "1", "one")]), Reply(pieces=[])]
    waits, running, over = [Seen([], False)] * 6, [Seen([pod("a")], False)] * 2, Seen([pod("a", "Succeeded")], True)
    clock = FakeClock()
    look = looks(*waits, *running, over)
    assert list(follow_lines(api.client(tmp_path), "ns", look, tail=None, clock=clock)) == ["one"]
    assert clock.slept[:2] == [0.01, 0.015]
    assert clock.slept[4:] == [0.04, 0.04, 0.01, 0.015]


def test_a_pod_that_failed_before_its_container_started_ends_the_log(api, tmp_path):
    api.replies = [WAITING]
    look = looks(Seen([pod("a", "Failed")], True))
    assert list(follow_lines(api.client(tmp_path), "ns", look, tail=None, clock=SYSTEM_CLOCK)) == []


def test_no_permission_ends_following_with_the_error(api, tmp_path):
    api.replies = [failure(403, "Forbidden")]
    with pytest.raises(AuthError):
        list(PodLog(api.client(tmp_path), "ns", "p", tail=None, is_followed=True).lines())


@pytest.mark.parametrize(("first", "tail"), [(WAITING, 0), (WAITING, 1), (Reply(pieces=[], is_cut=True), 1)])
def test_a_tail_leaves_out_no_line_that_was_printed_after_the_first_look(api, tmp_path, first, tail):
    api.replies = [first, Reply(pieces=[at(1, "1", "one") + at(1, "2", "two")])]
    look = looks(Seen([pod("p")], False), Seen([pod("p", "Succeeded")], True))
    found = follow_lines(api.client(tmp_path), "ns", look, tail=tail, clock=SYSTEM_CLOCK)
    assert list(found) == ["one", "two"]
    assert [query.get("tailLines") for query in queries(api)] == [str(tail), None]


GONE = "unable to retrieve container logs for containerd://0123"
LINKS = (
    'failed to try resolving symlinks in path "/var/log/pods/ns_p_1/replica/0.log": lstat: no such file or directory'
)
NO_CONTAINER = 'rpc error: code = NotFound desc = an error occurred when try to find container "0123": not found'
NO_WATCH = "failed to create fsnotify watcher: too many open files"
NO_LOG = [
    Reply(pieces=[GONE.encode()]),
    Reply(pieces=[LINKS.encode()]),
    failure(400, "BadRequest", GONE),
    failure(400, "BadRequest", LINKS),
    failure(400, "BadRequest", f'container "{CONTAINER}" in pod "p" is terminated'),
    failure(400, "BadRequest", 'pod "p" cannot be found - no logs available'),
]


@pytest.mark.parametrize("reply", NO_LOG)
def test_a_log_that_the_kubelet_has_lost_is_asked_of_the_store(api, tmp_path, reply):
    """Kubelets from 1.32 on say it with the status 200."""
    api.replies = [reply]
    client = api.client(tmp_path)
    with pytest.raises(RunNotFound):
        list(last_lines(client, "ns", "p", None))
    with pytest.raises(RunNotFound):
        list(follow_lines(client, "ns", looks(Seen([pod("p", "Failed")], True)), tail=None, clock=SYSTEM_CLOCK))


@pytest.mark.parametrize("sentence", [NO_CONTAINER, NO_WATCH])
def test_what_the_kubelet_says_at_the_end_of_a_log_is_no_line_of_the_replica(api, tmp_path, sentence):
    api.replies = [
        Reply(pieces=[at(1, "1", "one"), sentence.encode()]),
        Reply(pieces=[at(1, "1", "one"), at(2, "1", "two"), sentence.encode()]),
    ]
    look = looks(Seen([pod("p")], False), Seen([pod("p", "Failed")], True))
    assert list(follow_lines(api.client(tmp_path), "ns", look, tail=None, clock=SYSTEM_CLOCK)) == ["one", "two"]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == ["one", "two"]


def test_a_program_may_print_the_sentences_of_a_kubelet(api, tmp_path):
    api.replies = [Reply(pieces=[at(1, "1", NO_CONTAINER), at(1, "2", NO_WATCH)[:-1]])]
    assert list(last_lines(api.client(tmp_path), "ns", "p", None)) == [NO_CONTAINER, NO_WATCH]
