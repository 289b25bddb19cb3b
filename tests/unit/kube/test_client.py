"""Requests to a cluster: what is sent, what is tried again, and what its end is."""

from __future__ import annotations

from threading import Event, Thread

import pytest
from kube_api import Reply, ScriptedApi, client_of, failure

from atoll.errors import AuthError, BackendError, BackendUnavailable, ConfigError, RunNotFound
from atoll.kube.client import path_to
from atoll.kube.connection import Connection

pytestmark = pytest.mark.server
PATH = "/api/v1/namespaces/ns/pods"


def test_paths_are_quoted():
    assert path_to("jobs", "ns", "a/b", api="/apis/batch/v1") == "/apis/batch/v1/namespaces/ns/jobs/a%2Fb"
    assert path_to("namespaces") == "/api/v1/namespaces"


def test_a_request_is_plain_json_and_warnings_come_with_the_answer(api, tmp_path):
    api.replies = [Reply(201, {"kind": "Job"}, {"Warning": '299 - "would violate PodSecurity \\"restricted\\""'})]
    answer = api.client(tmp_path).call("POST", PATH, "Job `x`", "submit", query={"dryRun": "All"}, body={"a": [1]})
    (request,) = api.requests
    assert (request.method, request.path, request.query, request.body) == ("POST", PATH, {"dryRun": "All"}, {"a": [1]})
    assert request.headers["Content-Type"] == "application/json"
    assert (answer.body, answer.warnings) == ({"kind": "Job"}, ('would violate PodSecurity "restricted"',))


@pytest.mark.parametrize(
    "trouble",
    [failure(429, "TooManyRequests", Retry_After="0"), failure(500), Reply(pieces=[b'{"kind'], is_cut=True)],
    ids=["429", "500", "cut"],
)
def test_what_may_pass_is_tried_again(api, tmp_path, trouble):
    api.replies = [trouble, trouble, Reply(200, {"kind": "Job"})]
    assert api.client(tmp_path).get(PATH, "x", "status") == {"kind": "Job"}
    assert len(api.requests) == 3


def test_a_server_that_asks_to_wait_is_obeyed(api, tmp_path):
    api.replies = [failure(429, "TooManyRequests", Retry_After="7"), Reply()]
    slept: list[float] = []

    class Clock:
        def monotonic(self) -> float:
            return sum(slept)

        def time(self) -> float:
            return 0.0

        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    client = api.client(tmp_path, patience_s=60.0)
    client._clock = Clock()
    client.get(PATH, "x", "status")
    assert slept == [7.0]


@pytest.mark.parametrize(
    ("reply", "kind", "reason"),
    [
        (failure(403, "Forbidden"), AuthError, "forbidden"),
        (failure(404, "NotFound"), RunNotFound, ""),
        (failure(422, "Invalid"), ConfigError, "invalid"),
        (failure(409, "AlreadyExists"), BackendError, "taken"),
    ],
)
def test_what_cannot_pass_is_raised_at_once(api, tmp_path, reply, kind, reason):
    api.replies = [reply]
    with pytest.raises(kind) as caught:
        api.client(tmp_path).get(PATH, "Job `x`", "status")
    assert (caught.value.reason, len(api.requests)) == (reason, 1)
    assert caught.value.__cause__ is not None


def test_trouble_that_stays_is_raised_after_the_patience_or_the_tries(api, tmp_path):
    api.replies = [failure(500)]
    with pytest.raises(BackendUnavailable):
        api.client(tmp_path, patience_s=0.0).get(PATH, "x", "status")
    assert len(api.requests) == 1
    with pytest.raises(BackendUnavailable):
        api.client(tmp_path, patience_s=60.0).call("POST", PATH, "x", "submit", body={}, tries=2)
    assert len(api.requests) == 3


def test_a_list_is_read_in_pages_and_again_as_a_whole_when_a_page_has_expired(api, tmp_path):
    pages = [Reply(body={"items": [1, 2], "metadata": {"continue": "t"}}), Reply(body={"items": [3], "metadata": {}})]
    api.replies = list(pages)
    assert api.client(tmp_path).list(PATH, "x", "status", query={"labelSelector": "a=b"}) == [1, 2, 3]
    assert [request.query.get("continue") for request in api.requests] == [None, "t"]
    api.replies = [pages[0], failure(410, "Expired"), Reply(body={"items": [1, 2, 3]})]
    assert api.client(tmp_path).list(PATH, "x", "status") == [1, 2, 3]
    assert api.requests[-1].query == {}


def test_a_stream_yields_what_comes_and_a_cut_is_no_end(api, tmp_path):
    api.replies = [Reply(pieces=[b"one\n", b"two\n"]), Reply(pieces=[b"one\n"], is_cut=True)]
    client = api.client(tmp_path)
    assert b"".join(client.stream(PATH, "x", "logs", query={}, idle_s=5.0)) == b"one\ntwo\n"
    found = []
    with pytest.raises(BackendUnavailable):
        found.extend(client.stream(PATH, "x", "logs", query={}, idle_s=5.0))
    assert found == [b"one\n"]


def test_a_stream_that_is_silent_for_too_long_is_cut(api, tmp_path):
    api.replies = [Reply(pieces=[b"one\n"], held=Event())]
    with pytest.raises(BackendUnavailable):
        list(api.client(tmp_path).stream(PATH, "x", "logs", query={}, idle_s=0.05))


def test_closing_a_stream_ends_a_read_in_another_thread(api, tmp_path):
    api.replies = [Reply(pieces=[b"one\n"], held=Event())]
    stream = api.client(tmp_path).stream(PATH, "x", "logs", query={}, idle_s=60.0)
    found, has_read = [], Event()

    def read() -> None:
        try:
            for chunk in stream:
                found.append(chunk)
                has_read.set()
        except BackendUnavailable as exc:
            found.append(type(exc))

    thread = Thread(target=read, daemon=True)
    thread.start()
    assert has_read.wait(30)
    stream.close()
    thread.join(30)
    assert not thread.is_alive()
    assert found[0] == b"one\n"


def test_no_server_and_a_server_that_says_nothing(api, tmp_path):
    held = Event()
    api.replies = [Reply(pieces=[], held=held)]
    with pytest.raises(BackendUnavailable):
        api.client(tmp_path, timeout_s=0.05, patience_s=0.0).get(PATH, "x", "status")
    held.set()
    with ScriptedApi().running() as other:
        gone = other.kubeconfig(tmp_path)
    with pytest.raises(BackendUnavailable) as caught:
        client_of(Connection(kubeconfig=str(gone))).get(PATH, "x", "status")
    assert caught.value.reason == "unreachable"


def test_a_server_without_tls_where_tls_is_expected_is_not_tried_again(api, tmp_path):
    config = api.kubeconfig(tmp_path, server=api.url.replace("http:", "https:"))
    with pytest.raises(BackendError) as caught:
        client_of(Connection(kubeconfig=str(config)), patience_s=60.0).get(PATH, "x", "status")
    assert (caught.value.reason, caught.value.retryable) == ("tls", False)
