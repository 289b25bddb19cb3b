"""The cloud store when the network and the service misbehave, in a forked child, and without obstore."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from atoll.errors import KeyExists, KeyNotFound, MissingExtra, StoreError, StoreRefused, StoreUnavailable
from atoll.registry import install_command
from atoll.stores.cloud.errors import Answer, translated
from atoll.stores.cloud.store import CloudStore
from atoll.testing.fakes import FakeClock
from services.fault_proxy import Fault, FaultProxy, creates
from services.gcs_shim import GcsShim

pytestmark = [pytest.mark.process, pytest.mark.server]

TOKEN = {"bearer_token": "t"}


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with GcsShim(token="t") as shim, FaultProxy(shim.url) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy) -> CloudStore:
    store = CloudStore.from_uri(f"gs://bucket/run?endpoint={proxy.url}", config=TOKEN, max_retries=1)
    store.create("warm-up", b"")
    store.delete("warm-up")
    proxy.requests.clear()
    return store


def test_a_create_costs_one_request(store: CloudStore, proxy: FaultProxy) -> None:
    store.create("a", b"x")
    assert [method for method, _ in proxy.requests] == ["PUT"]


def test_the_probe_is_made_once(proxy: FaultProxy) -> None:
    store = CloudStore.from_uri(f"gs://bucket/run?endpoint={proxy.url}", config=TOKEN)
    store.create("a", b"x")
    assert any(".atoll-probe" in path for _, path in proxy.requests)
    proxy.requests.clear()
    store.create("b", b"x")
    assert not any(".atoll-probe" in path for _, path in proxy.requests)
    assert list(store.list()) == ["a", "b"]


def test_a_create_that_never_arrived_is_unavailable_and_leaves_nothing(store: CloudStore, proxy: FaultProxy) -> None:
    proxy.faults.append(Fault(creates, times=2))
    with pytest.raises(StoreUnavailable):
        store.create("a", b"x")
    store.create("a", b"x")


def test_a_create_that_lost_says_so_though_its_first_answer_was_lost(store: CloudStore, proxy: FaultProxy) -> None:
    store.create("a", b"same")
    proxy.faults.append(Fault(creates, status=500, is_after_effect=True))
    with pytest.raises(KeyExists):
        store.create("a", b"same")


def test_a_create_whose_answers_are_all_lost_has_won_if_its_mark_is_there(store: CloudStore, proxy: FaultProxy) -> None:
    proxy.faults.append(Fault(creates, times=2, status=500, is_after_effect=True))
    store.create("a", b"x")
    assert bytes(store.get("a")) == b"x"


def test_an_object_without_a_mark_belongs_to_someone_else(store: CloudStore) -> None:
    store.put("a", b"x")
    with pytest.raises(KeyExists):
        store.create("a", b"x")


def test_conflict_without_end_is_unavailable(proxy: FaultProxy, store: CloudStore) -> None:
    clock = FakeClock()
    store._clock = clock
    proxy.faults.append(Fault(creates, times=float("inf"), status=409, code="ConditionalRequestConflict"))
    with pytest.raises(StoreUnavailable) as caught:
        store.create("a", b"x")
    assert (caught.value.key, caught.value.reason) == ("a", "conflict")
    assert len(clock.slept) == 8


def test_a_time_out_that_obstore_does_not_repeat_is_repeated(store: CloudStore, proxy: FaultProxy) -> None:
    proxy.faults.append(Fault(status=400, code="RequestTimeout"))
    store.put("a", b"x")
    proxy.faults.append(Fault(creates, status=400, code="RequestTimeout", is_after_effect=True))
    store.create("b", b"x")
    assert list(store.list()) == ["a", "b"]


def test_a_body_cut_short_is_never_returned(store: CloudStore, proxy: FaultProxy) -> None:
    store.put("a", b"x" * 100_000)

    def cut(body: bytes) -> bytes:
        return body[:-1]

    proxy.faults.append(Fault(lambda method, *_: method == "GET", times=float("inf"), spoil=cut))
    with pytest.raises(StoreUnavailable):
        store.get("a")


def test_buffers_go_up_as_one_object_in_one_request(store: CloudStore, proxy: FaultProxy) -> None:
    store.put("a", [b"head", memoryview(bytearray(1 << 20))])
    assert len(proxy.requests) == 1
    assert len(store.get("a")) == 4 + (1 << 20)


def test_what_is_read_can_be_used_without_a_copy(store: CloudStore) -> None:
    store.put("a", b"0123")
    found = store.get("a")
    assert isinstance(found, memoryview)
    assert (found.format, found.readonly, found[1:3]) == ("B", True, b"12")


def test_a_slow_upload_is_not_taken_for_a_dead_one() -> None:
    """The HTTP client's read time-out runs while a body goes up; a second of it must not end a two-second upload."""
    with _slow_server(bytes_per_s=4e6) as server:
        keys = {"access_key_id": "k", "secret_access_key": "s"}
        store = CloudStore.from_uri(f"s3://b?endpoint={server.url}", config=keys, read_timeout_s=1.0, max_retries=0)
        store.put("a", bytes(8_000_000))
        assert server.has_all, "the upload was reported as done before the server had all of it"


def test_a_missing_bucket_is_not_a_missing_key() -> None:
    answer = Answer("FileNotFoundError", "status code: 404: <Code>NoSuchBucket</Code>", 404, "NoSuchBucket")
    error = translated(answer, "get", "s3://b", "k")
    assert type(error) is StoreError
    assert error.reason == "bucket"


