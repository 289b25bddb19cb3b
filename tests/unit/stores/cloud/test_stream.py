"""Objects of S3 read straight from the socket: that it is done, and that whatever is unusual goes the other way."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atoll.errors import KeyNotFound, StoreError, StoreRefused, StoreUnavailable
from atoll.stores.cloud.address import parse_address
from atoll.stores.cloud.client import CloudSettings
from atoll.stores.cloud.store import CloudStore
from atoll.stores.fast import BufferBody
from atoll.testing.fakes import FakeClock
from atoll.testing.store_contract import pattern, read_unevenly
from services.fake_aws import FakeAws
from services.fault_proxy import Fault, FaultProxy
from services.stores import Service

DATA = pattern(3_000_001)


def signed(method: str, path: str, headers: dict[str, str]) -> bool:
    """A request by an address that was signed."""
    return method == "GET" and "X-Amz-Signature=" in path


@pytest.fixture
def service(seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed


@pytest.fixture
def proxy(service: Service) -> Iterator[FaultProxy]:
    with FaultProxy(service.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(service: Service, proxy: FaultProxy) -> CloudStore:
    store = _store(service, proxy)
    store.put("a", DATA)
    proxy.requests.clear()
    return store


def _store(service: Service, proxy: FaultProxy, **options: object) -> CloudStore:
    return CloudStore.from_uri(service.uri(service.new_place(), endpoint=proxy.url), max_retries=0, **options)


def read(store: CloudStore, key: str = "a") -> bytes:
    with closing(store.open(key)) as body:
        return read_unevenly(body)


def asked(proxy: FaultProxy) -> list[str]:
    """How each request that came through was signed; then forget them."""
    found = ["address" if signed(method, path, {}) else f"{method} header" for method, path in proxy.requests]
    proxy.requests.clear()
    return found


def test_an_object_costs_one_request_and_many_one_connection(store: CloudStore, proxy: FaultProxy) -> None:
    before = proxy.connections
    for _ in range(4):
        assert read(store) == DATA
    assert asked(proxy) == ["address"] * 4
    assert proxy.connections == before + 1


def test_a_missing_key_costs_one_request_and_keeps_the_connection(store: CloudStore, proxy: FaultProxy) -> None:
    before = proxy.connections
    for _ in range(4):
        with pytest.raises(KeyNotFound) as caught:
            store.open("missing")
        assert caught.value.key == "missing"
    assert read(store) == DATA
    assert asked(proxy) == ["address"] * 5
    assert proxy.connections == before + 1


def test_a_missing_bucket_is_not_a_missing_key(service: Service, proxy: FaultProxy) -> None:
    store = CloudStore.from_uri(service.uri("no-such-bucket", endpoint=proxy.url))
    with pytest.raises(StoreError) as caught:
        store.open("a")
    assert type(caught.value) is StoreError
    assert caught.value.reason == "bucket"


def test_keys_that_need_quoting_are_read_by_a_signed_address(store: CloudStore, proxy: FaultProxy) -> None:
    keys = ["a b+c%20d&e=f?g#h", "%", "+", "é/文/🏝️", "quote'\"`$(x);|<>*@:,=!", "~._-"]
    for key in keys:
        store.put(key, key.encode())
    proxy.requests.clear()
    assert [read(store, key).decode() for key in keys] == keys
    assert asked(proxy) == ["address"] * len(keys)


def test_a_body_that_is_cut_is_unavailable_and_the_next_one_is_whole(store: CloudStore, proxy: FaultProxy) -> None:
    proxy.faults.append(Fault(signed, spoil=lambda body: body[: len(body) // 2]))
    body = store.open("a")
    room = memoryview(bytearray(body.size))
    body.readinto(room[:1000])
    with pytest.raises(StoreUnavailable) as caught:
        body.readinto(room[1000:])
    assert caught.value.reason == "cut"
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    with pytest.raises(StoreUnavailable):
        body.readinto(room[:1])
    body.close()
    assert read(store) == DATA
    assert asked(proxy) == ["address"] * 2


@pytest.mark.parametrize(
    "fault",
    [
        lambda: Fault(signed, status=503),
        lambda: Fault(signed, status=500, code="InternalError"),
        lambda: Fault(signed, status=403, code="AccessDenied"),
        lambda: Fault(signed, status=400, code="ExpiredToken"),
        lambda: Fault(signed, status=307, code="TemporaryRedirect"),
        lambda: Fault(signed, status=206, code=""),
        lambda: Fault(signed, status=404, code=""),
        lambda: Fault(signed, status=404, code="NoSuchBucket"),
        lambda: Fault(signed, status=None),
        lambda: Fault(signed, is_reset=True),
    ],
)
def test_what_is_unusual_goes_the_other_way(store: CloudStore, proxy: FaultProxy, fault: Callable[[], Fault]) -> None:
    proxy.faults.append(fault())
    body = store.open("a")
    assert isinstance(body, BufferBody)
    assert read_unevenly(body) == DATA
    assert asked(proxy) == ["address", "GET header"]
    assert read(store) == DATA
    assert asked(proxy) == ["address"]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", StoreUnavailable),
        (403, "AccessDenied", StoreRefused),
        (307, "TemporaryRedirect", StoreError),
        (404, "NoSuchKey", KeyNotFound),
        (404, "", KeyNotFound),
        (None, "", StoreUnavailable),
    ],
)
def test_an_error_is_the_one_that_get_gives_and_tells_no_address(
    store: CloudStore, proxy: FaultProxy, status: int | None, code: str, expected: type[StoreError]
) -> None:
    proxy.faults.append(Fault(lambda method, *_: method == "GET", times=float("inf"), status=status, code=code))
    with pytest.raises(expected) as of_get:
        store.get("a")
    with pytest.raises(expected) as of_open:
        store.open("a")
    assert type(of_get.value) is type(of_open.value)
    assert of_get.value.hint == of_open.value.hint
    assert "X-Amz" not in _everything_said(of_open.value)


def test_after_three_unusual_answers_in_a_row_the_straight_way_is_left_for_a_while(
    store: CloudStore, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault(signed, times=2))
    assert [read(store) for _ in range(3)] == [DATA] * 3
    assert asked(proxy) == ["address", "GET header"] * 2 + ["address"]
    proxy.faults.append(Fault(signed, times=3))
    assert [read(store) for _ in range(5)] == [DATA] * 5
    assert asked(proxy) == ["address", "GET header"] * 3 + ["GET header"] * 2


def test_after_three_bodies_in_a_row_that_broke_off_the_straight_way_is_left_for_a_while(
    store: CloudStore, proxy: FaultProxy
) -> None:
    """Something on the way may let answers begin and never end; obstore goes on where a body broke off."""
    cut = lambda body: body[: len(body) // 2]  # noqa: E731

    def break_off(times: int) -> None:
        proxy.faults.append(Fault(signed, times=times, spoil=cut))
        for _ in range(times):
            with pytest.raises(StoreUnavailable):
                read(store)

    break_off(2)
    assert read(store) == DATA
    break_off(3)
    proxy.requests.clear()
    assert [read(store) for _ in range(2)] == [DATA] * 2
    assert asked(proxy) == ["GET header"] * 2


def test_the_straight_way_is_tried_again_after_a_minute(service: Service, proxy: FaultProxy) -> None:
    clock = FakeClock()
    uri = service.uri(service.new_place(), endpoint=proxy.url)
    store = CloudStore(parse_address(uri), CloudSettings(max_retries=0), clock=clock)
    store.put("a", DATA)
    proxy.faults.append(Fault(signed, times=4))
    for seconds, way in [
        (0, "address"),
        (0, "address"),
        (0, "address"),
        (59, "header"),
        (2, "address"),
        (59, "header"),
    ]:
        clock.advance(seconds)
        proxy.requests.clear()
        assert read(store) == DATA
        assert asked(proxy) == (["address", "GET header"] if way == "address" else ["GET header"])
    clock.advance(2)
    for _ in range(2):
        assert read(store) == DATA
    assert asked(proxy) == ["address"] * 2


def test_a_connection_is_used_again_only_when_its_body_was_read(store: CloudStore, proxy: FaultProxy) -> None:
    before = proxy.connections
    for count in (0, 1, len(DATA) - 1):
        body = store.open("a")
        body.readinto(memoryview(bytearray(count)))
        body.close()
    assert read(store) == read(store) == DATA
    assert proxy.connections == before + 4


def test_threads_share_the_connections(store: CloudStore, proxy: FaultProxy) -> None:
    before = proxy.connections
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: read(store), range(30))) == {DATA}
    assert asked(proxy) == ["address"] * 30
    assert proxy.connections <= before + 6


def test_options_for_obstore_and_proxies_switch_the_straight_way_off(
    service: Service,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def way(**options: object) -> list[str]:
        store = _store(service, proxy, **options)
        store.put("a", b"x")
        proxy.requests.clear()
        assert read(store) == b"x"
        return asked(proxy)

    assert way(config={"default_region": "us-east-1"}) == ["GET header"]
    monkeypatch.setenv("no_proxy", "example.org")
    assert way() == ["address"]
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert way() == ["GET header"]


@pytest.mark.server
def test_a_store_that_signs_nothing_reads_without_a_signature() -> None:
    with FakeAws() as aws, FaultProxy(aws.url) as proxy:
        store = CloudStore.from_uri(f"s3://bucket?endpoint={proxy.url}&anonymous=true")
        store.put("a", b"x")
        assert read(store) == b"x"
        assert asked(proxy) == ["PUT header", "GET header"]


@pytest.mark.server
def test_temporary_credentials_are_in_the_signed_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "TEMPORARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the+token/")
    with FakeAws() as aws, FaultProxy(aws.url) as proxy:
        store = CloudStore.from_uri(f"s3://bucket?endpoint={proxy.url}")
        store.put("a", b"x")
        assert read(store) == b"x"
        (_, path) = proxy.requests[-1]
        assert "X-Amz-Security-Token=the%2Btoken%2F" in path
        assert "X-Amz-Credential=TEMPORARY%2F" in path


def test_bodies_that_are_dropped_leave_no_connection_open(service: Service) -> None:
    store = CloudStore.from_uri(service.uri(service.new_place()))
    store.put("a", DATA)
    before = _open_files()
    for count in [*range(100), *[len(DATA)] * 10]:
        body = store.open("a")
        body.readinto(memoryview(bytearray(count)))
    del body
    gc.collect()
    assert _open_files() <= before


def test_errors_leave_no_connection_open(service: Service) -> None:
    store = CloudStore.from_uri(service.uri(service.new_place()))
    store.put("a", DATA)
    body = store.open("a")
    before = _open_files()
    for _ in range(100):
        with pytest.raises(KeyNotFound):
            store.open("missing")
    assert _open_files() == before + 1  # one, used again and again
    body.close()
    assert _open_files() == before


def test_what_compiled_code_reads_is_right_and_the_connection_is_used_again(service: Service) -> None:
    import numpy as np

    from atoll._time import SYSTEM_CLOCK
    from atoll.rounds import one_pass
    from atoll.rounds.frames import FrameReader, seal_frame

    store = CloudStore.from_uri(service.uri(service.new_place()))
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    store.put("a", seal_frame({"kind": "mean"}, [values.data.cast("B")]))
    seen = [_sockets()]
    for _ in range(3):
        incoming, out = FrameReader(store.open("a"), SYSTEM_CLOCK, kind="mean"), np.empty_like(values)
        one_pass.place(incoming, out)
        incoming.close()
        assert incoming.check == incoming.header["xxh3"]
        assert np.array_equal(out, values)
        seen.append(_sockets())
    kept = seen[1] - seen[0]
    assert len(kept) == 1
    assert kept == seen[2] - seen[0] == seen[3] - seen[0]


def test_a_store_that_is_dropped_closes_its_idle_connections(service: Service) -> None:
    uri = service.uri(service.new_place())
    CloudStore.from_uri(uri).put("a", DATA)
    before = _sockets()
    store = CloudStore.from_uri(uri)
    bodies = [store.open("a") for _ in range(5)]
    for body in bodies:
        read_unevenly(body)
        body.close()
    ours = _sockets() - before  # obstore closes those of other stores when it likes
    assert len(ours) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del store, bodies, body
        gc.collect()
    assert not ours & _sockets()


def _sockets() -> set[str]:
    """Every socket this process has, by a name that no other one has had."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(fd))
    return {name for name in found if name.startswith("socket:")}


def _open_files() -> int:
    return sum(1 for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd))


def _everything_said(exc: BaseException | None) -> str:
    """The texts of an exception and of all that led to it."""
    said = ""
    while exc is not None:
        said += f"{exc!s} {exc!r}"
        exc = exc.__cause__ or exc.__context__
    return said
