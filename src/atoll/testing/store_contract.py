"""The Store contract as tests: subclass `StoreContract`, define the fixture `new_store`, and run pytest.

    class TestRedisStore(StoreContract):
        @pytest.fixture
        def new_store(self, redis_url):
            return lambda name: RedisStore(f"{redis_url}/{name}")

Each clause S1-S15 (see `atoll.stores.base.Store`) is one or more methods that take the store as an argument, so they
can also be called directly. A test that needs a fixture which the subclass does not have is skipped; the skip says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from itertools import cycle
from threading import Barrier, Thread
from typing import Any, NoReturn, TypeAlias
from unittest.mock import patch

import pytest

from atoll.errors import BadKey, KeyExists, KeyNotFound, StoreRefused, StoreUnavailable
from atoll.registry import open_store
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import Body, HashedWhileWritten, list_sizes, open_body, recycles

NewStore: TypeAlias = Callable[[str], Store]
BIG = 8 * 1024 * 1024 + 1
_MIDDLE = 3_000_001  # more than the buffers of a socket, so most of it is not received when the body is opened
_STEPS = (1, 7, 4096, 0, 100_003, 65_536, 1_500_000)
BOMB = b"catoll.testing.store_contract\nexplode\n(tR."
"""A pickle that calls `explode` when it is unpickled."""


class BodyClauses:
    """Clause S15: objects read piece by piece. Part of `StoreContract`."""

    @pytest.mark.parametrize("size", [0, 1, 4097, BIG])
    def test_s15_a_body_is_what_get_gives(self, store: Store, size: int) -> None:
        data = pattern(size)
        store.put("a/b.bin", data)
        with closing(open_body(store, "a/b.bin")) as body:
            assert body.size == size
            assert read_unevenly(body) == data == bytes(store.get("a/b.bin"))

    @pytest.mark.parametrize(
        "key", ["café/naïve.txt", "日本語/文.json", "a b+c%20d&e=f?g#h", "quote'\"`$(x);|<>*", "~"]
    )
    def test_s15_unusual_keys_are_opened(self, store: Store, key: str) -> None:
        store.put(key, key.encode())
        with closing(open_body(store, key)) as body:
            assert read_unevenly(body) == key.encode()

    def test_s15_a_missing_key_names_itself(self, store: Store) -> None:
        store.put("there/is.bin", b"x")
        for key in ("there/is-not.bin", "there", "there/is.bin/below", "nowhere/at/all"):
            with pytest.raises(KeyNotFound) as caught:
                open_body(store, key)
            assert caught.value.key == key
            assert key in str(caught.value)

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", "a\\b", "a\nb", "x" * 241])
    def test_s15_bad_keys_are_not_opened(self, store: Store, key: str) -> None:
        with pytest.raises(BadKey):
            open_body(store, key)

    @pytest.mark.parametrize("read", [0, 1, 10_000])
    def test_s15_nothing_is_read_past_the_end(self, store: Store, read: int) -> None:
        store.put("a.bin", pattern(10_000))
        with closing(open_body(store, "a.bin")) as body:
            body.readinto(memoryview(bytearray(read)))
            with pytest.raises(StoreUnavailable):
                body.readinto(memoryview(bytearray(10_001 - read)))

    @pytest.mark.parametrize("read", [0, 5, _MIDDLE])
    def test_s15_a_body_may_be_closed_at_any_time_and_twice(self, store: Store, read: int) -> None:
        data = pattern(_MIDDLE)
        store.put("a.bin", data)
        for _ in range(3):
            body = open_body(store, "a.bin")
            body.readinto(memoryview(bytearray(read)))
            body.close()
            body.close()
            with pytest.raises(StoreUnavailable):
                body.readinto(memoryview(bytearray(1)))
        with closing(open_body(store, "a.bin")) as again:
            assert read_unevenly(again) == data
        assert bytes(store.get("a.bin")) == data

    @pytest.mark.parametrize("read", [0, 100_000])
    def test_s15_a_body_is_of_one_object_though_it_is_replaced(self, store: Store, read: int) -> None:
        old, new = pattern(_MIDDLE), bytes(_MIDDLE)
        store.put("a.bin", old)
        with closing(open_body(store, "a.bin")) as body:
            front = bytearray(read)
            body.readinto(memoryview(front))
            store.put("a.bin", new)
            assert _rest_or_nothing(body, len(front), old) in (old[read:], None)
        with closing(open_body(store, "a.bin")) as body:
            assert read_unevenly(body) == new

    def test_s15_a_body_is_of_one_object_though_it_is_deleted(self, store: Store) -> None:
        old = pattern(_MIDDLE)
        store.put("a.bin", old)
        with closing(open_body(store, "a.bin")) as body:
            store.delete("a.bin")
            if not recycles(store):  # a store that recycles may give other bytes then
                store.put("b.bin", bytes(_MIDDLE))
            assert _rest_or_nothing(body, 0, old) in (old, None)
        with pytest.raises(KeyNotFound):
            open_body(store, "a.bin")

    def test_s15_bodies_do_not_mix(self, store: Store) -> None:
        """Several bodies in each of several threads."""
        objects = {f"{i}.bin": bytes([i]) * (500_000 + i) for i in range(12)}
        for key, data in objects.items():
            store.put(key, data)

        def read_three(first: int) -> bool:
            keys = [f"{i}.bin" for i in range(first, first + 3)]
            bodies = [open_body(store, key) for key in keys]
            found = [bytearray() for _ in keys]
            for start in range(0, 600_000, 100_000):
                for body, data in zip(bodies, found, strict=True):
                    piece = bytearray(max(0, min(100_000, body.size - start)))
                    body.readinto(memoryview(piece))
                    data += piece
            for body in bodies:
                body.close()
            return [bytes(data) for data in found] == [objects[key] for key in keys]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read_three, [0, 3, 6, 9] * 3))


class StoreContract(BodyClauses):
    """Clauses S1-S15. Subclasses define `new_store`, and as many of the fault fixtures as they can."""

    why_one_process_only: str = ""
    """Empty if other processes can open the store; otherwise the reason why they cannot."""
    why_no_faults: str = "no fault can be injected into this store"
    environment: Mapping[str, str] = {}
    """Variables that another process needs to open the store, besides those of this one."""

    @pytest.fixture
    def new_store(self) -> NewStore:
        """A function that returns a new, empty store for each name. All names share one bucket, folder or server."""
        pytest.fail(f"{type(self).__name__} must define the fixture `new_store`")

    @pytest.fixture
    def store(self, new_store: NewStore) -> Store:
        return new_store("run")

    @pytest.fixture
    def refused_store(self) -> Store:
        """A store that refuses access."""
        pytest.skip(self.why_no_faults)

    @pytest.fixture
    def throttled_store(self) -> Store:
        """A store that is throttled at every request, and stops retrying soon."""
        pytest.skip(self.why_no_faults)

    @pytest.fixture
    def unreachable_store(self) -> Store:
        """A store that does not answer."""
        pytest.skip(self.why_no_faults)

    @pytest.fixture
    def conflicting_store(self) -> Store:
        """A store whose first `create` conflicts (409) with another request that writes nothing."""
        pytest.skip(self.why_no_faults)

    @pytest.fixture
    def answer_losing_store(self) -> Store:
        """A store whose first `create` takes effect, but its answer is lost."""
        pytest.skip(self.why_no_faults)

    # S1 bytes come back as they were written

    @pytest.mark.parametrize("size", [0, 1, 4096, BIG])
    def test_s1_bytes_come_back(self, store: Store, size: int) -> None:
        data = pattern(size)
        store.put("put.bin", data)
        store.create("created.bin", data)
        assert bytes(store.get("put.bin")) == data
        assert bytes(store.get("created.bin")) == data

    def test_s1_several_buffers_become_one_object(self, store: Store) -> None:
        numbers: Any = memoryview(bytearray(8)).cast("d")
        parts: list[Any] = [b"head", bytearray(b"-"), memoryview(b"xbodyx")[1:5], b"", numbers]
        store.put("put.bin", parts)
        store.create("created.bin", parts)
        assert bytes(store.get("put.bin")) == bytes(store.get("created.bin")) == b"head-body" + bytes(8)

    @pytest.mark.parametrize("size", [0, 1, 700_001, 5 << 20])
    def test_s1_a_front_that_is_known_last_comes_first(self, store: Store, size: int) -> None:
        for write in (store.create, store.put):
            write("a.bin", Counted(pattern(size)))
            assert bytes(store.get("a.bin")) == f"{size:>1024}".encode() + pattern(size)

    def test_s1_an_object_does_not_change_with_the_buffer_it_came_from(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put("a.bin", buffer)
        buffer[:] = b"after!"
        assert bytes(store.get("a.bin")) == b"before"

    # S2 a missing key names itself

    def test_s2_a_missing_key_names_itself(self, store: Store) -> None:
        store.put("there/is.bin", b"x")
        for key in ("there/is-not.bin", "there", "there/is.bin/below", "nowhere/at/all"):
            with pytest.raises(KeyNotFound) as caught:
                store.get(key)
            assert caught.value.key == key
            assert key in str(caught.value)

    # S3 old or new, never part

    def test_s3_a_reader_sees_old_or_new(self, store: Store) -> None:
        versions = [bytes([65 + i]) * (300_000 + 50_000 * i) for i in range(4)]
        store.put("v.bin", versions[0])
        torn: list[int] = []

        def rewrite() -> None:
            for i in range(40):
                store.put("v.bin", versions[i % 4])

        writer = Thread(target=rewrite)
        writer.start()
        while writer.is_alive():
            found = bytes(store.get("v.bin"))
            if found not in versions:
                torn.append(len(found))
        writer.join()
        assert not torn, f"a reader saw {len(torn)} objects that were never written, of {torn[:5]} bytes"

    def test_s3_a_put_that_fails_leaves_the_old_object(self, store: Store) -> None:
        store.put("v.bin", b"old")
        with pytest.raises(TypeError):
            store.put("v.bin", [b"new", object()])  # type: ignore[list-item]
        assert bytes(store.get("v.bin")) == b"old"
        assert list(store.list()) == ["v.bin"]

    # S4 of many racing creates one wins

    def test_s4_create_refuses_a_taken_key(self, store: Store) -> None:
        store.create("a.json", b"first")
        with pytest.raises(KeyExists) as caught:
            store.create("a.json", b"second")
        assert caught.value.key == "a.json"
        assert bytes(store.get("a.json")) == b"first"
        store.put("b.json", b"first")
        with pytest.raises(KeyExists):
            store.create("b.json", b"first")

    @pytest.mark.parametrize("same_bytes", [False, True], ids=["own bytes", "same bytes"])
    def test_s4_one_of_sixteen_threads_wins(self, store: Store, same_bytes: bool) -> None:
        for attempt in range(5):
            key = f"race/{attempt}.json"
            offers = [b"same" if same_bytes else f"writer {i}".encode() * 500 for i in range(16)]
            winners = _race(store, key, offers)
            assert len(winners) == 1, f"{len(winners)} of 16 racing creates won"
            assert bytes(store.get(key)) == offers[winners[0]]

    def test_s4_one_of_sixteen_writers_in_four_processes_wins(self, store: Store) -> None:
        self._need_other_processes()
        winners = race_of_processes(store.uri, "race.json", processes=4, threads=4, environment=self.environment)
        assert len(winners) == 1, f"{len(winners)} of 16 racing creates won"
        assert bytes(store.get("race.json")) == winners[0]

    # S5 create after delete; delete twice

    def test_s5_create_works_again_after_delete(self, store: Store) -> None:
        store.create("a/b.json", b"first")
        store.delete("a/b.json")
        with pytest.raises(KeyNotFound):
            store.get("a/b.json")
        store.create("a/b.json", b"second")
        assert bytes(store.get("a/b.json")) == b"second"

    def test_s5_delete_is_quiet_if_there_is_nothing(self, store: Store) -> None:
        store.put("a.json", b"x")
        store.delete("a.json")
        store.delete("a.json")
        store.delete("never/was.json")
        assert list(store.list()) == []

    # S6 list is sorted, complete, and its prefix exact

    def test_s6_list_is_complete_and_sorted_past_a_thousand_keys(self, store: Store) -> None:
        keys = [f"part-{i % 7}/{i:05d}" for i in range(1100)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert list(store.list()) == sorted(keys)
        assert list(store.list("part-3/")) == sorted(key for key in keys if key.startswith("part-3/"))

    def test_s6_the_prefix_is_exact(self, store: Store) -> None:
        keys = ["a", "a!b", "a.b", "a/b", "a/b.c/d", "a/b/c", "a0", "ab", "ab/c", "b", "~", "é", "文/字"]
        for key in keys:
            store.put(key, key.encode())
        prefixes = ["", "a", "a/", "a/b", "a/b/", "a/b.", "ab", "b", "c", "é", "文", "文/字", "文/字/"]
        for prefix in prefixes:
            assert list(store.list(prefix)) == sorted(key for key in keys if key.startswith(prefix)), prefix
            sized = dict(list_sizes(store, prefix))
            assert list(sized) == list(store.list(prefix)), prefix
            assert all(size in (None, len(key.encode())) for key, size in sized.items())
        assert [bytes(store.get(key)).decode() for key in keys] == keys

    def test_s6_what_was_deleted_is_not_listed(self, store: Store) -> None:
        for key in ("a/1", "a/2", "a/3"):
            store.put(key, b"x")
        store.delete("a/2")
        assert list(store.list("a/")) == ["a/1", "a/3"]

    # S7 visible at once from another process

    def test_s7_another_process_sees_it_at_once(self, store: Store) -> None:
        self._need_other_processes()
        store.put("put.json", b"from here")
        store.create("new/created.json", b"also from here")
        seen = read_elsewhere(store.uri, environment=self.environment)
        assert seen == {"put.json": b"from here", "new/created.json": b"also from here"}

    def test_s7_what_another_process_wrote_is_seen_at_once(self, store: Store) -> None:
        self._need_other_processes()
        store.put("put.json", b"old")
        assert bytes(store.get("put.json")) == b"old"
        with pytest.raises(KeyNotFound):
            store.get("new/created.json")
        write_elsewhere(store.uri, "put.json", "new/created.json", b"from there", environment=self.environment)
        assert bytes(store.get("put.json")) == bytes(store.get("new/created.json")) == b"from there"
        assert list(store.list()) == ["new/created.json", "put.json"]

    # S8 unicode keys work; bad keys raise

    @pytest.mark.parametrize(
        "key",
        [
            "café/naïve.txt",
            "日本語/文.json",
            "emoji-🏝️",
            "a b+c%20d&e=f?g#h",
            "quote'\"`$(x);|<>*",
            "x" * 240,
            "~",
            ".hidden",
        ],
    )
    def test_s8_unusual_keys_work(self, store: Store, key: str) -> None:
        store.create(key, b"one")
        store.put(key, b"two")
        assert bytes(store.get(key)) == b"two"
        assert list(store.list()) == list(store.list(key)) == [key]
        store.delete(key)
        assert list(store.list()) == []

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", "a\\b", "a\nb", "a\0", "\ud800",
         "x" * 241, "x/" * 500 + "x"],
    )  # fmt: skip
    def test_s8_bad_keys_are_refused_by_every_verb(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.put(key, b""),
            lambda: store.create(key, b""),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(BadKey):
                call()
        assert list(store.list()) == []

    @pytest.mark.parametrize("prefix", ["/", "../", "a//b", "a/../b", "./", "a\nb"])
    def test_s8_a_prefix_no_key_can_have_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(BadKey):
            list(store.list(prefix))

    # S9 two prefixes do not leak

    def test_s9_stores_side_by_side_do_not_leak(self, new_store: NewStore) -> None:
        stores = {name: new_store(name) for name in ("exp", "exp-2", "exp2")}
        for name, store in stores.items():
            store.create("same/key.json", name.encode())
        for name, store in stores.items():
            assert list(store.list()) == ["same/key.json"]
            assert bytes(store.get("same/key.json")) == name.encode()
        stores["exp"].delete("same/key.json")
        assert list(stores["exp"].list()) == []
        assert bytes(stores["exp-2"].get("same/key.json")) == b"exp-2"

    # S10 the URI is the store

    def test_s10_the_uri_opens_the_same_store(self, store: Store) -> None:
        store.put("a/b.json", b"x")
        again = open_store(store.uri)
        assert again.uri == store.uri
        assert list(again.list()) == ["a/b.json"]
        again.put("a/b.json", b"y")
        assert bytes(store.get("a/b.json")) == b"y"

    # S11 refusal, throttling and silence are typed; a 409 is retried

    def test_s11_refusal_is_typed(self, refused_store: Store) -> None:
        for call in _every_verb(refused_store):
            with pytest.raises(StoreRefused) as caught:
                call()
            assert caught.value.__cause__ is not None
            assert not caught.value.retryable

    def test_s11_throttling_is_typed(self, throttled_store: Store) -> None:
        _expect_unavailable(throttled_store)

    def test_s11_silence_is_typed(self, unreachable_store: Store) -> None:
        _expect_unavailable(unreachable_store)

    def test_s11_a_racing_conflict_is_retried(self, conflicting_store: Store) -> None:
        conflicting_store.create("a.json", b"mine")
        assert bytes(conflicting_store.get("a.json")) == b"mine"
        with pytest.raises(KeyExists):
            conflicting_store.create("a.json", b"second")

    # S12 a lost answer is not a loss

    def test_s12_a_create_whose_answer_was_lost_has_won(self, answer_losing_store: Store) -> None:
        answer_losing_store.create("a.json", b"mine")
        assert bytes(answer_losing_store.get("a.json")) == b"mine"
        with pytest.raises(KeyExists):
            answer_losing_store.create("a.json", b"mine")

    # S13 ranges

    def test_s13_get_takes_a_range(self, store: Store) -> None:
        data = pattern(100_000)
        store.put("a.bin", data)
        for start, length in [(0, 1), (0, 0), (10, 20), (99_999, 1), (50_000, 50_000), (0, 100_000), (7, None)]:
            end = None if length is None else start + length
            assert bytes(store.get("a.bin", start=start, length=length)) == data[start:end], (start, length)

    def test_s13_a_range_past_the_end_gives_what_there_is(self, store: Store) -> None:
        store.put("a.bin", b"0123456789")
        assert bytes(store.get("a.bin", start=5, length=100)) == b"56789"
        assert bytes(store.get("a.bin", start=10, length=5)) == b""
        assert bytes(store.get("a.bin", start=50, length=5)) == b""
        assert bytes(store.get("a.bin", start=50)) == b""
        store.put("empty.bin", b"")
        assert bytes(store.get("empty.bin", start=0, length=5)) == b""

    def test_s13_bad_ranges_and_missing_keys_are_errors(self, store: Store) -> None:
        store.put("a.bin", b"0123456789")
        for start, length in [(-1, None), (0, -1), (-5, 2)]:
            with pytest.raises(ValueError, match="negative"):
                store.get("a.bin", start=start, length=length)
        for length in (0, 4):
            with pytest.raises(KeyNotFound):
                store.get("missing.bin", start=2, length=length)

    # S14 nothing unpickles

    def test_s14_nothing_on_the_read_path_unpickles(self, store: Store) -> None:
        store.put("bomb", BOMB)
        with unpickling_forbidden():
            assert list(store.list()) == ["bomb"]
            assert bytes(store.get("bomb")) == BOMB
            assert bytes(store.get("bomb", start=1, length=3)) == BOMB[1:4]
            assert bytes(open_store(store.uri).get("bomb")) == BOMB

    def _need_other_processes(self) -> None:
        if self.why_one_process_only:
            pytest.skip(self.why_one_process_only)


# ── helpers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def pattern(size: int) -> bytes:
    """Bytes in which any two positions differ, so that a shifted read is detected."""
    return b"".join(i.to_bytes(4, "big") for i in range(size // 4 + 1))[:size]


def read_unevenly(body: Body, read: int = 0) -> bytes:
    """Read the rest of a body in pieces of many sizes."""
    buffer = memoryview(bytearray(body.size - read))
    for piece in _cut(buffer):
        body.readinto(piece)
    return bytes(buffer)


def _cut(buffer: memoryview) -> Iterator[memoryview]:
    for step in cycle(_STEPS):
        if not buffer:
            return
        yield buffer[:step]
        buffer = buffer[step:]


def _rest_or_nothing(body: Body, read: int, old: bytes) -> bytes | None:
    """The rest of the body; None if the store raises `StoreUnavailable`."""
    assert body.size == len(old)
    try:
        return read_unevenly(body, read)
    except StoreUnavailable:
        return None


class Counted(HashedWhileWritten):
    """A payload after a front that contains how many of its bytes were hashed."""

    front_bytes = 1024

    def __init__(self, payload: bytes) -> None:
        self.payload = memoryview(payload)
        self._seen = 0

    def hash_and_norm(self, start: int, stop: int, out: memoryview | None = None) -> None:
        self._seen = stop if start in (0, self._seen) else -1
        if out is not None:
            out[:] = self.payload[start:stop]

    def front(self) -> Buffer:
        if self._seen == 0:
            self.hash_and_norm(0, len(self.payload))
        return f"{self._seen:>{self.front_bytes}}".encode()


def _race(store: Store, key: str, offers: list[bytes]) -> list[int]:
    """Create one key from many threads at once; returns the winners."""
    gate, winners = Barrier(len(offers)), []

    def write(i: int) -> None:
        gate.wait()
        try:
            store.create(key, offers[i])
        except KeyExists:
            return
        winners.append(i)

    with ThreadPoolExecutor(len(offers)) as pool:
        list(pool.map(write, range(len(offers))))
    return winners


def _every_verb(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.get("a.json"),
        lambda: open_body(store, "a.json"),
        lambda: store.put("a.json", b"x"),
        lambda: store.create("b.json", b"x"),
        lambda: list(store.list("a")),
        lambda: store.delete("a.json"),
    ]


def _expect_unavailable(store: Store) -> None:
    for call in _every_verb(store):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert caught.value.__cause__ is not None
        assert caught.value.retryable


def explode(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the read path unpickled an object of the store")


@contextmanager
def unpickling_forbidden() -> Iterator[None]:
    """While this is open, every function of `pickle` that loads raises."""
    with ExitStack() as patches:
        for module in ("pickle", "_pickle"):
            for name in ("load", "loads", "Unpickler"):
                patches.enter_context(patch.object(import_module(module), name, explode))
        yield


# ── other processes ─────────────────────────────────────────────────────────────────────────────────────────────

_READ = """
import json, sys
from atoll.registry import open_store
store = open_store(sys.argv[1])
print(json.dumps({key: bytes(store.get(key)).hex() for key in store.list()}))
"""

_WRITE = """
import sys
from atoll.registry import open_store
store = open_store(sys.argv[1])
store.put(sys.argv[2], bytes.fromhex(sys.argv[4]))
store.create(sys.argv[3], bytes.fromhex(sys.argv[4]))
"""

_RACE = """
import sys, threading
from atoll.errors import KeyExists
from atoll.registry import open_store
store, key, count = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[4])
try:
    store.get("warm-up")