@pytest.mark.parametrize(
    ("kind", "status", "code", "expected"),
    [
        ("FileNotFoundError", 404, "NoSuchKey", KeyNotFound),
        ("GenericError", 404, "NoSuchBucket", StoreError),
        ("PermissionDeniedError", 403, "AccessDenied", StoreRefused),
        ("UnauthenticatedError", 401, None, StoreRefused),
        ("GenericError", 403, "SignatureDoesNotMatch", StoreRefused),
        ("GenericError", 400, "ExpiredToken", StoreRefused),
        ("GenericError", 429, None, StoreUnavailable),
        ("GenericError", 500, "InternalError", StoreUnavailable),
        ("GenericError", 503, "SlowDown", StoreUnavailable),
        ("AlreadyExistsError", 409, "OperationAborted", StoreUnavailable),
        ("GenericError", None, None, StoreUnavailable),
        ("GenericError", 501, "NotImplemented", StoreError),
        ("NotSupportedError", None, None, StoreError),
    ],
)
def test_each_answer_has_one_meaning(
    kind: str, status: int | None, code: str | None, expected: type[StoreError]
) -> None:
    assert type(translated(Answer(kind, "text", status, code), "put", "s3://b", "k")) is expected


def assert_told_once(error: StoreError, *values: str) -> None:
    for value in values:
        assert error.message.count(value) == 1, (value, error.message)


def test_a_message_has_no_settings_of_the_client_and_nothing_twice() -> None:
    effort = (
        "Error performing GET http://h/b?a=2 in 1.7783s, after 10 retries, max_retries: 10, retry_timeout: 900s  - "
    )
    listing = f"Generic S3 error: Error performing list request: {effort}HTTP error: error sending request"
    error = translated(Answer("GenericError", listing, None, None), "list", "s3://b", "a/")
    assert_told_once(error, "`a/`", "s3://b", "HTTP error: error sending request", "1.8s")
    assert "http://h" not in error.message
    assert "retry_timeout" not in error.message
    denied = "The operation lacked the privileges for path k: Error performing PUT http://h/k in 2ms - status code: 403"
    error = translated(Answer("PermissionDeniedError", denied, 403, None), "put", "s3://b", "k")
    assert_told_once(error, "`k`", "s3://b", "The operation lacked the privileges for path k", "status code: 403")
    assert "http://h" not in error.message
    body = '<?xml version="1.0"?>\n<Error><Code>SlowDown</Code><Message>Be gentle.</Message><Id>9</Id></Error>'
    busy = f"Generic S3 error: {effort}Server returned non-2xx status code: 503 Service Unavailable: {body}"
    error = translated(Answer("GenericError", busy, 503, "SlowDown"), "get", "s3://b", "k")
    assert_told_once(error, "503 Service Unavailable: SlowDown: Be gentle.", "1.8s")
    assert "<Code>" not in error.message
    token = f"{effort.replace('http://h/b', 'http://h/latest/api/token')}no route"
    assert "/latest/api/token" in translated(Answer("GenericError", token, None, None), "put", "s3://b", "k").message


def test_every_exception_of_obstore_is_translated(store: CloudStore) -> None:
    """A new kind in a later obstore must not slip through untyped."""
    from obstore import exceptions

    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 8
    for kind in kinds:

        def fail(_: object, kind: type[Exception] = kind) -> None:
            raise kind("something")

        with pytest.raises(StoreError) as caught:
            store._request("put", "k", fail)
        assert type(caught.value.__cause__) is kind


FORK = """
import os, signal, sys
from atoll.errors import StoreError
from atoll.stores.cloud.store import CloudStore
store = CloudStore.from_uri(sys.argv[1])
if sys.argv[2] == "used":
    store.put("a", b"from the parent")
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        (CloudStore.from_uri(sys.argv[1]) if sys.argv[3] == "new" else store).put("b", b"from the child")
    except StoreError as exc:
        os._exit(7 if "spawn" in str(exc) else 8)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("parent", "child", "code"), [("used", "same", "7"), ("used", "new", "7"), ("unused", "same", "0")]
)
def test_a_forked_child_is_told_instead_of_hanging(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, parent: str, child: str, code: str
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "t")
    uri = f"gs://bucket/run?endpoint={proxy.url}"
    command = [sys.executable, "-W", "ignore", "-c", FORK, uri, parent, child]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == code


def test_without_obstore_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None; from atoll.stores.cloud.store import CloudStore; "
        "CloudStore.from_uri('s3://bucket')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert MissingExtra.__name__ in result.stderr
    assert f"hint: {install_command('cloud')}" in result.stderr


class _slow_server:  # noqa: N801
    """Takes one upload at a limited speed, then says 200."""

    def __init__(self, *, bytes_per_s: float) -> None:
        self._pause_s = 100_000 / bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.has_all = False

    def __enter__(self) -> _slow_server:
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(timeout=10)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
            got = b""
            while b"\r\n\r\n" not in got:
                got += connection.recv(4096)
            _, _, body = got.partition(b"\r\n\r\n")
            left = 8_000_000 - len(body)
            while left > 0:
                piece = connection.recv(100_000)
                if not piece:
                    return
                left -= len(piece)
                time.sleep(self._pause_s * len(piece) / 100_000)
            self.has_all = True
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')
