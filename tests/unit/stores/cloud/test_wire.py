"""Reading from the socket when the server speaks badly, breaks off or goes silent, over TLS, and when interrupted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest

from atoll.errors import StoreRefused, StoreUnavailable
from atoll.stores.cloud.store import CloudStore
from atoll.stores.fast import BufferBody
from atoll.testing.store_contract import pattern, read_unevenly
from services.certificates import certificate
from services.scripted_s3 import ScriptedS3, reset

pytestmark = [pytest.mark.process, pytest.mark.server]

DATA = pattern(2_000_001)
HALF = 1_000_000


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3(DATA) as server:
        yield server


@pytest.fixture
def store(server: ScriptedS3) -> CloudStore:
    return _store(server)


def _store(server: ScriptedS3, **options: object) -> CloudStore:
    return CloudStore.from_uri(f"s3://bucket/run?endpoint={server.url}", max_retries=0, **options)


def read(store: CloudStore) -> bytes:
    with closing(store.open("a")) as body:
        return read_unevenly(body)


def cut(server: ScriptedS3) -> bytes:
    """An answer that ends in the middle."""
    return server.whole()[:HALF]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\noops\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED,
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n", 1),
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nmore than three",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
        b"220 mail.example.org ready\r\n\r\n",
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"",
    ],
    ids=range(14),
)
def test_what_is_no_plain_answer_goes_the_other_way(server: ScriptedS3, store: CloudStore, answer: bytes) -> None:
    server.scripts.append(server.says(answer, then_close=True))
    body = store.open("a")
    assert isinstance(body, BufferBody)
    assert read_unevenly(body) == DATA
    assert read(store) == DATA
    assert (len(server.straight), server.others) == (2, 1)


@pytest.mark.parametrize("header", ["Connection: close", "connection: Close", "Connection: keep-alive, close"])
def test_a_connection_that_is_to_be_closed_is_not_used_again(
    server: ScriptedS3, store: CloudStore, header: str
) -> None:
    server.scripts.append(server.says(server.whole("1.1", header)))
    assert read(store) == read(store) == read(store) == DATA
    first, second, third = server.straight
    assert first != second == third


def test_answers_of_http_1_0_are_read_and_their_connections_not_used_again(
    server: ScriptedS3, store: CloudStore
) -> None:
    server.scripts.append(server.says(server.whole("1.0"), then_close=True))
    assert read(store) == read(store) == DATA
    assert len(set(server.straight)) == 2
    assert server.others == 0


def test_a_connection_closed_while_idle_is_replaced(server: ScriptedS3, store: CloudStore) -> None:
    server.scripts.append(server.says(server.whole(), then_close=True))
    assert read(store) == read(store) == DATA
    assert server.others == 0


def test_a_connection_broken_off_when_it_is_used_again_is_replaced(server: ScriptedS3, store: CloudStore) -> None:
    server.scripts.extend([server.says(server.whole()), reset])
    assert read(store) == read(store) == DATA
    first, second, third = server.straight
    assert first == second != third
    assert server.others == 0


def test_an_answer_nobody_asked_for_is_not_taken_for_the_next(server: ScriptedS3, store: CloudStore) -> None:
    """The length that was promised is too small, and what follows looks like an answer."""
    sent = Event()

    def say_twice(connection: socket.socket) -> bool:
        connection.sendall(server.whole())
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")
        sent.set()
        return True

    server.scripts.append(say_twice)
    assert read(store) == DATA
    assert sent.wait(10)
    assert read(store) == DATA
    assert server.others == 0


def test_an_object_larger_than_promised_is_cut_where_it_was_promised(server: ScriptedS3, store: CloudStore) -> None:
    server.scripts.append(server.says(server.whole() + b"and more"))
    assert read(store) == DATA
    assert read(store) == DATA


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ScriptedS3, CloudStore]]:
    """A server, and a store in it that gives up soon; without TLS and with it."""
    if request.param == "plain":
        with ScriptedS3(DATA) as server:
            yield server, _store(server, read_timeout_s=2.0)
    else:
        with ScriptedS3(DATA, certificate=certificate(tmp_path)) as server:
            yield server, _store(server, read_timeout_s=2.0, ca_file=str(tmp_path / "tls.pem"))


def test_bodies_are_read_and_connections_used_again(either: tuple[ScriptedS3, CloudStore]) -> None:
    server, store = either
    assert [read(store) for _ in range(3)] == [DATA] * 3
    assert len(set(server.straight)) == 1
    assert (len(server.straight), server.others) == (3, 0)


def test_a_body_that_stays_out_is_unavailable(either: tuple[ScriptedS3, CloudStore]) -> None:
    server, store = either
    server.scripts.append(server.says_and_waits(cut(server)))
    body = store.open("a")
    with pytest.raises(StoreUnavailable) as caught:
        read_unevenly(body)
    assert (caught.value.uri, caught.value.key, caught.value.reason) == (store.uri, "a", "timeout")
    body.close()
    assert read(store) == DATA


@pytest.mark.slow
def test_a_body_that_comes_slowly_is_waited_for(either: tuple[ScriptedS3, CloudStore]) -> None:
    """In one piece that takes three times as long as the store would wait for the next byte."""
    server, _ = either
    store = CloudStore(either[1].address, replace(either[1]._settings, read_timeout_s=1.0))

    def slowly(connection: socket.socket) -> bool:
        answer = server.whole()
        for start in range(0, len(answer), 100_000):
            connection.sendall(answer[start : start + 100_000])
            server.is_over.wait(0.15)
        return True

    server.scripts.append(slowly)
    with closing(store.open("a")) as body:
        room = bytearray(body.size)
        body.readinto(memoryview(room))
    assert room == DATA
    assert server.others == 0


def test_an_answer_that_comes_in_crumbs_is_read(either: tuple[ScriptedS3, CloudStore]) -> None:
    server, store = either

    def in_crumbs(connection: socket.socket) -> bool:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = server.whole()
        for i in range(300):
            connection.sendall(answer[i : i + 1])
        connection.sendall(answer[300:])
        return True

    server.scripts.append(in_crumbs)
    assert read(store) == read(store) == DATA
    assert len(set(server.straight)) == 1
    assert server.others == 0


def test_a_body_that_breaks_off_is_unavailable(either: tuple[ScriptedS3, CloudStore]) -> None:
    server, store = either
    server.scripts.append(server.says(cut(server), then_close=True))
    body = store.open("a")
    with pytest.raises(StoreUnavailable) as caught:
        read_unevenly(body)
    assert caught.value.reason == "cut"
    assert isinstance(caught.value.__cause__, OSError)
    assert read(store) == DATA


@pytest.mark.parametrize("first", [[], [b"used before"]], ids=["new connection", "used connection"])
def test_an_answer_that_stays_out_is_asked_for_the_other_way_once(
    either: tuple[ScriptedS3, CloudStore], first: list[bytes]
) -> None:
    server, store = either
    for _ in first:
        assert read(store) == DATA
    server.scripts.append(server.says_and_waits(b"HTTP/1.1 2"))
    assert read(store) == DATA
    assert (len(server.straight), server.others) == (len(first) + 1, 1)


def test_a_store_with_little_patience_does_not_wait_twice(either: tuple[ScriptedS3, CloudStore]) -> None:
    server, store = either
    short_timeout = store.with_retry_timeout(1.0)
    server.scripts.append(server.says_and_waits(b"HTTP/1.1 2"))
    with pytest.raises(StoreUnavailable) as caught:
        short_timeout.open("a")
    assert caught.value.__cause__ is not None
    assert (caught.value.key, caught.value.uri, caught.value.reason) == ("a", store.uri, "timeout")
    assert "X-Amz" not in f"{caught.value} {caught.value.__cause__!r}"
    assert read(short_timeout) == DATA
    assert server.others == 0


def test_a_certificate_nobody_vouches_for_is_refused_as_get_refuses_it(tmp_path: Path) -> None:
    with ScriptedS3(DATA, certificate=certificate(tmp_path)) as server:
        with pytest.raises(StoreRefused, match="ca_file"):
            _store(server).open("a")
        assert server.requests == []


@contextmanager
def every(seconds: float, action: Callable[..., object]) -> Iterator[None]:
    """Do it in the main thread, whatever that is doing, again and again."""
    before = signal.signal(signal.SIGALRM, action)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signals_while_bytes_arrive_change_nothing(server: ScriptedS3, store: CloudStore) -> None:
    disturbed: SimpleQueue[None] = SimpleQueue()  # the one whose put may interrupt itself

    def piece_by_piece(connection: socket.socket) -> bool:
        answer = server.whole()
        for start in range(0, len(answer), 100_000):
            disturbed.get(timeout=10)
            connection.sendall(answer[start : start + 100_000])
        return True

    server.scripts.append(piece_by_piece)
    with every(0.005, lambda *_: disturbed.put(None)), closing(store.open("a")) as body:
        room = bytearray(body.size)
        body.readinto(memoryview(room))
    assert room == DATA
    assert server.others == 0


def test_a_connection_is_not_used_again_after_an_interrupt(server: ScriptedS3, store: CloudStore) -> None:
    """Its other half would be taken for the answer to the next request."""
    interrupted = Event()

    def wait_in_the_middle(connection: socket.socket) -> bool:
        connection.sendall(cut(server))
        interrupted.wait(10)
        connection.sendall(server.whole()[HALF:])
        return True

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    server.scripts.append(wait_in_the_middle)
    body = store.open("a")
    room = memoryview(bytearray(body.size))
    with pytest.raises(KeyboardInterrupt), every(0.1, interrupt):
        body.readinto(room)
    interrupted.set()
    with pytest.raises(StoreUnavailable):
        body.readinto(room[:1])
    body.close()
    assert read(store) == DATA
    assert len(set(server.straight)) == 2
    assert server.others == 0


FORK = """
import os, signal, sys
from atoll.errors import StoreError
from atoll.stores.cloud.store import CloudStore
store = CloudStore.from_uri(sys.argv[1])
body = store.open("a")
body.readinto(memoryview(bytearray(body.size)))
body.close()
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        store.open("a")
    except StoreError as exc:
        os._exit(7 if "spawn" in str(exc) else 8)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
store.open("a").close()
print(code)
"""


def test_a_forked_child_does_not_use_its_parents_connections(server: ScriptedS3) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, f"s3://bucket?endpoint={server.url}"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == "7"
    assert len(server.straight) == 2
    assert len(set(server.straight)) == 1