except FileNotFoundError:
    pass
gate = threading.Barrier(count + 1)
def write(i):
    mine = f"process {sys.argv[3]} writer {i}" * 100
    gate.wait()
    try:
        store.create(key, mine.encode())
    except KeyExists:
        return
    print(mine, flush=True)
threads = [threading.Thread(target=write, args=(i,)) for i in range(count)]
for thread in threads: thread.start()
print("ready", flush=True)
sys.stdin.readline()
gate.wait()
for thread in threads: thread.join()
"""


def read_elsewhere(uri: str, *, environment: Mapping[str, str]) -> dict[str, bytes]:
    """Every object of the store, as another process sees it."""
    answer = _finish(_start(_READ, [uri], environment))
    return {key: bytes.fromhex(value) for key, value in json.loads(answer).items()}


def write_elsewhere(uri: str, put: str, create: str, data: bytes, *, environment: Mapping[str, str]) -> None:
    """`put` one object and `create` another from another process."""
    _finish(_start(_WRITE, [uri, put, create, data.hex()], environment))


def race_of_processes(
    uri: str, key: str, *, processes: int, threads: int, environment: Mapping[str, str]
) -> list[bytes]:
    """Threads of several processes `create` one key at the same moment; returns what the winners wrote."""
    racers = [_start(_RACE, [uri, key, str(i), str(threads)], environment) for i in range(processes)]
    try:
        for racer in racers:
            assert racer.stdout is not None
            racer.stdout.readline()
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return [line.encode() for racer in racers for line in _finish(racer).splitlines()]
    finally:
        for racer in racers:
            racer.kill()


def _start(code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"the other process failed:\n{err}"
    return out
